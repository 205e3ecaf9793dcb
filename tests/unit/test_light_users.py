"""The users of `make loadtest OVERLOAD=3`, which speak HTTP by themselves."""

from __future__ import annotations

import time

import gevent
import pytest
from gevent.server import StreamServer
from locust.env import Environment

from loadtest.arrivals import Sample
from loadtest.locust_users import IDLE_S, LIGHT, Job, Traffic, user_class
from loadtest.users import Meter
from triton_transformers.tensors import Tensor

ANSWER = b'{"data": [1]}'
REFUSAL = b'{"error": {}}'


def response(status: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


class ScriptedGateway:
    """Stands in for a gateway: each request gets the next reply, in pieces, or the connection is closed."""

    def __init__(self, replies: list[list[bytes]]) -> None:
        self.replies = iter(replies)
        self.connections = 0
        self.requests: list[bytes] = []
        self.server = StreamServer(("127.0.0.1", 0), self.answer)
        self.server.start()

    def answer(self, connection, address) -> None:
        self.connections += 1
        with connection:
            while request := connection.recv(65_536):
                self.requests.append(request)
                reply = next(self.replies)
                for piece in reply:
                    connection.sendall(piece)
                    gevent.sleep(0)
                if not reply:
                    return


@pytest.fixture
def sent():
    """Return a function that lets one user send a request for each reply; it returns the gateway and the samples."""

    def send(replies: list[list[bytes]], on_each=lambda user: None) -> tuple[ScriptedGateway, list[Sample]]:
        gateway = ScriptedGateway(replies)
        text = Tensor("input_text", "BYTES", [1, 1], b"\1\0\0\0a")
        url = f"http://127.0.0.1:{gateway.server.server_port}"
        traffic = Traffic(Job(LIGHT, url, "m", [[text]], (0.0, 0.0), 1, timeout_s=30, kind="embedding", key="a-key"))
        environment = Environment()
        meter = Meter(environment)
        user = user_class(traffic)(environment)
        try:
            for _ in replies:
                on_each(user)
                user.infer(traffic.requests[0], time.perf_counter())
        finally:
            user.on_stop()
            gateway.server.stop()
        return gateway, meter.samples

    return send


def test_light_user_keeps_its_connection_after_an_answer(sent):
    whole = response(b"200 OK", ANSWER)
    gateway, samples = sent([[whole], [whole[:30], whole[30:-3], whole[-3:]]])
    assert [sample.error for sample in samples] == ["", ""]
    assert gateway.connections == 1
    head, _, body = gateway.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nContent-Length: %d\r\nAuthorization: Bearer a-key" % len(body) in head


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ([response(b"429 Too Many Requests", REFUSAL)], '429 {"error": {}}'),
        ([response(b"200 OK", b'{"data": []}')], "the response has no data"),
        ([], "the gateway closed the connection"),
    ],
)
def test_light_user_that_was_refused_leaves_its_connection(sent, reply, error):
    gateway, samples = sent([reply, [response(b"200 OK", ANSWER)]])
    assert [sample.error for sample in samples] == [error, ""]
    assert gateway.connections == 2


def test_light_user_opens_a_new_connection_after_a_long_pause(sent):
    def rest(user) -> None:
        user.used_at -= IDLE_S

    gateway, samples = sent([[response(b"200 OK", ANSWER)]] * 2, rest)
    assert [sample.error for sample in samples] == ["", ""]
    assert gateway.connections == 2
