"""Short requests over HTTP, with a stand-in for Triton."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer

import pytest

from gateway import outages
from gateway.config import Config, Limits
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.triton_http_stand_in import http_before
from tests.support.triton_stand_in import TritonStandIn, embedding

PATH = "/v1/embeddings"
ONE_TEXT = {"model": "embedding", "input": "two words"}


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
