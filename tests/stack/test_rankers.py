"""Language models that rank, and models with a network for queries: on a real Triton, for clients at the same time."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from export.recipes.text.ranking import QWEN3_TEMPLATE
from tests.support.checkpoints import encoders, language
from tests.support.stacks import TestStack
from triton_transformers.corpus import MIXED

pytestmark = pytest.mark.slow

TEXTS = [*MIXED.texts[:15], "word " * 300]
CLIENTS = 16
PROMPTS = {"prompts": {"query": "question: ", "passage": "passage: "}}
SYSTEMS = {
    "judge": (language.save_qwen3_reranker, {"TASK": "text-ranking"}),
    "pairs": (lambda folder: encoders.save_router(folder, **PROMPTS), {}),
    "words": (lambda folder: encoders.save_router(folder, is_sparse=True), {}),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: save(folder / name) for name, (save, _) in SYSTEMS.items()}


@pytest.fixture(scope="module")
def served(stack, checkpoints) -> TestStack:
    stack.assemble(
        *({"SYSTEMS": name, "SOURCE": checkpoints[name]} | settings for name, (_, settings) in SYSTEMS.items())
    )
    return stack.serve(*SYSTEMS)


def by_clients(requests: list[dict[str, list[str]]], ask_one: Callable[..., dict[str, np.ndarray]]) -> list[dict]:
    """Send each request alone, from many clients at the same time."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(lambda columns: ask_one(**columns), requests))


def test_language_model_ranks_as_cross_encoder(served, checkpoints):
    from sentence_transformers import CrossEncoder  # takes 8 s of CPU time

    library = CrossEncoder(
        str(checkpoints["judge"]),
        device="cpu",
        processor_kwargs={"chat_template": QWEN3_TEMPLATE.read_text(), "model_max_length": language.RANKED},
    )
    instructions = [None, "Find what the weather is like"]
    rows = list(itertools.product(["Which one?", "rain"], TEXTS, instructions))
    requests = [
        {"query": [query], "text": [text]} | ({"prompt": [instruction]} if instruction else {})
        for query, text, instruction in rows
    ]
    answers = by_clients(requests, lambda **columns: served.ask("judge", **columns))
    expected = [library.predict([(query, text)], prompt=instruction)[0] for query, text, instruction in rows]
    np.testing.assert_allclose([answer["score"].item() for answer in answers], expected, atol=1e-4)
    assert np.std(expected) > 1e-3


@pytest.mark.parametrize(("system", "kind"), [("pairs", "SentenceTransformer"), ("words", "SparseEncoder")])
def test_queries_and_documents_take_their_own_network(served, checkpoints, system, kind):
    library = getattr(importlib.import_module("sentence_transformers"), kind)(str(checkpoints[system]), device="cpu")
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
