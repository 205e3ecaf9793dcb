"""The load of benchmarks, drills and tests: one asyncio client, which records the outcome of every request.

Requests leave at a rate, however slowly the server answers (an open loop), or each user waits for a response before its
next request (a closed loop). A connection takes so little CPU time that a process can have thousands of users.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, cast

import grpc
import numpy as np
import numpy.typing as npt

from triton_transformers.answers import LIMITS
from triton_transformers.corpus import MIXED

RIGHT, FAILED, WRONG, LOST = "right", "failed", "wrong", "lost"
TIMEOUT_S = 90.0
# Two of the texts have a cosine of at most 0.9.
TEXTS, MIN_COSINE = MIXED.texts[:64:4], LIMITS["load", ""].cosine
JSON = {"Content-Type": "application/json"}

Vectors = npt.NDArray[Any]
# Sends the request, or the requests of the user, that has this number.
Sender = Callable[[int], Coroutine[Any, Any, object]]


class RefusedError(Exception):
    """The server answered with another HTTP status than 200, or, if the status is None, with an error of gRPC."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class WrongError(Exception):
    """The server answered, but not this request."""


class Outcome(NamedTuple):
    """The end of one request."""

    route: str
    sent_at: float  # on the monotonic clock
    seconds: float
    kind: str  # RIGHT; FAILED: an error; WRONG: another answer; LOST: neither answer nor error
    error: str = ""
    status: int | None = None  # of HTTP, if it is not 200


async def outcome(route: str, answer: Awaitable[object], timeout: float = TIMEOUT_S) -> Outcome:
    """Wait for the answer, and return what became of the request. The caller awaits this at once after it has sent."""
    sent_at = time.monotonic()
    kind, error, status = RIGHT, "", None
    try:
        async with asyncio.timeout(timeout):
            await answer
    except TimeoutError:
        kind, error = LOST, f"no answer within {timeout:g} s"
    except grpc.RpcError as failure:
        kind, error = FAILED, f"{failure.code().name} {(failure.details() or '')[:120]}"
    except RefusedError as failure:
        kind, error, status = FAILED, str(failure), failure.status
    except OSError as failure:
        kind, error = FAILED, str(failure)
    except WrongError as failure:
        kind, error = WRONG, str(failure)
    except (ValueError, KeyError, IndexError, TypeError) as failure:
        kind, error = WRONG, f"the answer cannot be read ({failure})"
    return Outcome(route, sent_at, time.monotonic() - sent_at, kind, error, status)


