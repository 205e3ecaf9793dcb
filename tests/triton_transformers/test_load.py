"""The asyncio client of benchmarks, drills and tests: outcomes, loops, connections and known answers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable

import grpc
import numpy as np
import pytest

from gateway.triton.inference import rpc_error
from tests.support.awaitables import answered, never
from triton_transformers import load
from triton_transformers.load import FAILED, LOST, RIGHT, WRONG, Connection, KnownVectors, Load, WrongError, outcome

KNOWN = KnownVectors(np.array([[0.6, 0.8], [0.8, -0.6]]))


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (answered(None), RIGHT),
        (answered(WrongError("another vector")), WRONG),
        (answered(KeyError("data")), WRONG),
        (answered(load.RefusedError("503 restarting")), FAILED),
        (answered(ConnectionResetError("reset")), FAILED),
        (answered(rpc_error(grpc.StatusCode.UNAVAILABLE, "gone")), FAILED),
        (never(), LOST),
    ],
)
def test_kind_of_an_answer(answer: Awaitable, kind: str) -> None:
    end = asyncio.run(outcome("a route", answer, timeout=0.05 if kind == LOST else 60))
    assert (end.route, end.kind, bool(end.error)) == ("a route", kind, kind != RIGHT)


def test_vector_of_another_text_is_wrong() -> None:
    for vector in ([0.8, -0.6], [0.8001, -0.6001]):
        KNOWN.check([1], np.array([vector]))
    for vector in ([0.6, 0.8], [0.8, math.nan], [1.0, 1.0, 1.0]):
        with pytest.raises(WrongError):
            KNOWN.check([1], np.array([vector]))
    with pytest.raises(ValueError, match="nearly the same vector"):
        KnownVectors(np.array([[0.6, 0.8], [0.6, 0.8]]))


# --- loops ------------------------------------------------------------------------------------------------------------


def test_open_loop_sends_while_earlier_requests_wait_and_ends_with_all_outcomes() -> None:
    sent = []

    async def run(load: Load) -> None:
        async def request(number: int) -> None:
            sent.append(number)
            await load.send("", asyncio.wait_for(load.ended.wait(), 60))

        await load.open_loop(1000, request)

    with Load(run) as load:
        while len(sent) < 5:
            time.sleep(0.01)
        assert load.outcomes == []
    assert sent == list(range(len(sent)))
    assert [end.kind for end in load.outcomes] == [RIGHT] * len(sent)


def test_users_of_a_closed_loop_wait_for_their_answers() -> None:
    waiting = [0, 0]

    async def run(load: Load) -> None:
        async def user(number: int) -> None:
            while not load.is_ending:
                waiting[number] += 1
                assert waiting[number] == 1
                await load.send("", asyncio.sleep(0.001))
                waiting[number] -= 1

        await load.closed_loop(2, user)

    with Load(run) as load:
        while len(load.outcomes) < 10:
            time.sleep(0.01)
    assert load.problems == []
    assert waiting == [0, 0]


def test_unexpected_error_of_a_user_ends_the_load_and_is_reported() -> None:
    async def run(load: Load) -> None:
        async def user(number: int) -> None:
            await load.send("", answered(RuntimeError("unexpected")))

        await load.closed_loop(2, user)

    with Load(run) as load:
        while not load.problems:
            time.sleep(0.01)
    (problem,) = load.problems
    assert problem.startswith("the clients stopped: RuntimeError('unexpected') at ")


# --- connections ------------------------------------------------------------------------------------------------------

ANSWER, REFUSAL = b'{"data": [1]}', b'{"error": {}}'


def response(status: bytes, body: bytes, *headers: bytes) -> bytes:
    head = b"\r\n".join([b"HTTP/1.1 " + status, b"Content-Length: %d" % len(body), *headers])
    return head + b"\r\n\r\n" + body


def exchanged(replies: list[list[bytes]]) -> tuple[list[str], list[bytes], int]:
    """Send a request for each reply to a server that replies in pieces, or closes the connection.

    Return what became of them, what the server received, and the number of connections.
    """
    received, connections = [], 0
    remaining = iter(replies)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while request := await reader.read(65_536):
            received.append(request)
            pieces = next(remaining)
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.01)
            if not pieces:
                break
        writer.close()

    async def run() -> list[str]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            connection = Connection("{}:{}".format(*server.sockets[0].getsockname()))
            ends = []
            for _ in replies:
                end = await outcome("", connection.ask(load.post(connection.address, "/a", b"question")))
                ends.append(end.error or end.kind)
            connection.close()
            await asyncio.sleep(0.01)
            return ends

    return asyncio.run(run()), received, connections


def test_connection_is_kept_and_reads_a_response_in_pieces() -> None:
    whole = response(b"200 OK", ANSWER)
    ends, received, connections = exchanged([[whole], [whole[:20], whole[20:-3], whole[-3:]]])
    assert (ends, connections) == ([RIGHT, RIGHT], 1)
    head, _, body = received[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /a HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nContent-Length: 8\r\nContent-Type: application/json" in head
    assert body == b"question"


@pytest.mark.parametrize(
    ("reply", "end", "connections"),
    [
        ([response(b"429 Too Many Requests", REFUSAL)], '429 {"error": {}}', 1),
        ([response(b"200 OK", ANSWER, b"Connection: close")], RIGHT, 2),
        ([], "the connection was closed without an answer", 2),
    ],
)
def test_closed_connection_opens_again(reply: list[bytes], end: str, connections: int) -> None:
    assert exchanged([reply, [response(b"200 OK", ANSWER)]])[::2] == ([end, RIGHT], connections)
