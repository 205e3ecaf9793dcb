"""Multi-vector models, BGE-M3 and late chunking on a real Triton and gateway: the libraries' answers, in one run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.batches import batches_of
from tests.support.checkpoints import encoders
from tests.support.stacks import TestStack
from triton_transformers.corpus import MIXED
from triton_transformers.triton import TritonError

pytestmark = pytest.mark.slow

TEXTS = [text for text in MIXED.texts if len(text) < 60][:16]
QUERY = "Which battery fits?"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        "colbert": encoders.save_colbert(folder / "colbert"),
        "m3": encoders.save_bge_m3(folder / "m3"),
        "chunks": encoders.save_sentence_transformer(folder / "chunks", transformer={"max_seq_length": 64}),
    }


@pytest.fixture(scope="module")
def served(stack, checkpoints) -> TestStack:
    stack.assemble(*({"SYSTEMS": name, "SOURCE": folder} for name, folder in checkpoints.items()))
    return stack.serve(*checkpoints)


def ask(
    stack: TestStack, system: str, outputs: list[str], spans: Any = None, **columns: list[str]
) -> dict[str, np.ndarray]:
    inputs: list[dict[str, Any]] = [
        {"name": name, "shape": [len(texts), 1], "datatype": "BYTES", "data": texts} for name, texts in columns.items()
    ]
    if spans is not None:
        shape = np.shape(spans)
        inputs.append({"name": "spans", "shape": shape, "datatype": "INT64", "data": np.ravel(spans).tolist()})
    answer = stack.triton.infer(system, {"inputs": inputs, "outputs": [{"name": name} for name in outputs]})
    assert {output["name"] for output in answer["outputs"]} == {*outputs}
    return {output["name"]: np.array(output["data"]).reshape(output["shape"]) for output in answer["outputs"]}


def test_clients_at_once_get_the_librarys_vectors_and_scores(served, checkpoints):
    from sentence_transformers import MultiVectorEncoder

    library = MultiVectorEncoder(str(checkpoints["colbert"]), device="cpu")
    documents = library.encode_document(TEXTS, batch_size=1, convert_to_numpy=True)
    (query,) = library.encode_query([QUERY], convert_to_numpy=True)
    scores = library.similarity([query], documents).numpy()[0]
    outputs = ["token_embeddings", "vector_count", "score"]
    with batches_of(served, "colbert", len(TEXTS)), ThreadPoolExecutor(len(TEXTS)) as clients:
        answers = [*clients.map(lambda text: ask(served, "colbert", outputs, input_text=[text], query=[QUERY]), TEXTS)]
    for answer, expected, score in zip(answers, documents, scores, strict=True):
        assert answer["vector_count"] == [[len(expected)]]
        np.testing.assert_allclose(answer["token_embeddings"][0], expected, atol=1e-4)
        np.testing.assert_allclose(answer["score"], [[score]], rtol=1e-3)
    of_query = ask(served, "colbert", outputs[:2], input_text=[QUERY], prompt_name=["query"])
    np.testing.assert_allclose(of_query["token_embeddings"][0], query, atol=1e-4)
    with pytest.raises(TritonError, match="output 'score' needs the input 'query'"):
        ask(served, "colbert", ["score"], input_text=["a"])
    ranked = served.post("/v1/rerank", model="colbert", query=QUERY, documents=TEXTS)["results"]
    assert [result["index"] for result in ranked] == np.argsort(-scores, kind="stable").tolist()
    np.testing.assert_allclose([result["relevance_score"] for result in ranked], np.sort(scores)[::-1], rtol=1e-3)


def test_bge_m3_answers_what_is_asked_for_from_one_run(served):
    names = ["sentence_embedding", "token_id", "weight", "token_embeddings", "vector_count"]
    before = served.triton.statistics()["m3"]
    answer = ask(served, "m3", names, input_text=TEXTS)
    assert served.executions("m3", len(TEXTS), before) == 1
    for name in names:
        np.testing.assert_array_equal(ask(served, "m3", [name], input_text=TEXTS)[name], answer[name])
    types = {name: served.post("/v1/embeddings", model="m3", input=TEXTS, **fields)["data"] for name, fields in {
        "dense": {}, "sparse": {"embedding_type": "sparse"}, "multi": {"embedding_type": "multi"},
    }.items()}  # fmt: skip
    for row, count in enumerate(answer["vector_count"][:, 0]):
        dense, sparse, multi = (types[name][row]["embedding"] for name in ("dense", "sparse", "multi"))
        np.testing.assert_allclose(dense, answer["sentence_embedding"][row], atol=1e-6)
        assert sparse["indices"] == [id for id in answer["token_id"][row].tolist() if id >= 0]
        np.testing.assert_allclose(multi, answer["token_embeddings"][row, :count], atol=1e-6)


def test_late_chunking_gives_each_chunk_a_vector_of_its_context(served, checkpoints):
    chunks = [f"{TEXTS[0]} ", TEXTS[1]]
    ends = [len(chunks[0]), len("".join(chunks))]
    answer = ask(
        served, "chunks", ["span_embeddings"], [[[0, ends[0]], ends]], input_text=["".join(chunks)]
    )["span_embeddings"][0]  # fmt: skip
    data = served.post("/v1/embeddings", model="chunks", input=chunks, late_chunking=True)["data"]
    np.testing.assert_allclose([item["embedding"] for item in data], answer, atol=1e-6)
    alone = ask(served, "chunks", ["sentence_embedding"], input_text=chunks)["sentence_embedding"]
    assert ((alone * answer).sum(axis=1) < 0.999).all()  # the other chunk changes both
    # Without spans, the answer has none.
    assert ask(served, "chunks", ["span_embeddings"], input_text=["a"])["span_embeddings"].shape == (1, 0, 32)


def test_smoke_accepts_the_systems(served):
    done = served.make("smoke")
    assert done.returncode == 0, done.stdout + done.stderr
