"""Answers with generated texts, as completions and chat write them: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.api_error import ApiError, openai_form

Item = TypeVar("Item")
DONE = b"data: [DONE]\n\n"
# Proxies must not collect events.
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
ENCODER = msgspec.json.Encoder()


class Piece(NamedTuple):
    """A generated text, or a piece of it. A field is None if the model does not report it."""

    text: str
    finish_reason: str | None  # None also until the text ends
    prompt_tokens: int | None
    new_tokens: int | None


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


NO_USAGE = Usage(0, 0, 0)


class Answer(msgspec.Struct):
    """A response, or an event of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | UnsetType | None


class AnswerFormat(ABC):
    """The form in which a route writes the answer to one request."""

    prefix: ClassVar[str]  # of the answer's id
    object: ClassVar[str]
    event_object: ClassVar[str]

    def __init__(self, model: str, include_usage: bool) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model
        self.include_usage = include_usage

    @abstractmethod
    def choice(self, index: int, piece: Piece) -> msgspec.Struct:
        """Return a choice with a whole text."""

    @abstractmethod
    def first(self, index: int) -> list[msgspec.Struct]:
        """Return the choices of the events that come before a text."""

    @abstractmethod
    def part(self, index: int, text: str) -> msgspec.Struct:
        """Return the choice of an event with a piece of a text."""

    @abstractmethod
    def last(self, index: int, finish_reason: str) -> msgspec.Struct:
        """Return the choice of the event that ends a text."""

    def whole(self, pieces: Sequence[Piece]) -> Answer:
        choices = [self.choice(index, piece) for index, piece in enumerate(pieces)]
        usage: Usage | None = NO_USAGE
        for piece in pieces:
            usage = add(usage, piece)
        return Answer(self.id, self.object, self.created, self.model, choices, usage)

    def event(self, choices: list[msgspec.Struct], usage: Usage | None = None) -> bytes:
        # If one event has the usage, the others have null.
        shown = usage if self.include_usage else UNSET
        return event(Answer(self.id, self.event_object, self.created, self.model, choices, shown))


def add(usage: Usage | None, piece: Piece, prompt: bool = True) -> Usage | None:
    """Return the usage with that of a piece, or None if the model does not count tokens."""
    if usage is None or piece.prompt_tokens is None or piece.new_tokens is None:
        return None
    prompt_tokens = usage.prompt_tokens + (piece.prompt_tokens if prompt else 0)
    completion_tokens = usage.completion_tokens + piece.new_tokens
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)


async def events(
    answer: AnswerFormat, streams: Sequence[AsyncGenerator[list[Piece], None]]
) -> AsyncGenerator[bytes, None]:
    """Yield the events of texts that are generated side by side."""
    usage: Usage | None = NO_USAGE
    begun: set[int] = set()
    async with aclosing(side_by_side(streams)) as arrivals:
        async for index, (piece,) in arrivals:
            is_first = index not in begun
            begun.add(index)
            # Each piece repeats the number of the prompt's tokens.
            usage = add(usage, piece, prompt=is_first)
            choices = answer.first(index) if is_first else []
            if piece.text:
                choices.append(answer.part(index, piece.text))
            if piece.finish_reason:
                choices.append(answer.last(index, piece.finish_reason))
            yield b"".join([answer.event([choice]) for choice in choices])
    if answer.include_usage:
        yield answer.event([], usage)


async def side_by_side(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[tuple[int, Item], None]:
    """Yield what each stream yields, with the stream's number, in the order of arrival. Close them at the end."""
    async with AsyncExitStack() as stack:
        for stream in streams:
            await stack.enter_async_context(aclosing(stream))
        if len(streams) == 1:  # needs no task
            async for item in streams[0]:
                yield 0, item
            return
        waiting = {asyncio.ensure_future(anext(stream, None)): index for index, stream in enumerate(streams)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index = waiting.pop(task)
                    if (next_item := task.result()) is not None:
                        waiting[asyncio.ensure_future(anext(streams[index], None))] = index
                        yield index, next_item
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


# --- server-sent events -----------------------------------------------------------------------------------------------


def event(value: Any) -> bytes:
    return b"data: %b\n\n" % ENCODER.encode(value)


class EventStream(StreamingResponse):
    """A stream of events whose first ones exist already. An error after them becomes the last event."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], timeout: float) -> None:
        super().__init__(events, headers=HEADERS)
        self.first = first
        self.events = events
        self.timeout = timeout  # seconds from one event to the next

    @classmethod
    async def begin(cls, events: AsyncGenerator[bytes, None], timeout: float) -> EventStream:
        """Wait for the first events, so that an error before them gets its own status."""
        return cls(await anext(events, b""), events, timeout)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. Starlette would also wait for the client's end, which GatewayProtocol reports."""
        async with aclosing(self.events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await self.send_events(send)
                last = DONE
            except ApiError as error:
                scope["request_state"].status, scope["request_state"].failure = error.status, error.cause
                last = event(openai_form(error))
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
