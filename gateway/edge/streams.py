"""Streams of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.edge.errors import ApiError

# Proxies must not collect events.
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
ENCODER = msgspec.json.Encoder()


def event(value: Any) -> bytes:
    return b"data: %b\n\n" % ENCODER.encode(value)


def named_event(name: str, value: Any) -> bytes:
    """Return an event of an API whose events have names."""
    return b"event: %b\n%b" % (name.encode(), event(value))


class EventStream(StreamingResponse):
    """A stream of events whose first ones exist already. An error after them becomes the last event."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        timeout: float,
        end: bytes,
        failure: Callable[[ApiError], bytes],
    ) -> None:
        super().__init__(events, headers=HEADERS)
        self.first = first
        self.events = events
        self.timeout = timeout  # seconds from one event to the next
        self.end = end  # follows the last event, unless there was an error
        self.failure = failure  # makes the event of an error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. Starlette would also wait for the client's end, which GatewayProtocol reports."""
        async with aclosing(self.events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await self.send_events(send)
                last = self.end
            except ApiError as error:
                scope["request_state"].status, scope["request_state"].failure = error.status, error.cause
                last = self.failure(error)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def send_events(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(self.timeout) as limit:
                await send({"type": "http.response.body", "body": self.first, "more_body": True})
                async for events in self.events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                    limit.reschedule(clock() + self.timeout)
        except TimeoutError:
            message = f"The model sent nothing for {self.timeout:g} seconds (GATEWAY_TIMEOUT)."
            raise ApiError(504, message, code="timeout") from None
