"""Multi-vector models and BGE-M3: served as their libraries answer, alone and in a batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from export.check.served import ServedSystem
from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.tasks import task_of
from tests.support.checkpoints import encoders
from tests.support.served import request, systems_once
from triton_transformers.corpus import MIXED

pytestmark = pytest.mark.usefixtures("stored")

TASK = "multi-vector-embedding"
TEXTS = ["Rain, in the VALLEY?", "a", "", MIXED.texts[3], "word " * 100]
QUERIES = ["What do bees eat?", "rain", "What do bees eat?", "", "word " * 100]
CASES = {
    "plain": functools.partial(encoders.save_multi_vector, query_length=12, document_length=40),
    "extended": functools.partial(
        encoders.save_multi_vector, expansion={"strategy": "min", "length": 16, "attend": False}
    ),
    "stanford": encoders.save_colbert,
    "pylate": encoders.save_pylate,
    "bge_m3": encoders.save_bge_m3,
}
RUNS = [("plain", "python"), ("extended", "onnx"), ("stanford", "onnx"), ("pylate", "python")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return functools.cache(lambda case: CASES[case](folder / case))


@pytest.fixture(scope="module")
def serve(checkpoint, tmp_path_factory) -> Iterator[Callable[[str, str], ServedSystem]]:
    with systems_once(tmp_path_factory) as served:
        yield lambda case, form: served(checkpoint(case), form)


@pytest.mark.parametrize(("case", "form"), RUNS)
def test_vectors_and_scores_equal_the_library(checkpoint, serve, case, form):
    from sentence_transformers import MultiVectorEncoder

    assert task_of(Checkpoint("m", checkpoint(case))) == TASK
    library, served = MultiVectorEncoder(str(checkpoint(case)), device="cpu"), serve(case, form)
    queries = library.encode_query(QUERIES, batch_size=1, convert_to_numpy=True)
    documents = library.encode_document(TEXTS, batch_size=1, convert_to_numpy=True)
    of_texts = request(TEXTS, query=QUERIES)
    of_queries = request(QUERIES, prompt_name="query")
    scores = library.similarity_pairwise(queries, documents).numpy()
    for answers in (served.together([of_texts, of_queries]), served.alone([of_texts, of_queries])):
        for answer, expected in zip(answers, (documents, queries), strict=True):
            for row, count, own in zip(answer["token_embeddings"], answer["vector_count"], expected, strict=True):
                assert count == [len(own)]
                np.testing.assert_allclose(row[: len(own)], own, atol=1e-5)
                assert not row[len(own) :].any()
        np.testing.assert_allclose(answers[0]["score"][:, 0], scores, rtol=1e-4)
        assert "score" not in answers[1]


@pytest.mark.parametrize("form", ["onnx", "python"])
def test_bge_m3_answers_three_kinds_of_vectors_of_one_run(checkpoint, serve, form):
    weights, served = checkpoint("bge_m3"), serve("bge_m3", form)
    inputs = [request(TEXTS, query=QUERIES), request(QUERIES)]
    runs = count_runs(served.models["m"])
    together = served.together(inputs)
    assert runs == [len(TEXTS) + 2 * len(QUERIES) - 1]  # the query that occurs twice runs once
    alone = served.alone(inputs)
    texts, queries = ([flag_embedding(weights, text) for text in column] for column in (TEXTS, QUERIES))
    for answers in (together, alone):
        for answer, expected in zip(answers, (texts, queries), strict=True):
            dense, sparse, vectors = zip(*expected, strict=True)
            np.testing.assert_allclose(answer["sentence_embedding"], np.array(dense), atol=1e-5)
            for row, count, own in zip(answer["token_embeddings"], answer["vector_count"], vectors, strict=True):
                assert count == [len(own)]
                np.testing.assert_allclose(row[: len(own)], own, atol=1e-5)
            for row, own in enumerate(sparse):
                ids, found = answer["token_id"][row], answer["weight"][row]
                assert {*ids[ids >= 0]} == {*own}
                np.testing.assert_allclose(found[ids >= 0], [own[id] for id in ids[ids >= 0]], atol=1e-5)
                assert (np.diff(found) <= 0).all()
        scores = [(q @ d.T).max(1).sum() / len(q) for (*_, q), (*_, d) in zip(queries, texts, strict=True)]
        np.testing.assert_allclose(answers[0]["score"][:, 0], scores, atol=1e-5)


def count_runs(model) -> list[int]:
    """Return a list that gets the number of rows of each run from now on."""
    runs = getattr(model, "backend", model).runs
    rows, run_rows = [], runs.run_rows
    runs.run_rows = lambda texts: rows.append(len(texts)) or run_rows(texts)
    return rows


def flag_embedding(weights: Path, text: str):
    """Return dense_vecs, lexical_weights and colbert_vecs as BGEM3FlagModel.encode() computes them."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    encoder = transformers.AutoModel.from_pretrained(weights).eval()
    heads = [torch.load(weights / f"{name}_linear.pt", weights_only=True) for name in ("sparse", "colbert")]
    tokens = tokenizer(text, truncation=True, max_length=encoders.POSITIONS, return_tensors="pt")
    with torch.no_grad():
        hidden = encoder(**tokens).last_hidden_state
        weight, vectors = (torch.nn.functional.linear(hidden, head["weight"], head["bias"])[0] for head in heads)
    unused = {tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    lexical: dict[int, float] = {}
    for own, id in zip(weight[:, 0].relu().tolist(), tokens["input_ids"][0].tolist(), strict=True):
        if id not in unused and own > lexical.get(id, 0.0):
            lexical[id] = own
    normalize = torch.nn.functional.normalize
    return normalize(hidden[0, 0], dim=0).numpy(), lexical, normalize(vectors[1:], dim=-1).numpy()
