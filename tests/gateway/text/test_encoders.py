"""Parts of requests to encoders, and bodies that cannot be read. The rest is conformance/apis."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from gateway.edge.config import Limits
from gateway.text.encoders import shaped
from gateway.triton.context import PARTS_AT_ONCE
from tests.conformance.apis.world import with_input
from tests.support.gateway import RunningGateway, gateway_before
from tests.support.triton_stand_in import Failure, TritonStandIn, embedding, generator, reranker, vector

EMBEDDINGS = "/v1/embeddings"
MAX_BATCH = 4
TEXTS = [f"text {'word ' * number}" for number in range(10)]
DOCUMENTS = ["nothing", "a red house", "red", "house and home"]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[RunningGateway, TritonStandIn]]:
    instructed = with_input(reranker("instructed", max_batch=3), "prompt")
    texts = generator(), generator("counter_stream", streams=True)
    with gateway_before(embedding(max_batch=MAX_BATCH), instructed, *texts, limits=Limits(texts=100)) as served:
        yield served


@pytest.mark.parametrize("count", [1, MAX_BATCH, MAX_BATCH + 1, 40])  # the last are more parts than Triton gets at once
def test_texts_are_split_into_batches_and_keep_their_order(
    gateway: RunningGateway, triton: TritonStandIn, count: int
) -> None:
    texts = (TEXTS * 4)[:count]
    answer = gateway.post(EMBEDDINGS, {"model": "embedding", "input": texts}).json
    assert [item["index"] for item in answer["data"]] == list(range(count))
    assert np.array([item["embedding"] for item in answer["data"]]) == pytest.approx(
        np.array([vector(text) for text in texts])
    )
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


def test_chats_and_long_embeddings_do_not_wait_for_each_other(gateway: RunningGateway, triton: TritonStandIn) -> None:
    """Whichever of them Triton holds back, the other kind, and another encoder, are answered."""
    embeddings = EMBEDDINGS, {"model": "embedding", "input": TEXTS * 8}
    chat = "/v1/chat/completions", {"model": "counter", "messages": [{"role": "user", "content": "a"}]}
    stream = chat[0], chat[1] | {"stream": True}
    rerank = "/v1/rerank", {"model": "instructed", "query": "red", "documents": DOCUMENTS}
    for held, others in ((embeddings, (chat, stream, rerank)), (chat, (embeddings, stream)), (stream, (embeddings,))):
        path, body = held
        model = "counter_stream" if held is stream else body["model"]
        running = PARTS_AT_ONCE if held is embeddings else 3
        triton.models[model].gate.clear()
        with contextlib.ExitStack() as stack:
            waiting = [stack.enter_context(gateway.sent("POST", path, body)) for _ in range(3)]
            triton.wait_until(lambda running=running, model=model: triton.running.count(model) == running)
            assert [gateway.post(*other).status for other in others] == [200] * len(others)
            triton.models[model].gate.set()
            assert [response().status for response in waiting] == [200] * 3


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


def test_vector_of_zeros_stays() -> None:
    assert shaped(np.array([[0, 0, 1]], "f"), 2, normalize=False).tolist() == [[0, 0]]


def test_query_and_instruction_go_with_every_part(gateway: RunningGateway, triton: TritonStandIn) -> None:
    body = {"model": "instructed", "query": "red house", "documents": DOCUMENTS, "instruction": "Find houses"}
    assert gateway.post("/v1/rerank", body).status == 200
    parts = sorted((received.inputs for received in triton.received), key=lambda inputs: -inputs["text"].shape[0])
    assert [part["text"].texts() for part in parts] == [DOCUMENTS[:3], DOCUMENTS[3:]]
    for name, value in (("query", "red house"), ("prompt", "Find houses")):
        assert [part[name].texts() for part in parts] == [[value] * 3, [value]]


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


def test_tritons_message_about_a_request_is_passed_on(
    gateway: RunningGateway, triton: TritonStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(inputs: Any) -> Any:
        raise Failure(grpc.StatusCode.INVALID_ARGUMENT, "[request id: <id_unknown>] input 'input_text': too strange")

    monkeypatch.setattr(triton.models["embedding"], "answer", refuse)
    reply = gateway.post(EMBEDDINGS, {"model": "embedding", "input": "a"})
    assert (reply.status, reply.error["message"]) == (400, "input 'input_text': too strange")
