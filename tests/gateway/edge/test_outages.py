"""Requests that arrive while Triton restarts; Triton is a stand-in, and in some tests so is the clock."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from gateway.edge import outages
from gateway.edge.config import Config, Limits
from gateway.edge.errors import ApiError, from_triton, not_ready
from gateway.edge.outages import LIMIT_S, QUIET_S, Outages
from gateway.triton import inference
from gateway.triton.inference import rpc_error
from tests.support.gateway import RunningGateway, gateway_before, running_gateway
from tests.support.triton_stand_in import WAIT_S, Failure, TritonStandIn, embedding, generator
from triton_transformers.ports import free_ports

ONE_TEXT = {"model": "embedding", "input": "two words"}
STREAM = {"model": "counter", "prompt": "a", "stream": True}
CRASHED = (
    "Failed to process the request(s) for model 'encoder_0_0', message: Stub process 'encoder_0_0' is not healthy."
)
# The error of requests that waited for that process until their time was over.
UNHEALTHY = from_triton(rpc_error(grpc.StatusCode.INTERNAL, CRASHED), "encoder")
REFUSED = from_triton(rpc_error(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses"))


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture
def gateway(port: int) -> Iterator[RunningGateway]:
    """Yield a gateway whose Triton does not run yet."""
    config = Config(triton=f"127.0.0.1:{port}", systems=("embedding", "counter"), limits=Limits(in_flight=2))
    with running_gateway(config) as running:
        yield running


def test_requests_wait_for_triton(gateway: RunningGateway, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A further one is refused, because those that wait are in flight."""
    monkeypatch.setattr(outages, "LIMIT_S", 600)
    requests = [("/v1/embeddings", ONE_TEXT), ("/v1/completions", STREAM)]
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(gateway.post, *request) for request in requests]
        gateway.wait_until(lambda: gateway.app.counters.running == 2)
        assert gateway.post("/v1/embeddings", ONE_TEXT).status == 429
        assert gateway.get("/v1/models").status == 503
        models = embedding(), generator(streams=True)
        with TritonStandIn(*models, port=port):
            assert [future.result().status for future in waiting] == [200, 200]


def test_connection_to_a_busy_triton_has_time() -> None:
    """Triton accepts the connection, and answers for the first time half a second later."""
    with (
        TritonStandIn(embedding()) as triton,
        socket.create_server(("127.0.0.1", 0)) as busy,
        ThreadPoolExecutor() as pool,
    ):

        def relay() -> None:
            client, _ = busy.accept()
            time.sleep(0.5)
            server = socket.create_connection((triton.host, triton.port))
            pool.submit(copy, client, server)
            pool.submit(copy, server, client)

        pool.submit(relay)
        config = Config(triton=f"127.0.0.1:{busy.getsockname()[1]}", systems=("embedding",))
        with running_gateway(config) as gateway:
            assert gateway.get("/v1/models").status == 200


def copy(source: socket.socket, target: socket.socket) -> None:
    while data := source.recv(65_536):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)


def test_requests_wait_for_a_model_of_a_restarted_triton(
    gateway: RunningGateway, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outages, "LIMIT_S", 600)
    asked = []

    class Loading(TritonStandIn):
        def ModelConfig(self, request: Any, context: Any) -> Any:
            asked.append(request.name)
            return super().ModelConfig(request, context)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gateway.post, "/v1/embeddings", ONE_TEXT)
        gateway.wait_until(lambda: gateway.app.counters.running == 1)
        with Loading(port=port) as triton:
            gateway.wait_until(lambda: len(asked) > 1)
            assert not waiting.done()
            triton.models["embedding"] = embedding()
            assert waiting.result().status == 200


def test_requests_wait_for_a_crashed_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "LIMIT_S", 600)
    model = embedding()
    answer, failures = model.answer, [CRASHED, CRASHED]

    def crash(inputs: Any) -> Any:
        if failures:
            raise Failure(grpc.StatusCode.INTERNAL, failures.pop())
        return answer(inputs)

    model.answer = crash
    with gateway_before(model) as (gateway, triton):
        assert gateway.post("/v1/embeddings", ONE_TEXT).status == 200
        assert len(triton.received) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_text_whose_process_crashed_fails(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """The process sends its first empty response, and Triton never ends the request."""
    monkeypatch.setattr(inference, "SILENCE_S", 0.2)
    model = generator(streams=True)
    texts, crashed = model.answer, threading.Event()

    def crash(inputs: Any) -> Any:
        yield []
        assert crashed.wait(WAIT_S)
        yield from texts(inputs)

    model.answer = crash
    with gateway_before(model) as (gateway, _):
        answer = gateway.post("/v1/completions", {**STREAM, "stream": stream})
        assert answer.status == 503
        assert answer.json["error"]["message"] == inference.CRASHED
        crashed.set()
        gateway.wait_until(lambda: gateway.app.counters.running == 0)
        monkeypatch.setattr(inference, "SILENCE_S", WAIT_S)
        assert gateway.post("/v1/completions", {**STREAM, "stream": False}).status == 200


class Triton:
    """A Triton with a clock of its own, which counts the requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.up_at = 0.0
        self.failure: Exception = REFUSED
        self.requests = 0
        monkeypatch.setattr(outages.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(outages.asyncio, "sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    async def send(self) -> str:
        self.requests += 1
        if self.now < self.up_at:
            raise self.failure
        return "answer"


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Triton:
    return Triton(monkeypatch)


def status(outages: Outages, triton: Triton) -> int:
    try:
        asyncio.run(outages.answer(triton.send))
    except ApiError as error:
        return error.status
    return 200


def test_outage_has_a_limit_and_later_requests_fail_at_once(triton: Triton) -> None:
    triton.up_at = 1000
    outage = Outages()
    assert status(outage, triton) == 503
    assert LIMIT_S <= triton.now < LIMIT_S + 1
    triton.requests = 0
    assert (status(outage, triton), triton.requests) == (503, 1)


def test_failure_after_a_quiet_time_begins_another_outage(triton: Triton) -> None:
    outage = Outages()
    for failure in (REFUSED, not_ready("embedding"), UNHEALTHY):
        triton.failure, triton.up_at = failure, triton.now + LIMIT_S / 2
        assert status(outage, triton) == 200
        triton.now += QUIET_S


def test_broken_system_leaves_the_outages_of_others_alone(triton: Triton) -> None:
    """It never loads, so requests to it fail at once after the limit. Requests to another one still wait."""
    outage = Outages()
    triton.failure, triton.up_at = not_ready("broken"), 1000
    assert status(outage, triton) == 503
    triton.failure, triton.up_at = not_ready("embedding"), triton.now + QUIET_S / 2
    assert status(outage, triton) == 200
    triton.failure, triton.up_at, triton.requests = not_ready("broken"), 1000, 0
    assert (status(outage, triton), triton.requests) == (503, 1)


@pytest.mark.parametrize(
    "error", [from_triton(rpc_error(grpc.StatusCode.UNAVAILABLE, "Socket closed")), ApiError(400, "wrong")]
)
def test_request_that_triton_had_is_not_sent_again(triton: Triton, error: Exception) -> None:
    triton.up_at, triton.failure = 3, error
    assert status(Outages(), triton) in (400, 503)
    assert triton.requests == 1
