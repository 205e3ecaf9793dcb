"""The state of one request and its response: id, status, time limits, and whether its client left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Literal

from starlette.types import Message, Send

from gateway.edge.counters import InFlightSlot
from gateway.edge.errors import ErrorForm, openai_form
from gateway.edge.routes import OTHER

# A route that streams reports by itself that a piece is late. This ends a stream whose client does not read.
STREAM_GRACE_S = 5
# Bytes per second: a body that arrives at least this fast has the time that it takes.
MIN_RATE = 16_384


class RequestState:
    """The state of a request. Routes find it in `request.scope["request_state"]`.

    When the time is over or the client leaves, it cancels the request's task, which ends the task's calls to Triton.
    """

    def __init__(self, id: bytes, send: Send, timeout: float) -> None:
        self.id = id
        self.route = OTHER
        self.error_form: ErrorForm = openai_form  # of the API that the client uses
        self.headers: Sequence[tuple[bytes, bytes]] = [(b"x-request-id", id)]  # of the response, beside the route's
        self.status = 0
        self.failure = ""  # what to log about an error of ours
        self.slot: InFlightSlot | None = None
        self.started = time.perf_counter()
        self.has_body = False  # the body was read
        self.has_response = False  # its head was sent
        self.is_complete = False
        self.ended_by: Literal["", "client", "time"] = ""
        self._send = send
        self._timeout = timeout
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + timeout
        self._timer = self._loop.call_at(self._deadline, self._check_deadline)

    @property
    def seconds(self) -> float:
        """Return the time since the request's head arrived."""
        return time.perf_counter() - self.started

    async def send(self, message: Message) -> None:
        """Send a part of the response; its head gets the headers of all responses."""
        self._deadline = self._loop.time() + self._timeout + STREAM_GRACE_S
        if message["type"] == "http.response.start":
            self.has_response = True
            self.status = message["status"]
            message = {**message, "headers": [*message["headers"], *self.headers]}
        elif not message.get("more_body"):
            self.is_complete = True
        await self._send(message)

    def body_grew(self, size: int) -> None:
        """Extend the time for the body by that of this many bytes at MIN_RATE."""
        self._deadline += size / MIN_RATE

    def body_is_read(self) -> None:
        """Begin the time for the answer."""
        self.has_body = True
        self._deadline = self._loop.time() + self._timeout

    def client_left(self) -> None:
        """Cancel the task, unless it reads the body and notices by itself, or the response is complete."""
        if self.has_body and not self.is_complete:
            self._cancel("client")

    def end(self) -> None:
        self._timer.cancel()
        if self.slot:
            self.slot.release()

    def _check_deadline(self) -> None:
        if self._loop.time() < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._check_deadline)
        else:
            self._cancel("time")

    def _cancel(self, reason: Literal["client", "time"]) -> None:
        if not self.ended_by and self._task:
            self.ended_by = reason
            self._task.cancel()
