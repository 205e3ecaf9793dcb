"""POST /v1/chat/completions. The model's tokenizer turns the messages into a prompt, inside Triton."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from gateway import fields
from gateway.answer_format import AnswerFormat, Piece
from gateway.api_error import ApiError
from gateway.text_generation import GenerationBody, PositiveInt, respond


class TextPart(msgspec.Struct):
    type: Literal["text"]
    text: str


class Message(msgspec.Struct):
    """A message. Clients send the model's earlier messages back with all fields; those of None are null in them."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    tool_calls: Annotated[list[Any], Meta(max_length=0)] | None = None
    function_call: None = None
    audio: None = None


class ChatBody(GenerationBody, kw_only=True):
    messages: list[Message]
    max_completion_tokens: PositiveInt | None = None


class AnswerMessage(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class MessageChoice(msgspec.Struct):
    index: int
    message: AnswerMessage
    finish_reason: str | None
    logprobs: None = None


class Delta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class DeltaChoice(msgspec.Struct):
    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: None = None


class ChatFormat(AnswerFormat):
    """A stream begins with the role and ends with the reason; texts come between."""

    prefix = "chatcmpl"
    object = "chat.completion"
    event_object = "chat.completion.chunk"

    def choice(self, index: int, piece: Piece) -> MessageChoice:
        return MessageChoice(index, AnswerMessage(piece.text), piece.finish_reason)

    def first(self, index: int) -> list[msgspec.Struct]:
        return [DeltaChoice(index, Delta("assistant", ""))]

    def part(self, index: int, text: str) -> DeltaChoice:
        return DeltaChoice(index, Delta(content=text))

    def last(self, index: int, finish_reason: str) -> DeltaChoice:
        return DeltaChoice(index, Delta(), finish_reason)


DECODER = msgspec.json.Decoder(ChatBody)


async def chat(request: Request) -> Response:
    body = await fields.read(request, DECODER)
    if not body.messages:
        raise ApiError(400, "'messages' must have at least one message.", "messages")
    if body.max_completion_tokens is not None:
        body.max_tokens = body.max_completion_tokens
    conversation = msgspec.json.encode([plain(message) for message in body.messages]).decode()
    answer = ChatFormat(body.model, body.includes_usage)
    return await respond(request, body, "messages", [conversation], answer)


def plain(message: Message) -> dict[str, str]:
    """Return the message as chat templates expect it: with one text, and with roles that they know."""
    content = message.content
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    return {"role": "system" if message.role == "developer" else message.role, "content": text}
