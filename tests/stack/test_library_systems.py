"""Rankers, Router, multi-vector models, BGE-M3 and late chunking on a real Triton: the answers of the libraries."""

from __future__ import annotations

import itertools
import json
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder

from tests.support.batches import batches_of
from tests.support.checkpoints import encoders, language
from tests.support.stacks import TestStack
from triton_transformers.corpus import MIXED
from triton_transformers.models.exporters.ranking_model import QWEN3_TEMPLATE
from triton_transformers.triton import TritonError

pytestmark = pytest.mark.slow

TEXTS = [*MIXED.texts[:15], "word " * 300]
CLIENTS = 16
SHORT_TEXTS = [text for text in MIXED.texts if len(text) < 60][:16]
QUERY = "Which battery fits?"
PROMPTS = {"prompts": {"query": "question: ", "passage": "passage: "}}
SYSTEMS = {
    "judge": (language.save_qwen3_reranker, {"TASK": "text-ranking"}),
    "judge_python": (language.save_qwen3_reranker, {"TASK": "text-ranking", "FORMAT": "python"}),
    "pairs": (lambda folder: encoders.save_router(folder, **PROMPTS), {}),
    "words": (lambda folder: encoders.save_router(folder, is_sparse=True), {}),
    "colbert": (encoders.save_colbert, {}),
    "m3": (encoders.save_bge_m3, {}),
    "chunks": (lambda folder: encoders.save_sentence_transformer(folder, transformer={"max_seq_length": 64}), {}),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: save(folder / name) for name, (save, _) in SYSTEMS.items()}


@pytest.fixture(scope="module")
def served(new_stack, checkpoints) -> Iterator[TestStack]:
    stack = new_stack()
    stack.assemble(
        *({"SYSTEMS": name, "SOURCE": checkpoints[name]} | settings for name, (_, settings) in SYSTEMS.items())
    )
    done = stack.make("up", SYSTEMS=" ".join(SYSTEMS))
    assert done.returncode == 0, done.stdout + done.stderr
    yield stack
    stack.make("down")


