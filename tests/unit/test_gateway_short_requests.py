"""Short requests over HTTP, with a stand-in for Triton."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import cast

import grpc
import pytest

from gateway import outages, short_requests
from gateway.config import Config, Limits
from gateway.inference import Inference, rpc_error
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.triton_http_stand_in import http_before
from tests.support.triton_stand_in import TritonStandIn, embedding

PATH = "/v1/embeddings"
ONE_TEXT = {"model": "embedding", "input": "two words"}


@pytest.fixture(autouse=True)
def lasting_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_requests, "MAX_AGE_S", 3600)


@pytest.fixture
def triton() -> Iterator[TritonStandIn]:
    with TritonStandIn(embedding()) as stand_in:
        yield stand_in


@contextmanager
def gateway_of(
    triton: TritonStandIn, http: ThreadingHTTPServer, limits: Limits | None = None
) -> Iterator[RunningGateway]:
    address = f"127.0.0.1:{http.server_port}"
    config = Config(triton=triton.address, triton_http=address, systems=("embedding",), limits=limits or Limits())
    with running_gateway(config) as running:
        yield running


def connections(http: ThreadingHTTPServer) -> list:
    return http.RequestHandlerClass.connections  # type: ignore[attr-defined]


def test_short_requests_share_a_connection_and_long_ones_go_over_grpc(triton: TritonStandIn) -> None:
    with http_before(triton.address) as http, gateway_of(triton, http) as gateway:
        first = gateway.post(PATH, ONE_TEXT).json["data"]
        for _ in range(3):
            assert gateway.post(PATH, ONE_TEXT).json["data"] == first
        assert len(connections(http)) == 1
        for texts in (["a"] * 9, ["long " * 4000]):
            assert gateway.post(PATH, {"model": "embedding", "input": texts}).status == 200
        assert len(triton.received) == 6
        assert len(connections(http)) == 1
        assert connections(http)[0].requestline == "POST /v2/models/embedding/infer HTTP/1.1"


def test_connection_that_triton_closed_is_replaced(triton: TritonStandIn) -> None:
    with http_before(triton.address) as http, gateway_of(triton, http) as gateway:
        for count in (1, 2, 3):
            assert gateway.post(PATH, ONE_TEXT).status == 200
            assert len(connections(http)) == count
            connections(http)[-1].connection.shutdown(socket.SHUT_RDWR)


def test_old_connection_is_closed_after_its_request(triton: TritonStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_requests, "MAX_AGE_S", 0)
    model = triton.models["embedding"]
    with http_before(triton.address) as http, gateway_of(triton, http) as gateway:
        model.gate.clear()
        with gateway.sent("POST", PATH, ONE_TEXT) as response:
            triton.wait_until(lambda: triton.running == ["embedding"])
            model.gate.set()
            assert response().status == 200
        gateway.wait_until(lambda: connections(http)[0].rfile.closed)
        assert gateway.post(PATH, ONE_TEXT).status == 200
        assert len(connections(http)) == 2


def test_old_connection_without_a_request_is_closed(triton: TritonStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_requests, "MAX_AGE_S", 0.5)
    with http_before(triton.address) as http, gateway_of(triton, http) as gateway:
        assert gateway.post(PATH, ONE_TEXT).status == 200
        gateway.wait_until(lambda: connections(http)[0].rfile.closed)


class StandInInference:
    """gRPC to a server that still answers there, although a model failed to load, or that has crashed."""

    def __init__(self, crashed: bool) -> None:
        self.crashed = crashed

    async def server_ready(self) -> bool:
        if self.crashed:
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, "failed to connect")
        return False

    async def infer(self, *request: object) -> str:
        return "an answer over gRPC"


@pytest.mark.parametrize("crashed", [False, True])
def test_request_goes_over_grpc_if_triton_closes_new_connections_but_not_if_it_crashed(crashed: bool) -> None:
    async def answer() -> object:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            inference = cast(Inference, StandInInference(crashed))
            return await short_requests.ShortRequests(address, inference, 1.0).infer("embedding", [], [])

    if crashed:
        with pytest.raises(grpc.RpcError, match=r"Triton closed the connection|reset by peer"):
            asyncio.run(answer())
    else:
        assert asyncio.run(answer()) == "an answer over gRPC"


def test_restart_of_triton_is_a_503_until_it_answers(triton: TritonStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "LIMIT_S", 0)
    with http_before(triton.address) as http, gateway_of(triton, http) as gateway:
        port = http.server_port
        assert gateway.post(PATH, ONE_TEXT).status == 200
        http.shutdown()
        http.server_close()
        connections(http)[0].connection.shutdown(socket.SHUT_RDWR)
        reply = gateway.post(PATH, ONE_TEXT)
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        with http_before(triton.address, port):
            assert gateway.post(PATH, ONE_TEXT).status == 200


def test_response_that_is_not_http_is_a_503(triton: TritonStandIn) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        running_gateway(
            Config(triton=triton.address, triton_http=f"127.0.0.1:{listener.getsockname()[1]}", systems=("embedding",))
        ) as gateway,
        gateway.sent("POST", PATH, ONE_TEXT) as response,
    ):
        connection, _ = listener.accept()
        connection.recv(1)
        connection.sendall(b"no HTTP\r\n\r\n")
        assert response().status == 503
        connection.close()


def test_later_response_that_is_not_http_is_a_503(triton: TritonStandIn) -> None:
    refusal = b'HTTP/1.1 400 Bad Request\r\ncontent-length: 13\r\n\r\n{"error": ""}'
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        running_gateway(
            Config(triton=triton.address, triton_http=f"127.0.0.1:{listener.getsockname()[1]}", systems=("embedding",))
        ) as gateway,
    ):
        with gateway.sent("POST", PATH, ONE_TEXT) as response:
            connection, _ = listener.accept()
            connection.recv(65_536)
            connection.sendall(refusal)
            assert response().status == 400
        with gateway.sent("POST", PATH, ONE_TEXT) as response:
            connection.recv(65_536)
            connection.sendall(b"no HTTP\r\n\r\n")
            assert response().status == 503
        connection.close()


def test_left_request_counts_as_in_flight_until_triton_answers(triton: TritonStandIn) -> None:
    model = triton.models["embedding"]
    with http_before(triton.address) as http, gateway_of(triton, http, Limits(in_flight=1)) as gateway:
        model.gate.clear()
        with gateway.sent("POST", PATH, ONE_TEXT):
            triton.wait_until(lambda: triton.running == ["embedding"])
        left = "gateway_requests_total", {"route": PATH, "code": "499"}
        gateway.wait_until(lambda: gateway.app.counters.registry.get_sample_value(*left) == 1)
        assert gateway.post(PATH, ONE_TEXT).status == 429
        model.gate.set()
        gateway.wait_until(lambda: gateway.app.counters.running == 0)
        assert gateway.post(PATH, ONE_TEXT).status == 200
        assert triton.cancelled == []


def test_left_request_that_triton_never_answers_gives_up_its_place(triton: TritonStandIn) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = Config(
            triton=triton.address,
            triton_http=f"127.0.0.1:{listener.getsockname()[1]}",
            systems=("embedding",),
            limits=Limits(timeout=0.5),
        )
        with running_gateway(config) as gateway:
            with gateway.sent("POST", PATH, ONE_TEXT):
                connection, _ = listener.accept()
            gateway.wait_until(lambda: gateway.app.counters.running == 0)
            connection.close()
