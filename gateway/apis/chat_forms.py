"""Answer requests to the APIs of responses and messages as chats of OpenAI's form."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from gateway.apis.completions import ChatBody, chat_logprobs, chat_request
from gateway.edge import bodies
from gateway.edge.errors import ApiError
from gateway.text.generation import Chunk, GenerationRequest, TokenCounts
from gateway.text.tool_calls import CallDelta
from gateway.triton.context import Gateway

# A part of a message's content, and the field of the request that it comes from.
PlacedPart = tuple[dict[str, Any], str]
Kind = Literal["reasoning", "text", "call"]
# The objects that only chats have around some fields.
NESTED = ("allowed_tools", "function", "json_schema")


class Conversation:
    """The messages of a chat. Neighbours of one role become one message: many templates require roles that alternate.

    `names` are the fields of the request that have other names than those of a chat.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self.messages: list[dict[str, Any]] = []
        self._names = names
        self._places: dict[str, str] = {}  # place in the chat -> place in the request

    def add(self, role: str, place: str, parts: Sequence[PlacedPart] = (), **fields: Any) -> None:
        """Add a message, or more parts to the last one. Each result of a tool is a message of its own."""
        if role == "tool" or not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": []} | fields)
            self._places[f"messages[{len(self.messages) - 1}]"] = place
        content = self.messages[-1]["content"]
        for part, where in parts:
            self._places[f"messages[{len(self.messages) - 1}].content[{len(content)}]"] = where
            content.append(part)

    def add_reasoning(self, text: str, place: str) -> None:
        self.add("assistant", place)
        self.messages[-1]["reasoning_content"] = self.messages[-1].get("reasoning_content", "") + text

    def add_call(self, id: str, name: str, arguments: str, place: str) -> None:
        self.add("assistant", place)
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self.messages[-1].setdefault("tool_calls", []).append(call)

    async def request(self, gateway: Gateway, fields: Mapping[str, Any]) -> GenerationRequest:
        """Return the request of the chat with these fields."""
        given = {name: value for name, value in fields.items() if value is not None}
        return await chat_request(gateway, bodies.convert(given | {"messages": self.messages}, ChatBody))

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Let errors about a field of the chat name the one that it comes from."""
        try:
            yield
        except ApiError as error:
            error.rename(self._renamed)
            raise

    def _renamed(self, field: str) -> str:
        """Return the field of the request for a field of the chat, such as `messages[1].content[0].text`."""
        first, *others = field.split(".")
        names = [first, *(name for name in others if name not in NESTED)]
        for size in (2, 1):  # a part of a message has its own place
            if place := self._places.get(".".join(names[:size])):
                return ".".join([place, *map(self._own_name, names[size:])])
        return ".".join(map(self._own_name, names))

    def _own_name(self, name: str) -> str:
        name, bracket, index = name.partition("[")
        return self._names.get(name, name) + bracket + index


def text_part(text: str, place: str) -> PlacedPart:
    return {"type": "text", "text": text}, place


def image_part(url: str, place: str) -> PlacedPart:
    return {"type": "image_url", "image_url": {"url": url}}, place


# --- the answer -------------------------------------------------------------------------------------------------------


@dataclass
class Block:
    """A part of an answer that clients see as one: reasoning, a text, or the call of a tool."""

    kind: Kind
    index: int
    call: CallDelta | None = None  # its first piece
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def text(self) -> str:
        """Return the whole text; of a call, its arguments."""
        return "".join(self.pieces)


class Step(NamedTuple):
    """A block starts, gets a piece of its text, or ends."""

    name: Literal["start", "delta", "end"]
    block: Block
    text: str = ""
    logprobs: Sequence[Any] = ()


class BlockForm(ABC):
    """The form of an answer that consists of blocks."""

    end = b""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.counts = TokenCounts(1)
        self.finish_reason: str | None = None
        self.stop_reason: str | None = None  # the stop string that ended the text

    @abstractmethod
    def answer(self) -> dict[str, Any]:
        """Return the whole answer."""

    # These yield events: those before the blocks, those of a step, those after the blocks.

    @abstractmethod
    def begin(self) -> Iterator[bytes]: ...

    @abstractmethod
    def step(self, step: Step) -> Iterator[bytes]: ...

    @abstractmethod
    def finish(self) -> Iterator[bytes]: ...

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """Return the event of an error."""

    def whole(self, choices: Sequence[Chunk]) -> dict[str, Any]:
        for chunk in choices:
            self._note(chunk)
            list(self._steps(chunk))
        list(self._last_steps())
        return self.answer()

    async def events(self, chunks: AsyncGenerator[Chunk, None]) -> AsyncGenerator[bytes, None]:
        begin = self.begin()
        async with aclosing(chunks):
            async for chunk in chunks:
                self._note(chunk)
                # Nothing is left of `begin` after the first piece.
                yield b"".join([*begin, *(event for step in self._steps(chunk) for event in self.step(step))])
        yield b"".join([*(event for step in self._last_steps() for event in self.step(step)), *self.finish()])

    def _note(self, chunk: Chunk) -> None:
        self.counts.add(chunk)
        self.finish_reason, self.stop_reason = chunk.finish_reason, chunk.stop_reason

    def _steps(self, chunk: Chunk) -> Iterator[Step]:
        """Yield the steps that a piece of the answer makes. Its logprobs go with its first text."""
        logprobs = (chat_logprobs(chunk) or {"content": []})["content"]
        for delta in chunk.deltas:
            call = delta.call
            kind: Kind = "call" if call else "reasoning" if delta.reasoning else "text"
            if not self.blocks or self.blocks[-1].kind != kind or (call and call.name):
                yield from self._next_block(kind, call)
            block, text = self.blocks[-1], call.arguments if call else delta.reasoning or delta.content
            own, logprobs = (logprobs, []) if kind == "text" else ([], logprobs)
            block.pieces.append(text)
            block.logprobs += own
            if text:
                yield Step("delta", block, text, own)

    def _next_block(self, kind: Kind, call: CallDelta | None = None) -> Iterator[Step]:
        ended = self.blocks[-1:]
        # The last block alone may be incomplete, and this makes the ended one another.
        self.blocks.append(Block(kind, len(self.blocks), call))
        yield from (Step("end", block) for block in ended)
        yield Step("start", self.blocks[-1])

    def _last_steps(self) -> Iterator[Step]:
        if not self.blocks:  # clients expect a text
            yield from self._next_block("text")
        yield Step("end", self.blocks[-1])
