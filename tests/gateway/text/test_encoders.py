"""POST /v1/embeddings, /v1/rerank and /v1/classify, with a stand-in for Triton."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from gateway.edge.config import Limits
from gateway.text.encoders import shaped
from gateway.triton.context import PARTS_AT_ONCE
from tests.support.gateway import Reply, RunningGateway, gateway_before
from tests.support.triton_stand_in import (
    Failure,
    Model,
    TritonStandIn,
    classifier,
    embedding,
    ids_of,
    read_rows,
    reranker,
    sparse,
    token_counts,
    token_encoder,
    vector,
)
from triton_transformers.tensors import Tensor

EMBEDDINGS, RERANK, CLASSIFY = "/v1/embeddings", "/v1/rerank", "/v1/classify"
MAX_BATCH = 4
TEXTS = [f"text {'word ' * number}" for number in range(10)]
DOCUMENTS = ["nothing", "a red house", "red", "house and home"]
# The fields of a good request to each path.
GOOD: dict[str, dict[str, Any]] = {
    EMBEDDINGS: {"model": "embedding", "input": "a"},
    RERANK: {"model": "reranker", "query": "red house", "documents": DOCUMENTS},
    CLASSIFY: {"model": "classifier", "input": "good"},
}


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


def with_input(model: Model, name: str) -> Model:
    model.inputs[name] = ("STRING", [1])
    return model


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[RunningGateway, TritonStandIn]]:
    models = [
        embedding(max_batch=MAX_BATCH),
        embedding("uncounted", counts=False),
        with_input(embedding("prompted"), "prompt_name"),
        classifier(max_batch=3),
        with_input(classifier("pairs", max_batch=3), "text_pair"),
        reranker(max_batch=3),
        with_input(reranker("instructed", max_batch=3), "prompt"),
        *(sparse(), token_encoder(), m3(), chunked()),
    ]
    with gateway_before(*models, limits=Limits(texts=100)) as served:
        yield served


def ask(gateway: RunningGateway, path: str = EMBEDDINGS, **fields: Any) -> Any:
    reply = gateway.post(path, GOOD[path] | fields)
    assert reply.status == 200, reply.body
    return reply.json


def vectors(answer: Any) -> list[Any]:
    return [item["embedding"] for item in answer["data"]]


def from_base64(encoded: str) -> Any:
    return np.frombuffer(base64.b64decode(encoded), "<f4")


# --- embeddings -------------------------------------------------------------------------------------------------------


def test_embeddings_have_openais_form(gateway: RunningGateway, triton: TritonStandIn) -> None:
    assert ask(gateway, input="two words") == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": pytest.approx(vector("two words"))}],
        "model": "embedding",
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    }
    assert triton.received[0].outputs == ["output__0", "token_count"]  # no others, which would cost time
    (encoded,) = vectors(ask(gateway, input="a", encoding_format="base64"))
    assert from_base64(encoded) == pytest.approx(vector("a"))
    assert ask(gateway, model="uncounted")["usage"] is None


@pytest.mark.parametrize("count", [1, MAX_BATCH, MAX_BATCH + 1, 40])  # the last are more parts than Triton gets at once
def test_texts_are_split_into_batches_and_keep_their_order(
    gateway: RunningGateway, triton: TritonStandIn, count: int
) -> None:
    texts = (TEXTS * 4)[:count]
    answer = ask(gateway, input=texts)
    assert [item["index"] for item in answer["data"]] == list(range(count))
    assert np.array(vectors(answer)) == pytest.approx(np.array([vector(text) for text in texts]))
    assert answer["usage"]["prompt_tokens"] == sum(len(text.split()) + 2 for text in texts)
    sizes = sorted(received.inputs["input_text"].shape[0] for received in triton.received)
    assert sum(sizes) == count and len(sizes) == -(-count // MAX_BATCH)


def test_client_that_leaves_costs_the_parts_that_triton_has(gateway: RunningGateway, triton: TritonStandIn) -> None:
    model = triton.models["embedding"]
    triton.cancelled.clear()
    model.gate.clear()
    try:
        with gateway.sent("POST", EMBEDDINGS, {"model": "embedding", "input": TEXTS * 4}):
            triton.wait_until(lambda: len(triton.running) == PARTS_AT_ONCE)
        triton.wait_until(lambda: len(triton.cancelled) == PARTS_AT_ONCE)
        gateway.wait_until(lambda: gateway.app.counters.running == 0)
        assert len(triton.received) == PARTS_AT_ONCE
    finally:
        model.gate.set()


def test_long_requests_share_the_parts_that_triton_has(gateway: RunningGateway, triton: TritonStandIn) -> None:
    """They take turns: the last one gets its first part before the first one gets its third."""
    model = triton.models["embedding"]
    model.gate.clear()
    count = 4 * PARTS_AT_ONCE * MAX_BATCH
    with contextlib.ExitStack() as stack:
        responses = []
        for number in range(3):
            body = {"model": "embedding", "input": [f"{number} a"] * count}
            responses.append(stack.enter_context(gateway.sent("POST", EMBEDDINGS, body)))
            gateway.wait_until(lambda number=number: gateway.app.counters.running == number + 1)
        triton.wait_until(lambda: len(triton.running) == PARTS_AT_ONCE)
        assert len(triton.received) == PARTS_AT_ONCE
        model.gate.set()
        assert [response().status for response in responses] == [200] * 3
    owners = [received.inputs["input_text"].texts()[0][0] for received in triton.received]
    assert owners.index("2") < len(owners) // 2
    assert owners != sorted(owners)


def test_failed_part_cancels_the_others(
    gateway: RunningGateway, triton: TritonStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = triton.models["embedding"]
    answer = model.answer

    def fail_for_some(inputs: Any) -> Any:
        if "fail" in inputs["input_text"].texts():
            triton.wait_until(lambda: len(triton.running) == 3)
            raise Failure(grpc.StatusCode.INTERNAL, "a secret of the server")
        return answer(inputs)

    triton.cancelled.clear()
    model.gate.clear()
    monkeypatch.setattr(model, "answer", fail_for_some)
    try:
        reply = gateway.post(EMBEDDINGS, {"model": "embedding", "input": [*TEXTS, "fail"]})
        triton.wait_until(lambda: len(triton.cancelled) == 2)
    finally:
        model.gate.set()
    assert (reply.status, reply.error["type"]) == (500, "server_error")
    assert "secret" not in reply.error["message"]


def test_dimensions_truncate_and_renormalise(gateway: RunningGateway) -> None:
    (short,) = vectors(ask(gateway, input="abc", dimensions=2))
    expected = np.array(vector("abc")[:2])
    assert short == pytest.approx(list(expected / np.linalg.norm(expected)))
    assert vectors(ask(gateway, input="abc", dimensions=4)) == [pytest.approx(vector("abc"))]
    assert shaped(np.array([[0, 0, 1]], "f"), 2, normalize=False).tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"task": "retrieval.query"}, "retrieval.query|query|"),
        ({"task": "retrieval.passage"}, "retrieval.passage|document|"),
        ({"task": "classification"}, "classification|"),
        ({"input_type": "passage"}, "passage|document|"),
        ({"input_type": "query"}, "query|"),
        ({"input_type": "query", "prompt_name": "web"}, "web"),
    ],
)
def test_purpose_of_the_texts_chooses_a_prompt(
    gateway: RunningGateway, triton: TritonStandIn, fields: dict[str, str], names: str
) -> None:
    ask(gateway, input=["a", "b"], model="prompted", **fields)
    assert triton.received[0].inputs["prompt_name"].texts() == [names] * 2
    ask(gateway, **{name: value for name, value in fields.items() if name != "prompt_name"})
    assert "prompt_name" not in triton.received[1].inputs


def test_fields_that_ask_for_nothing_are_accepted(gateway: RunningGateway) -> None:
    for fields in ({"user": "me"}, {"dimensions": None}, {"dimensions": 0}, {"metadata": {}}, {"stream": False}):
        ask(gateway, **fields)


@pytest.mark.parametrize("texts", [["two words"], ["two words", "비", "안녕 \U0001f600 é"]])
def test_token_ids_get_the_vector_of_their_text(
    gateway: RunningGateway, triton: TritonStandIn, texts: list[str]
) -> None:
    ids = [ids_of(text) for text in texts]
    assert ask(gateway, input=ids)["data"] == ask(gateway, input=texts)["data"]
    assert [read_rows(received.inputs["input_text"]) for received in triton.received] == [ids, texts]
    assert vectors(ask(gateway, input=ids[0])) == [pytest.approx(vector(texts[0]))]
    assert vectors(ask(gateway, input=["a", ids_of("a")])) == [pytest.approx(vector("a"))] * 2


def test_sparse_vectors_have_indices_and_values(gateway: RunningGateway) -> None:
    assert vectors(ask(gateway, input=["abc", "b"], model="sparse", embedding_type="sparse")) == [
        {"indices": [97, 98, 99], "values": [97 / 8, 98 / 8, 99 / 8]},
        {"indices": [98], "values": [98 / 8]},
    ]


def test_multi_vectors_have_one_for_each_token(gateway: RunningGateway) -> None:
    fields = {"model": "per_token", "embedding_type": "multi", "input": ["two words", "one"]}
    expected = [[[n, n] for n in range(1, 5)], [[n, n] for n in range(1, 4)]]
    assert vectors(ask(gateway, **fields)) == expected
    encoded = vectors(ask(gateway, encoding_format="base64", **fields))
    assert [[from_base64(row).tolist() for row in rows] for rows in encoded] == expected


def test_each_type_asks_for_its_own_outputs(gateway: RunningGateway, triton: TritonStandIn) -> None:
    texts = ["the sea", "rain falls"]
    dense, weights, multi = (
        vectors(ask(gateway, model="m3", input=texts, embedding_type=name)) for name in ("dense", "sparse", "multi")
    )
    assert dense == [pytest.approx(vector(text)) for text in texts]
    assert weights == [{"indices": [len(text)], "values": [0.5]} for text in texts]
    assert multi == [[[3, 1]], [[4, 1], [5, 1]]]
    assert [set(request.outputs) - {"token_count"} for request in triton.received] == [
        {"sentence_embedding"},
        {"token_id", "weight"},
        {"token_embeddings", "vector_count"},
    ]


def test_late_chunking_has_a_vector_for_each_chunk(gateway: RunningGateway, triton: TritonStandIn) -> None:
    chunks = ["Berlin is a city. ", "Größe: ", "3.9 million."]
    answer = ask(gateway, model="chunked", input=chunks, late_chunking=True)
    assert vectors(answer) == [pytest.approx(vector(chunk)) for chunk in chunks]
    assert [item["index"] for item in answer["data"]] == [0, 1, 2]
    (request,) = triton.received
    assert request.inputs["input_text"].texts() == ["".join(chunks)]
    assert answer["usage"]["prompt_tokens"] == len("".join(chunks).split()) + 2
    (short,) = vectors(ask(gateway, model="chunked", input=chunks[:1], late_chunking=True, dimensions=2))
    assert np.linalg.norm(short) == pytest.approx(1) and len(short) == 2


# --- rerank and classify ----------------------------------------------------------------------------------------------


def test_documents_are_sorted_by_relevance(gateway: RunningGateway) -> None:
    answer = ask(gateway, RERANK)
    assert answer.pop("id").startswith("rerank-")
    assert answer.pop("data") == answer["results"]  # of Voyage
    tokens = sum(2 + len(document.split()) + 2 for document in DOCUMENTS)
    assert answer == {
        "model": "reranker",
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "results": [
            {"index": index, "relevance_score": score, "document": {"text": DOCUMENTS[index]}}
            for index, score in ((1, 1.0), (2, 0.5), (3, 0.5), (0, 0.0))
        ],
    }
    assert [result["index"] for result in ask(gateway, RERANK, top_n=2)["results"]] == [1, 2]
    assert len(ask(gateway, RERANK, top_n=100)["results"]) == 4
    assert "document" not in ask(gateway, RERANK, return_documents=False)["results"][0]
    answer = ask(gateway, RERANK, documents=[{"text": "red"}, "red house"])
    assert [result["document"]["text"] for result in answer["results"]] == ["red house", "red"]


def test_query_and_instruction_go_with_every_part(gateway: RunningGateway, triton: TritonStandIn) -> None:
    ask(gateway, RERANK, model="instructed", instruction="Find houses")
    parts = sorted((received.inputs for received in triton.received), key=lambda inputs: -inputs["text"].shape[0])
    assert [part["text"].texts() for part in parts] == [DOCUMENTS[:3], DOCUMENTS[3:]]
    for name, value in (("query", "red house"), ("prompt", "Find houses")):
        assert [part[name].texts() for part in parts] == [[value] * 3, [value]]


@pytest.mark.parametrize("path", [RERANK, "/rerank", "/v2/rerank"])
def test_multi_vector_model_reranks_without_sending_vectors(
    gateway: RunningGateway, triton: TritonStandIn, path: str
) -> None:
    body = {"model": "m3", "query": "rain falls", "documents": ["the sea", "rain falls", "rain"]}
    results = gateway.post(path, body).json["results"]
    assert [(result["index"], result["relevance_score"]) for result in results] == [(1, 2), (2, 1), (0, 0)]
    (request,) = triton.received
    assert {*request.outputs} == {"score", "token_count"}


def test_texts_get_labels_and_probabilities(gateway: RunningGateway) -> None:
    answer = ask(gateway, CLASSIFY, input=["good", "bad", "bad", "so good"])
    assert answer.pop("id").startswith("classify-")
    assert answer.pop("created") > 1_700_000_000
    assert [item["label"] for item in answer["data"]] == ["positive", "negative", "negative", "positive"]
    assert answer["data"][1] == {"index": 1, "label": "negative", "probs": [0.75, 0.25], "num_classes": 2}
    assert answer["usage"] == {"prompt_tokens": 13, "total_tokens": 13, "completion_tokens": 0}
    assert [item["label"] for item in ask(gateway, CLASSIFY, input="good")["data"]] == ["positive"]


def test_pairs_of_texts_reach_both_inputs(gateway: RunningGateway, triton: TritonStandIn) -> None:
    ask(gateway, CLASSIFY, input=[["a", "b"], "c"], model="pairs")
    (received,) = triton.received
    assert received.inputs["input_text"].texts() == ["a", "c"]
    assert received.inputs["text_pair"].texts() == ["b", ""]


# --- refusals ---------------------------------------------------------------------------------------------------------

CHUNKS = {"model": "chunked", "input": ["a"], "late_chunking": True}


@pytest.mark.parametrize(
    ("path", "param", "fields"),
    [
        *((EMBEDDINGS, "input", {"input": value}) for value in ("", [], ["a"] * 101, 3, None, {"text": "a"})),
        *((EMBEDDINGS, "input", {"input": value}) for value in (["a", 1], [[1, 2], 3])),
        *((EMBEDDINGS, "input[1]", {"input": value}) for value in (["a", ""], ["a", 1.5], ["a", None], [[1], []])),
        (EMBEDDINGS, "input[0]", {"input": [-1]}),
        (EMBEDDINGS, "input[0][0]", {"input": [[2**31]]}),
        (EMBEDDINGS, "input", {"input": [1, 2], "model": "uncounted"}),
        *((EMBEDDINGS, "embedding_type", {"embedding_type": name}) for name in ("sparse", "multi", "other")),
        (EMBEDDINGS, "embedding_type", {"model": "sparse"}),
        (EMBEDDINGS, "encoding_format", {"model": "sparse", "embedding_type": "sparse", "encoding_format": "base64"}),
        (EMBEDDINGS, "encoding_format", {"encoding_format": "hex"}),
        (EMBEDDINGS, "dimensions", {"model": "per_token", "embedding_type": "multi", "dimensions": 1}),
        *((EMBEDDINGS, "dimensions", {"dimensions": value}) for value in (-1, 5, 10**30, 2.5, True)),
        *((EMBEDDINGS, "model", {"model": value}) for value in (3, None, "classifier")),
        (EMBEDDINGS, "prompt_name", {"prompt_name": "query"}),
        (EMBEDDINGS, "task", {"task": "quary"}),
        (EMBEDDINGS, "input_type", {"input_type": "search_query"}),
        (EMBEDDINGS, "n", {"n": 2}),
        (EMBEDDINGS, "stream", {"stream": True}),
        (EMBEDDINGS, "late_chunking", CHUNKS | {"model": "embedding"}),
        (EMBEDDINGS, "late_chunking", {"model": "m3", "late_chunking": True}),
        (EMBEDDINGS, "dimensions", CHUNKS | {"dimensions": 9}),
        (EMBEDDINGS, "input", CHUNKS | {"input": [[1, 2]]}),
        *((RERANK, "query", {"query": value}) for value in ("", None)),
        *((RERANK, "documents", {"documents": value}) for value in ([], "a", ["a"] * 101)),
        *((RERANK, "documents[1]", {"documents": ["a", value]}) for value in ("", {"text": ""}, 3)),
        (RERANK, "documents[1].text", {"documents": ["a", {}]}),
        (RERANK, "top_n", {"top_n": 0}),
        (RERANK, "max_tokens_per_doc", {"max_tokens_per_doc": 5}),
        (RERANK, "model", {"model": "classifier"}),
        *((RERANK, "instruction", {"model": model, "instruction": "Find it."}) for model in ("reranker", "m3")),
        *((CLASSIFY, "input", {"input": value}) for value in ("", [], ["a"] * 101, [["a", "b"]])),
        *((CLASSIFY, "input[0]", {"input": value}) for value in ([["a", "b", "c"]], [1])),
        (CLASSIFY, "input[1]", {"input": ["a", ""]}),
    ],
)
def test_wrong_field_is_named(
    gateway: RunningGateway, triton: TritonStandIn, path: str, param: str, fields: dict[str, Any]
) -> None:
    reply = gateway.post(path, GOOD[path] | fields)
    assert (reply.status, reply.error["param"], reply.error["type"]) == (400, param, "invalid_request_error")
    assert not triton.received


def refused(gateway: RunningGateway, **fields: Any) -> Reply:
    reply = gateway.post(EMBEDDINGS, GOOD[EMBEDDINGS] | fields)
    assert reply.status >= 400
    return reply


def test_refusal_lists_the_values_of_a_field_within_another(gateway: RunningGateway) -> None:
    body = {"model": "embedding", "messages": [{"role": "alien", "content": "text"}], "tools": [{"type": "web_search"}]}
    message = gateway.post("/v1/chat/completions", body).error["message"]
    assert message.endswith(
        "invalid enum value 'alien', use 'system' or 'developer' or 'user' or 'assistant' or 'tool'."
    )
    body["messages"][0]["role"] = "user"
    message = gateway.post("/v1/responses", {"model": "embedding", "input": "a", "tools": body["tools"]}).error[
        "message"
    ]
    assert message == "Invalid value for 'tools[0].type': invalid enum value 'web_search', use 'function'."


def test_refusal_tells_what_to_send(gateway: RunningGateway) -> None:
    message = refused(gateway, encoding_format="hex").error["message"]
    assert message.endswith("invalid enum value 'hex', use 'float' or 'base64'.")
    for name in ("input", "model"):
        error = gateway.post(EMBEDDINGS, {key: "embedding" for key in ("input", "model") if key != name}).error
        assert (error["param"], error["code"]) == (name, "missing_required_parameter")
    end = "so none of the {} texts was answered. Leave empty strings out."
    for texts, expected in (
        (["a", ""], f"'input[1]' is an empty string, {end.format(2)}"),
        (["", "a", ""], f"'input[0]', 'input[2]' are empty strings, {end.format(3)}"),
        ([""] * 12, f"'input[9]' and 2 others are empty strings, {end.format(12)}"),
    ):
        assert refused(gateway, input=texts).error["message"].endswith(expected)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b'"text"', b"\xff\xfe{}", b"model=embedding&input=a"),
        b'{"model": "embedding", "input": "\xff"}',
        b'{"model": "embedding", "input": NaN}',
        b'{"model": "embedding", "input": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": "embedding", "input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": "embedding", "input": "a"} {}',
    ],
    ids=range(11),
)
def test_body_that_is_not_the_right_json_is_refused(gateway: RunningGateway, body: bytes) -> None:
    reply = gateway.post(EMBEDDINGS, body)
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("body", "param", "half"),
    [
        (b'"model": "embedding", "input": "\\ud800"', "input", "\\ud800"),
        (b'"model": "embedding", "input": ["a", "\\ude00 cut at its beginning"]', "input[1]", "\\ude00"),
        (b'"input": ["\\ud83d\\ude00", "\\ud83d\\ud83d"], "model": "embedding"', "input[1]", "\\ud83d"),
        (b'"model": "embedding", "input": [{"text": "a \\ud83d\\u0041"}]', "input[0].text", "\\ud83d"),
        (b'"input": "a", "\\ud800": 1', None, "\\ud800"),
    ],
)
def test_half_a_character_is_named(gateway: RunningGateway, body: bytes, param: str | None, half: str) -> None:
    reply = gateway.post(EMBEDDINGS, b"{%b}" % body)
    place = f"'{param}'" if param else "The body"
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, param, "invalid_value")
    assert reply.error["message"].startswith(f"{place} has {half} without its other half")


def test_unknown_model_is_not_found(gateway: RunningGateway) -> None:
    for model in ("nothing", "a/b/c", "../embedding", "", "x" * 10_000, "encoder", "안녕", "\x00"):
        reply = refused(gateway, model=model)
        assert (reply.status, reply.error["param"], reply.error["code"]) == (404, "model", "model_not_found")
        assert len(reply.body) < 1000


def test_tritons_message_about_a_request_is_passed_on(
    gateway: RunningGateway, triton: TritonStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(inputs: Any) -> Any:
        raise Failure(grpc.StatusCode.INVALID_ARGUMENT, "[request id: <id_unknown>] input 'input_text': too strange")

    monkeypatch.setattr(triton.models["uncounted"], "answer", refuse)
    reply = refused(gateway, model="uncounted")
    assert (reply.status, reply.error["message"]) == (400, "input 'input_text': too strange")
