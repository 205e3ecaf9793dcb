"""Loads of models over gRPC and, without it, over HTTP; errors within streams."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import grpc
import pytest

from tests.support.http_servers import script
from tests.support.triton_stand_in import Failure, TritonStandIn
from triton_transformers.ports import free_ports
from triton_transformers.triton import TimedOutError, Triton, TritonError

CONFIG = {"max_batch_size": 8, "parameters": {"text": {"string_value": "한" * 100}}}


@pytest.fixture
def server() -> Iterator[TritonStandIn]:
    with TritonStandIn() as stand_in:
        yield stand_in


def client(server: TritonStandIn) -> Triton:
    """Return a client whose HTTP port is closed."""
    return Triton(f"http://127.0.0.1:{free_ports(1)[0]}", "secret", f"http://{server.address}")


@pytest.mark.parametrize("config", [None, CONFIG])
def test_load_is_sent_over_grpc(server: TritonStandIn, config: dict | None) -> None:
    client(server).load("encoder", config)
    ((request, metadata),) = server.loads
    assert request.model_name == "encoder"
    assert metadata["triton-grpc-protocol-triton-admin-key"] == "secret"
    sent = {name: json.loads(value.string_param) for name, value in request.parameters.items()}
    assert sent == ({"config": config} if config else {})


@pytest.mark.parametrize(
    ("code", "message", "status"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "load failed for model 'encoder'", 400),
        (grpc.StatusCode.INTERNAL, "failed to load 'encoder'", 500),
        (grpc.StatusCode.UNAVAILABLE, "This protocol is restricted, expecting header 'x'", 403),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", None),
    ],
)
def test_refused_load_has_the_status_of_http(
    server: TritonStandIn, code: grpc.StatusCode, message: str, status: int | None
) -> None:
    server.load_failure = Failure(code, message)
    with pytest.raises(TritonError, match=message) as raised:
        client(server).load("encoder")
    assert raised.value.status == status


def test_load_that_takes_too_long_is_told_from_other_errors(server: TritonStandIn) -> None:
    server.load_failure = Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for triton in (client(server), Triton(address)):  # over gRPC, and over HTTP
            with pytest.raises(TimedOutError, match="does not answer: timed out"):
                triton.load("encoder", timeout=0.2 if triton.url == address else 60)


def test_error_within_a_stream_is_raised() -> None:
    events = b'data: {"text": "It"}\n\ndata: {"error": "out of memory"}\n\n'
    with script([(200, {}, events)]) as server, pytest.raises(TritonError, match="out of memory"):
        Triton(server.url).stream("spam_stream", {"prompt": "It"})


def test_load_uses_http_if_the_grpc_port_is_closed() -> None:
    with script([(200, {}, b"")]) as server:
        closed = f"http://127.0.0.1:{free_ports(1)[0]}"
        Triton(server.url, "secret", closed).load("encoder")
    assert [request.path for request in server.received] == ["/v2/repository/models/encoder/load"]
