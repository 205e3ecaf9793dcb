"""Test the two clients that speak HTTP by themselves: of benchmarks and drills, and of the load test's users."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from locust.env import Environment

from loadtest.load.locust_users import IDLE_S, Job, Traffic, user_class
from loadtest.load.users import Meter
from tests.support.certificates import save_certificate
from tests.support.http_servers import replying, response
from triton_transformers import load
from triton_transformers.load import Connection, outcome
from triton_transformers.tensors import Tensor

WHOLE = response("200 OK", b'{"data": [1]}')
REFUSED = response("429 Too Many Requests", b'{"error": {}}')
PIECES = [WHOLE[:20], WHOLE[20:-3], WHOLE[-3:]]
CLOSES = [response("200 OK", b'{"data": [1]}', header) for header in ("Connection: close", "connection: Close")]


def ends_of_connection(address: str, count: int) -> list[str]:
    """Send requests on one connection; return the error of each."""

    async def run() -> list[str]:
        connection = Connection(address)
        questions = [load.post(address, "/a", b"question") for _ in range(count)]
        ends = [await outcome("", connection.ask(question)) for question in questions]
        connection.close()
        return [end.error for end in ends]

    return asyncio.run(run())


def job(address: str, scheme: str = "http") -> Job:
    text = Tensor("input_text", "BYTES", [1, 1], b"\1\0\0\0a")
    return Job(
        "openai", f"{scheme}://{address}", "m", [[text]], (0.0, 0.0), 1, timeout_s=30, kind="embedding", key="a-key"
    )


def ends_of_user(address: str, count: int, scheme: str = "http", rested_s: float = 0.0) -> list[str]:
    """Let one user of the gateway send requests; return the error of each."""
    traffic, environment = Traffic(job(address, scheme)), Environment()
    meter = Meter(environment)
    user = user_class(traffic)(environment)
    for _ in range(count):
        user.used_at -= rested_s
        user.infer(traffic.requests[0], time.perf_counter())
    user.on_stop()
    assert all(sample.is_refused == sample.error.startswith("429 ") for sample in meter.samples)
    return [sample.error for sample in meter.samples]


HEADS = {
    ends_of_connection: (b"POST /a HTTP/1.1\r\nHost: 127.0.0.1:", b"\r\nContent-Type: application/json"),
    ends_of_user: (b"POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1:", b"\r\nAuthorization: Bearer a-key"),
}


# The first reply, the error of its request, and the connections: a user leaves one that refused it.
@pytest.mark.parametrize(
    ("client", "reply", "error", "connections"),
    [
        *((client, PIECES, "", 1) for client in HEADS),
        *((client, [reply], "", 2) for client in HEADS for reply in CLOSES),
        (ends_of_connection, [REFUSED], '429 {"error": {}}', 1),
        (ends_of_user, [REFUSED], '429 {"error": {}}', 2),
        (ends_of_connection, [], "the connection was closed without an answer", 2),
        (ends_of_user, [], "the gateway closed the connection", 2),
        (ends_of_user, [response("200 OK", b'{"data": []}')], "the response has no data", 2),
    ],
)
def test_client_keeps_or_opens_its_connection(client, reply, error, connections):
    with replying([reply, [WHOLE]]) as server:
        assert client(server.address, 2) == [error, ""]
    assert server.connections == connections
    for request in server.requests:
        head, _, body = request.partition(b"\r\n\r\n")
        begins, has = HEADS[client]
        assert head.startswith(begins) and has in head + b"\r\n"
        assert b"\r\nContent-Length: %d\r\n" % len(body) in head + b"\r\n"


def test_user_opens_a_new_connection_after_a_long_pause():
    with replying([[WHOLE], [WHOLE]]) as server:
        assert ends_of_user(server.address, 2, rested_s=IDLE_S) == ["", ""]
    assert server.connections == 2


def test_user_speaks_tls_with_a_certificate_of_its_own(tmp_path: Path):
    with replying([[WHOLE], PIECES], save_certificate(tmp_path)) as server:
        assert ends_of_user(server.address, 2, "https") == ["", ""]
    assert (server.connections, len(server.requests)) == (1, 2)
