"""POST /v1/embeddings, with a stand-in for Triton."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from gateway.config import Config, Limits
from gateway.context import PARTS_AT_ONCE
from gateway.encoder_answers import shortened
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.triton_stand_in import (
    Failure,
    Model,
    TritonStandIn,
    classifier,
    embedding,
    ids_of,
    read_rows,
    sparse,
    token_encoder,
    vector,
)

PATH = "/v1/embeddings"
MAX_BATCH = 4
TEXTS = [f"text {'word ' * number}" for number in range(10)]


@pytest.fixture(scope="module")
def triton() -> Iterator[TritonStandIn]:
    models = embedding(max_batch=MAX_BATCH), embedding("uncounted", counts=False), classifier(), prompted()
    with TritonStandIn(*models, sparse(), token_encoder()) as stand_in:
        yield stand_in


@pytest.fixture(scope="module")
def gateway(triton: TritonStandIn) -> Iterator[RunningGateway]:
    config = Config(triton=triton.address, systems=tuple(triton.models), limits=Limits(texts=100))
    with running_gateway(config) as running:
        yield running


@pytest.fixture(autouse=True)
def forget_requests(triton: TritonStandIn) -> None:
    triton.received.clear()


def prompted() -> Model:
    model = embedding("prompted")
    model.inputs["prompt_name"] = ("STRING", [1])
    return model


def embed(gateway: RunningGateway, input: Any, **fields: Any) -> Any:
    reply = gateway.post(PATH, {"model": "embedding", "input": input} | fields)
    assert reply.status == 200, reply.body
    return reply.json


def vectors(answer: Any) -> list[Any]:
    return [item["embedding"] for item in answer["data"]]


def test_answer_has_openais_form(gateway: RunningGateway) -> None:
    assert embed(gateway, "two words") == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": pytest.approx(vector("two words"))}],
        "model": "embedding",
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    }


def test_request_names_the_outputs_that_it_needs(gateway: RunningGateway, triton: TritonStandIn) -> None:
    embed(gateway, "a")
    assert triton.received[0].outputs == ["output__0", "token_count"]


def test_base64_holds_the_bytes_of_the_vector(gateway: RunningGateway) -> None:
    (encoded,) = vectors(embed(gateway, "a", encoding_format="base64"))
    assert np.frombuffer(base64.b64decode(encoded), "<f4") == pytest.approx(vector("a"))


@pytest.mark.parametrize("count", [1, MAX_BATCH, MAX_BATCH + 1, 40])  # the last are more parts than Triton gets at once
def test_texts_are_split_into_batches_and_keep_their_order(
    gateway: RunningGateway, triton: TritonStandIn, count: int
) -> None:
    texts = (TEXTS * 4)[:count]
    answer = embed(gateway, texts)
    assert [item["index"] for item in answer["data"]] == list(range(count))
    assert np.array(vectors(answer)) == pytest.approx(np.array([vector(text) for text in texts]))
    assert answer["usage"]["prompt_tokens"] == sum(len(text.split()) + 2 for text in texts)
    sizes = sorted(received.inputs["input_text"].shape[0] for received in triton.received)
    assert sum(sizes) == count and len(sizes) == -(-count // MAX_BATCH)


def test_parts_are_sent_side_by_side(gateway: RunningGateway, triton: TritonStandIn) -> None:
    triton.models["embedding"].gate.clear()
    with gateway.sent("POST", PATH, {"model": "embedding", "input": TEXTS}) as response:
        triton.wait_until(lambda: len(triton.running) == 3)
        triton.models["embedding"].gate.set()
        assert response().status == 200


def test_client_that_leaves_costs_the_parts_that_triton_has(gateway: RunningGateway, triton: TritonStandIn) -> None:
    model = triton.models["embedding"]
    triton.cancelled.clear()
    model.gate.clear()
    try:
        with gateway.sent("POST", PATH, {"model": "embedding", "input": TEXTS * 4}):
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
    requests = [TEXTS[:1] * (4 * PARTS_AT_ONCE * MAX_BATCH) for _ in range(3)]
    with contextlib.ExitStack() as stack:
        responses = []
        for number, texts in enumerate(requests):
            texts[:] = [f"{number} {text}" for text in texts]
            responses.append(stack.enter_context(gateway.sent("POST", PATH, {"model": "embedding", "input": texts})))
            gateway.wait_until(lambda number=number: gateway.app.counters.running == number + 1)
        triton.wait_until(lambda: len(triton.running) == PARTS_AT_ONCE)
        assert len(triton.received) == PARTS_AT_ONCE
        model.gate.set()
        assert [response().status for response in responses] == [200] * 3
    owners = [received.inputs["input_text"].texts()[0][0] for received in triton.received]
    assert owners.index("2") < len(owners) // 2
    assert owners != sorted(owners)


def test_failed_part_cancels_the_others(gateway: RunningGateway, triton: TritonStandIn) -> None:
    model = triton.models["embedding"]
    answer = model.answer

    def fail_for_some(inputs: Any) -> Any:
        if "fail" in inputs["input_text"].texts():
            triton.wait_until(lambda: len(triton.running) == 3)
            raise Failure(grpc.StatusCode.INTERNAL, "a secret of the server")
        return answer(inputs)

    triton.cancelled.clear()
    model.gate.clear()
    model.answer = fail_for_some
    try:
        reply = gateway.post(PATH, {"model": "embedding", "input": [*TEXTS, "fail"]})
        triton.wait_until(lambda: len(triton.cancelled) == 2)
    finally:
        model.answer = answer
        model.gate.set()
    assert (reply.status, reply.error["type"]) == (500, "server_error")
    assert "secret" not in reply.error["message"]


def test_dimensions_truncate_and_renormalise(gateway: RunningGateway) -> None:
    (short,) = vectors(embed(gateway, "abc", dimensions=2))
    expected = np.array(vector("abc")[:2])
    assert short == pytest.approx(list(expected / np.linalg.norm(expected)))


def test_all_dimensions_change_nothing(gateway: RunningGateway) -> None:
    assert vectors(embed(gateway, "abc", dimensions=4)) == [pytest.approx(vector("abc"))]


def test_beginning_of_zeros_stays_zeros() -> None:
    assert shortened(np.array([[0, 0, 1]], "f"), 2).tolist() == [[0, 0]]


def test_usage_is_null_if_the_model_does_not_count_tokens(gateway: RunningGateway) -> None:
    assert embed(gateway, "a", model="uncounted")["usage"] is None


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
    embed(gateway, ["a", "b"], model="prompted", **fields)
    assert triton.received[0].inputs["prompt_name"].texts() == [names] * 2
    embed(gateway, ["a"], **{name: value for name, value in fields.items() if name != "prompt_name"})
    assert "prompt_name" not in triton.received[1].inputs


@pytest.mark.parametrize(
    "fields", [{"user": "me"}, {"dimensions": None}, {"dimensions": 0}, {"metadata": {}}, {"stream": False}]
)
def test_fields_that_ask_for_nothing_are_accepted(gateway: RunningGateway, fields: dict[str, Any]) -> None:
    embed(gateway, "a", **fields)


def test_text_of_many_languages_is_kept(gateway: RunningGateway, triton: TritonStandIn) -> None:
    embed(gateway, "안녕 \U0001f600 é")
    assert triton.received[0].inputs["input_text"].texts() == ["안녕 \U0001f600 é"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a"] * 101}, "input"),
        ({"input": 3}, "input"),
        ({"input": None}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": ["a", 1.5]}, "input[1]"),
        ({"input": ["a", None]}, "input[1]"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [[1, 2], 3]}, "input"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": [-1]}, "input[0]"),
        ({"input": [[2**31]]}, "input[0][0]"),
        ({"input": [1, 2], "model": "uncounted"}, "input"),
        ({"embedding_type": "sparse"}, "embedding_type"),
        ({"embedding_type": "multi"}, "embedding_type"),
        ({"embedding_type": "other"}, "embedding_type"),
        ({"model": "sparse"}, "embedding_type"),
        ({"model": "sparse", "embedding_type": "sparse", "encoding_format": "base64"}, "encoding_format"),
        ({"model": "per_token", "embedding_type": "multi", "dimensions": 1}, "dimensions"),
        ({"model": 3}, "model"),
        ({"model": None}, "model"),
        ({"model": ["embedding"]}, "model"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": -1}, "dimensions"),
        ({"dimensions": 5}, "dimensions"),
        ({"dimensions": 10**30}, "dimensions"),
        ({"dimensions": 2.5}, "dimensions"),
        ({"dimensions": "2"}, "dimensions"),
        ({"dimensions": True}, "dimensions"),
        ({"prompt_name": "query"}, "prompt_name"),
        ({"task": "quary"}, "task"),
        ({"input_type": "search_query"}, "input_type"),
        ({"n": 2}, "n"),
        ({"stream": True}, "stream"),
        ({"colour": "red"}, "colour"),
        ({"model": "classifier"}, "model"),
    ],
)
def test_wrong_field_is_named(
    gateway: RunningGateway, triton: TritonStandIn, fields: dict[str, Any], param: str
) -> None:
    reply = gateway.post(PATH, {"model": "embedding", "input": "a"} | fields)
    assert (reply.status, reply.error["param"], reply.error["type"]) == (400, param, "invalid_request_error")
    assert not triton.received


def test_refusal_names_the_values_that_are_possible(gateway: RunningGateway) -> None:
    reply = gateway.post(PATH, {"model": "embedding", "input": "a", "encoding_format": "hex"})
    assert reply.error["message"].endswith("invalid enum value 'hex', use 'float' or 'base64'.")


@pytest.mark.parametrize("name", ["input", "model"])
def test_missing_field_is_named(gateway: RunningGateway, name: str) -> None:
    reply = gateway.post(PATH, {key: "embedding" for key in ("input", "model") if key != name})
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, name, "missing_required_parameter")


@pytest.mark.parametrize("texts", [["two words"], ["two words", "비", "a"]])
def test_token_ids_get_the_vector_of_their_text(
    gateway: RunningGateway, triton: TritonStandIn, texts: list[str]
) -> None:
    ids = [ids_of(text) for text in texts]
    assert embed(gateway, ids)["data"] == embed(gateway, texts)["data"]
    assert read_rows(triton.received[0].inputs["input_text"]) == ids
    assert vectors(embed(gateway, ids[0])) == [pytest.approx(vector(texts[0]))]


def test_texts_and_token_ids_may_be_in_one_list(gateway: RunningGateway) -> None:
    assert vectors(embed(gateway, ["a", ids_of("a")])) == [pytest.approx(vector("a"))] * 2


def test_sparse_vectors_have_indices_and_values(gateway: RunningGateway) -> None:
    data = embed(gateway, ["abc", "b"], model="sparse", embedding_type="sparse")["data"]
    assert [item["embedding"] for item in data] == [
        {"indices": [97, 98, 99], "values": [97 / 8, 98 / 8, 99 / 8]},
        {"indices": [98], "values": [98 / 8]},
    ]


def test_multi_vectors_have_one_for_each_token(gateway: RunningGateway) -> None:
    fields = {"model": "per_token", "embedding_type": "multi"}
    expected = [[[n, n] for n in range(1, 5)], [[n, n] for n in range(1, 4)]]
    assert vectors(embed(gateway, ["two words", "one"], **fields)) == expected
    encoded = vectors(embed(gateway, ["two words", "one"], encoding_format="base64", **fields))
    assert [[np.frombuffer(base64.b64decode(row), "<f4").tolist() for row in rows] for rows in encoded] == expected


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff\xfe{}",
        b'{"model": "embedding", "input": "\xff"}',
        b'{"model": "embedding", "input": "\\ud800"}',
        b'{"model": "embedding", "input": NaN}',
        b'{"model": "embedding", "input": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": "embedding", "input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": "embedding", "input": "a"} {}',
        b"model=embedding&input=a",
    ],
    ids=range(12),
)
def test_body_that_is_not_the_right_json_is_refused(gateway: RunningGateway, body: bytes) -> None:
    reply = gateway.post(PATH, body)
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
    reply = gateway.post(PATH, b"{%b}" % body)
    place = f"'{param}'" if param else "The body"
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, param, "invalid_value")
    assert reply.error["message"].startswith(f"{place} has {half} without its other half")


def test_empty_texts_are_named(gateway: RunningGateway) -> None:
    def refusal(*texts: str) -> str:
        return str(gateway.post(PATH, {"model": "embedding", "input": texts}).error["message"])

    end = "so none of the {} texts was answered. Leave empty strings out."
    assert refusal("a", "") == f"'input[1]' is an empty string, {end.format(2)}"
    assert refusal("", "a", "") == f"'input[0]', 'input[2]' are empty strings, {end.format(3)}"
    assert refusal(*[""] * 12).endswith(f"'input[9]' and 2 others are empty strings, {end.format(12)}")


@pytest.mark.parametrize("model", ["nothing", "a/b/c", "../embedding", "", "x" * 10_000, "encoder", "안녕", "\x00"])
def test_unknown_model_is_not_found(gateway: RunningGateway, triton: TritonStandIn, model: str) -> None:
    reply = gateway.post(PATH, {"model": model, "input": "a"})
    assert (reply.status, reply.error["param"], reply.error["code"]) == (404, "model", "model_not_found")
    assert len(reply.body) < 1000


def test_tritons_message_about_a_request_is_passed_on(gateway: RunningGateway, triton: TritonStandIn) -> None:
    def refuse(inputs: Any) -> Any:
        raise Failure(grpc.StatusCode.INVALID_ARGUMENT, "[request id: <id_unknown>] input 'input_text': too strange")

    model = triton.models["uncounted"]
    answer, model.answer = model.answer, refuse
    try:
        reply = gateway.post(PATH, {"model": "uncounted", "input": "a"})
    finally:
        model.answer = answer
    assert (reply.status, reply.error["message"]) == (400, "input 'input_text': too strange")
