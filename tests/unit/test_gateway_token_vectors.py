"""The gateway before multi-vector models, BGE-M3 and models with late chunking."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from gateway.config import Config
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.triton_stand_in import Model, TritonStandIn, embedding, token_counts, vector
from triton_transformers.tensors import Tensor

NAMES = ["m3", "chunked", "embedding"]


def m3() -> Model:
    """Return a model with three kinds of vectors: each word has one, but not the word "the", and a query a score."""

    def answer(inputs: dict[str, Tensor]) -> Iterable[list[Tensor]]:
        texts = inputs["input_text"].texts()
        words = [[word for word in text.split() if word != "the"] for text in texts]
        vectors = np.zeros((len(texts), max(map(len, words)), 2), "f")
        for row, own in zip(vectors, words, strict=True):
            row[: len(own)] = [[len(word), 1] for word in own]
        tensors = [
            Tensor.from_values("sentence_embedding", "FP32", [vector(text) for text in texts]),
            Tensor.from_values("token_id", "INT64", [[len(text), -1] for text in texts]),
            Tensor.from_values("weight", "FP32", [[0.5, 0] for _ in texts]),
            Tensor.from_values("token_embeddings", "FP32", vectors),
            Tensor.from_values("vector_count", "INT32", [[len(own)] for own in words]),
            token_counts(texts),
        ]
        if "query" in inputs:
            pairs = zip(inputs["query"].texts(), words, strict=True)
            scores = [[sum(word in own for word in query.split())] for query, own in pairs]
            tensors.append(Tensor.from_values("score", "FP32", scores))
        yield tensors

    inputs = {"input_text": ("STRING", [1]), "query": ("STRING", [1])}
    outputs = {
        "sentence_embedding": ("FP32", [4]),
        "token_id": ("INT64", [-1]),
        "weight": ("FP32", [-1]),
        "token_embeddings": ("FP32", [-1, 2]),
        "vector_count": ("INT32", [1]),
        "score": ("FP32", [1]),
        "token_count": ("INT32", [1]),
    }
    return Model("m3", inputs, outputs, answer, optional=("query",))


def chunked() -> Model:
    """Return a model whose vector of a span is that of its characters."""

    def answer(inputs: dict[str, Tensor]) -> Iterable[list[Tensor]]:
        (text,), (spans,) = inputs["input_text"].texts(), inputs["spans"].array()
        vectors = [[vector(text[start:end]) for start, end in spans]]
        yield [Tensor.from_values("span_embeddings", "FP32", vectors), token_counts([text])]

    inputs = {"input_text": ("STRING", [1]), "spans": ("INT64", [-1, 2])}
    outputs = {"sentence_embedding": ("FP32", [4]), "span_embeddings": ("FP32", [-1, 4]), "token_count": ("INT32", [1])}
    return Model("chunked", inputs, outputs, answer, optional=("spans",))


@pytest.fixture(scope="module")
def triton() -> Iterator[TritonStandIn]:
    with TritonStandIn(m3(), chunked(), embedding()) as stand_in:
        yield stand_in


@pytest.fixture(scope="module")
def gateway(triton: TritonStandIn) -> Iterator[RunningGateway]:
    with running_gateway(Config(triton=triton.address, systems=tuple(NAMES))) as running:
        yield running


def ask(gateway: RunningGateway, path: str = "/v1/embeddings", **fields: Any) -> Any:
    reply = gateway.post(path, fields)
    assert reply.status == 200, reply.body
    return reply.json


def embeddings(gateway: RunningGateway, **fields: Any) -> list[Any]:
    return [item["embedding"] for item in ask(gateway, **fields)["data"]]


def test_each_type_asks_for_its_own_outputs(gateway: RunningGateway, triton: TritonStandIn) -> None:
    triton.received.clear()
    texts = ["the sea", "rain falls"]
    assert embeddings(gateway, model="m3", input=texts) == [pytest.approx(vector(text)) for text in texts]
    assert embeddings(gateway, model="m3", input=texts, embedding_type="sparse") == [
        {"indices": [len(text)], "values": [0.5]} for text in texts
    ]
    assert embeddings(gateway, model="m3", input=texts, embedding_type="multi") == [[[3, 1]], [[4, 1], [5, 1]]]
    assert [set(request.outputs) - {"token_count"} for request in triton.received] == [
        {"sentence_embedding"},
        {"token_id", "weight"},
        {"token_embeddings", "vector_count"},
    ]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_multi_vector_model_reranks_without_sending_vectors(
    gateway: RunningGateway, triton: TritonStandIn, path: str
) -> None:
    triton.received.clear()
    answer = ask(gateway, path, model="m3", query="rain falls", documents=["the sea", "rain falls", "rain"])
    assert [result["index"] for result in answer["results"]] == [1, 2, 0]
    assert [result["relevance_score"] for result in answer["results"]] == [2, 1, 0]
    (request,) = triton.received
    assert {*request.outputs} == {"score", "token_count"}


def test_late_chunking_has_a_vector_for_each_chunk(gateway: RunningGateway, triton: TritonStandIn) -> None:
    triton.received.clear()
    chunks = ["Berlin is a city. ", "Größe: ", "3.9 million."]
    answer = ask(gateway, model="chunked", input=chunks, late_chunking=True)
    assert [item["embedding"] for item in answer["data"]] == [pytest.approx(vector(chunk)) for chunk in chunks]
    assert [item["index"] for item in answer["data"]] == [0, 1, 2]
    (request,) = triton.received
    assert request.inputs["input_text"].texts() == ["".join(chunks)]
    assert answer["usage"]["prompt_tokens"] == len("".join(chunks).split()) + 2
    (short,) = embeddings(gateway, model="chunked", input=chunks[:1], late_chunking=True, dimensions=2)
    assert np.linalg.norm(short) == pytest.approx(1) and len(short) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "embedding"}, "late_chunking"),
        ({"dimensions": 9}, "dimensions"),
        ({"input": [[1, 2]]}, "input"),
    ],
)
def test_late_chunking_that_is_not_possible_is_refused(
    gateway: RunningGateway, fields: dict[str, Any], param: str
) -> None:
    reply = gateway.post("/v1/embeddings", {"model": "chunked", "input": ["a"], "late_chunking": True} | fields)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_instruction_for_token_vectors_is_refused(gateway: RunningGateway) -> None:
    fields = {"model": "m3", "query": "a", "documents": ["a"], "instruction": "Find it."}
    reply = gateway.post("/v1/rerank", fields)
    assert (reply.status, reply.error["param"]) == (400, "instruction")