class Load:
    """Requests from the beginning of a `with` block until its end, and until each of them has an outcome.

    `run` sends them, in a thread with a loop of its own. It ends soon after `is_ending`.
    """

    def __init__(self, run: Callable[[Load], Awaitable[None]], timeout_s: float = TIMEOUT_S) -> None:
        self._run = run
        self._timeout_s = timeout_s
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self.outcomes: list[Outcome] = []
        self.problems: list[str] = []  # errors of our own, which end the load

    def __enter__(self) -> Load:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self.ended.set)
        self._thread.join()

    @property
    def is_ending(self) -> bool:
        return self.ended.is_set()

    async def send(self, route: str, answer: Awaitable[object]) -> Outcome:
        """Wait for the answer to a request, and record the outcome."""
        ended = await outcome(route, answer, self._timeout_s)
        self.outcomes.append(ended)
        return ended

    async def pause(self, seconds: float) -> None:
        """Wait, but not beyond the end of the load."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.ended.wait()

    async def open_loop(self, rate: float, request: Sender) -> None:
        """Begin `rate` requests per second, numbered from 0."""
        begin = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in itertools.count():
                await self.pause(max(0.0, begin + number / rate - time.monotonic()))
                if self.is_ending:
                    break
                group.create_task(request(number))

    async def closed_loop(self, users: int, user: Sender) -> None:
        """Run users, numbered from 0, each of which sends one request after the other until `is_ending`."""
        async with asyncio.TaskGroup() as group:
            for number in range(users):
                group.create_task(user(number))

    async def _main(self) -> None:
        self._loop, self.ended = asyncio.get_running_loop(), asyncio.Event()
        self._started.set()
        try:
            await self._run(self)
        except* Exception as errors:
            error: BaseException = errors
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            place = traceback.extract_tb(error.__traceback__)[-1]
            self.problems.append(f"the clients stopped: {error!r} at {place.filename}:{place.lineno}")
            await self.ended.wait()  # the end of the `with` block needs the loop


# --- HTTP -------------------------------------------------------------------------------------------------------------


def post(address: str, path: str, body: bytes, headers: Mapping[str, str] = JSON) -> bytes:
    """Return a whole request as it goes over the wire."""
    fields = {"Host": address, "Content-Length": str(len(body)), **headers}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Response(NamedTuple):
    """The head and the body of a response."""

    head: bytes
    body: bytes

    @property
    def status(self) -> int:
        return int(self.head[9:12])

    def header(self, name: str) -> str:
        """Return a header, or nothing."""
        match = re.search(rb"\r\n%b: *([^\r]*)" % name.encode(), self.head, re.IGNORECASE)
        return match[1].decode() if match else ""

    def check(self) -> Response:
        """Raise RefusedError unless the status is 200."""
        if self.status != 200:
            raise RefusedError(f"{self.status} {self.body[:200].decode(errors='replace')}", self.status)
        return self


class Connection(asyncio.Protocol):
    """A connection to host:port, for one request at a time. It opens again if the server has closed it."""

    _transport: asyncio.Transport | None = None
    _response: asyncio.Future[Response] | None = None
    _received = b""

    def __init__(self, address: str) -> None:
        self.address = address

    async def ask(self, request: bytes) -> Response:
        """Send a request and return its response. Raise RefusedError unless its status is 200."""
        return (await self.exchange(request)).check()

    async def exchange(self, request: bytes) -> Response:
        """Send a request and return its response, whatever its status."""
        await self.open()
        assert self._transport
        self._response, self._received = asyncio.get_running_loop().create_future(), b""
        try:
            self._transport.write(request)
            response = await self._response
        except BaseException:
            self.close()  # a response that came later would answer the next request
            raise
        if response.header("connection").lower() == "close":
            self.close()
        return response

    async def open(self) -> None:
        if self._transport is None or self._transport.is_closing():
            host, _, port = self.address.rpartition(":")
            await asyncio.get_running_loop().create_connection(lambda: self, host, int(port))

    def close(self) -> None:
        if self._transport:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports have another base

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        response = Response(head, body)
        if end and len(body) >= int(response.header("content-length") or 0):
            self._settle(lambda waiting: waiting.set_result(response))

    def connection_lost(self, error: Exception | None) -> None:
        closed = ConnectionResetError("the connection was closed without an answer")
        self._settle(lambda waiting: waiting.set_exception(error or closed))

    def _settle(self, settle: Callable[[asyncio.Future[Response]], None]) -> None:
        if self._response and not self._response.done():
            settle(self._response)


# --- known answers ----------------------------------------------------------------------------------------------------


class KnownVectors:
    """The right vector of each of TEXTS. Raise ValueError if two are nearly equal."""

    def __init__(self, vectors: Vectors) -> None:
        cosines = vectors @ vectors.T - 2 * np.eye(len(vectors))
        if cosines.max() >= MIN_COSINE - 0.05:
            raise ValueError("two of the texts have nearly the same vector, so a wrong one would not be seen")
        self._vectors = vectors

    def check(self, chosen: Sequence[int], vectors: Vectors) -> None:
        """Raise WrongError unless these are the vectors of the chosen texts."""
        expected = self._vectors[list(chosen)]
        if vectors.shape != expected.shape or not (vectors * expected).sum(-1).min() >= MIN_COSINE:
            raise WrongError("another vector than before")