def by_clients(requests: list[dict[str, list[str]]], ask_one: Callable[..., dict[str, np.ndarray]]) -> list[dict]:
    """Send each request alone, from many clients at the same time."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(lambda columns: ask_one(**columns), requests))


@pytest.mark.parametrize("system", ["judge", "judge_python"])
def test_language_model_ranks_as_cross_encoder(served, checkpoints, system):
    library = CrossEncoder(
        str(checkpoints[system]),
        device="cpu",
        processor_kwargs={"chat_template": QWEN3_TEMPLATE.read_text(), "model_max_length": language.RANKED},
    )
    instructions = [None, "Find what the weather is like"]
    rows = list(itertools.product(["Which one?", "rain"], TEXTS, instructions))
    requests = [
        {"query": [query], "text": [text]} | ({"prompt": [instruction]} if instruction else {})
        for query, text, instruction in rows
    ]
    answers = by_clients(requests, lambda **columns: served.ask(system, **columns))
    expected = [library.predict([(query, text)], prompt=instruction)[0] for query, text, instruction in rows]
    np.testing.assert_allclose([answer["score"].item() for answer in answers], expected, atol=1e-4)
    assert np.std(expected) > 1e-3


@pytest.mark.parametrize(("system", "kind"), [("pairs", SentenceTransformer), ("words", SparseEncoder)])
def test_queries_and_documents_take_their_own_network(served, checkpoints, system, kind):
    library = kind(str(checkpoints[system]), device="cpu")
    methods = {"query": library.encode_query, "document": library.encode_document, "": library.encode}
    rows = list(itertools.product(methods, TEXTS))
    requests = [{"input_text": [text]} | ({"prompt_name": [name]} if name else {}) for name, text in rows]
    answers = by_clients(requests, lambda **columns: served.ask(system, **columns))
    for answer, (name, text) in zip(answers, rows, strict=True):
        if system == "pairs":
            np.testing.assert_allclose(answer["sentence_embedding"][0], methods[name](text), atol=1e-4)
            continue
        expected = methods[name](text, convert_to_sparse_tensor=False).numpy()
        actual = np.zeros_like(expected)
        actual[answer["token_id"][0]] = answer["weight"][0]
        np.testing.assert_allclose(actual, expected, atol=1e-4)


# --- vectors of tokens and of spans -----------------------------------------------------------------------------------


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


def post(stack: TestStack, path: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{stack.environment['GATEWAY_PORT']}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def test_clients_at_once_get_the_librarys_vectors_and_scores(served, checkpoints):
    from sentence_transformers import MultiVectorEncoder

    library = MultiVectorEncoder(str(checkpoints["colbert"]), device="cpu")
    documents = library.encode_document(SHORT_TEXTS, batch_size=1, convert_to_numpy=True)
    (query,) = library.encode_query([QUERY], convert_to_numpy=True)
    scores = library.similarity([query], documents).numpy()[0]
    outputs = ["token_embeddings", "vector_count", "score"]
    with batches_of(served, "colbert", CLIENTS), ThreadPoolExecutor(CLIENTS) as clients:
        answers = [
            *clients.map(lambda text: ask(served, "colbert", outputs, input_text=[text], query=[QUERY]), SHORT_TEXTS)
        ]
    for answer, expected, score in zip(answers, documents, scores, strict=True):
        assert answer["vector_count"] == [[len(expected)]]
        np.testing.assert_allclose(answer["token_embeddings"][0], expected, atol=1e-4)
        np.testing.assert_allclose(answer["score"], [[score]], rtol=1e-3)
    of_query = ask(served, "colbert", outputs[:2], input_text=[QUERY], prompt_name=["query"])
    np.testing.assert_allclose(of_query["token_embeddings"][0], query, atol=1e-4)
    with pytest.raises(TritonError, match="output 'score' needs the input 'query'"):
        ask(served, "colbert", ["score"], input_text=["a"])
    ranked = post(served, "/v1/rerank", model="colbert", query=QUERY, documents=SHORT_TEXTS)["results"]
    assert [result["index"] for result in ranked] == np.argsort(-scores, kind="stable").tolist()
    np.testing.assert_allclose([result["relevance_score"] for result in ranked], np.sort(scores)[::-1], rtol=1e-3)


def test_bge_m3_answers_what_is_asked_for_from_one_run(served):
    names = ["sentence_embedding", "token_id", "weight", "token_embeddings", "vector_count"]
    before = served.triton.statistics()["m3"]
    answer = ask(served, "m3", names, input_text=SHORT_TEXTS)
    assert served.executions("m3", len(SHORT_TEXTS), before) == 1
    for name in names:
        np.testing.assert_array_equal(ask(served, "m3", [name], input_text=SHORT_TEXTS)[name], answer[name])
    types = {name: post(served, "/v1/embeddings", model="m3", input=SHORT_TEXTS, **fields)["data"] for name, fields in {
        "dense": {}, "sparse": {"embedding_type": "sparse"}, "multi": {"embedding_type": "multi"},
    }.items()}  # fmt: skip
    for row, count in enumerate(answer["vector_count"][:, 0]):
        dense, sparse, multi = (types[name][row]["embedding"] for name in ("dense", "sparse", "multi"))
        np.testing.assert_allclose(dense, answer["sentence_embedding"][row], atol=1e-6)
        assert sparse["indices"] == [id for id in answer["token_id"][row].tolist() if id >= 0]
        np.testing.assert_allclose(multi, answer["token_embeddings"][row, :count], atol=1e-6)


def test_late_chunking_gives_each_chunk_a_vector_of_its_context(served, checkpoints):
    chunks = [f"{SHORT_TEXTS[0]} ", SHORT_TEXTS[1]]
    ends = [len(chunks[0]), len("".join(chunks))]
    answer = ask(
        served, "chunks", ["span_embeddings"], [[[0, ends[0]], ends]], input_text=["".join(chunks)]
    )["span_embeddings"][0]  # fmt: skip
    data = post(served, "/v1/embeddings", model="chunks", input=chunks, late_chunking=True)["data"]
    np.testing.assert_allclose([item["embedding"] for item in data], answer, atol=1e-6)
    alone = ask(served, "chunks", ["sentence_embedding"], input_text=chunks)["sentence_embedding"]
    assert ((alone * answer).sum(axis=1) < 0.999).all()  # the other chunk changes both
    # Without spans, the answer has none.
    assert ask(served, "chunks", ["span_embeddings"], input_text=["a"])["span_embeddings"].shape == (1, 0, 32)


@pytest.mark.parametrize("system", ["colbert", "m3", "chunks"])
def test_smoke_accepts_the_system(served, system):
    done = served.make("smoke", SYSTEMS=system)
    assert done.returncode == 0, done.stdout + done.stderr
