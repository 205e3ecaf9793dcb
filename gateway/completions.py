"""POST /v1/completions, and /v1/chat/completions, whose messages become a prompt inside Triton."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from gateway import bodies
from gateway.answer_format import AnswerFormat, Piece
from gateway.api_error import ApiError
from gateway.bodies import PositiveInt
from gateway.context import gateway_of
from gateway.rows import Input, as_rows, check_count
from gateway.text_generation import GenerationBody, respond


class CompletionsBody(GenerationBody, kw_only=True):
    prompt: Input
    max_tokens: PositiveInt = 16  # OpenAI's default
    echo: bool | None = None


class TextChoice(msgspec.Struct):
    text: str
    index: int
    finish_reason: str | None
    logprobs: None = None


class CompletionsFormat(AnswerFormat):
    """Answers and events have the same form."""

    prefix = "cmpl"
    object = event_object = "text_completion"

    def choice(self, index: int, piece: Piece) -> TextChoice:
        return TextChoice(piece.text, index, piece.finish_reason)

    def first(self, index: int) -> list[msgspec.Struct]:
        return []

    def part(self, index: int, text: str) -> TextChoice:
        return TextChoice(text, index, None)

    def last(self, index: int, finish_reason: str) -> TextChoice:
        return TextChoice("", index, finish_reason)


COMPLETIONS = msgspec.json.Decoder(CompletionsBody)


async def completions(request: Request) -> Response:
    body = await bodies.read(request, COMPLETIONS)
    prompts = as_rows(body.prompt, "prompt")
    check_count(gateway_of(request), len(prompts), "prompt")
    answer = CompletionsFormat(body.model, body.includes_usage)
    return await respond(request, body, "text_input", prompts, answer, bool(body.echo))


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


CHAT = msgspec.json.Decoder(ChatBody)


async def chat(request: Request) -> Response:
    body = await bodies.read(request, CHAT)
    messages = conversation(body.messages)
    if body.max_completion_tokens is not None:
        body.max_tokens = body.max_completion_tokens
    answer = ChatFormat(body.model, body.includes_usage)
    return await respond(request, body, "messages", [messages], answer)


def conversation(messages: list[Message]) -> str:
    """Return the messages as a model's input has them. Raise ApiError if there are none."""
    if not messages:
        raise ApiError(400, "'messages' must have at least one message.", "messages")
    return msgspec.json.encode([plain(message) for message in messages]).decode()


def plain(message: Message) -> dict[str, str]:
    """Return the message as chat templates expect it: with one text, and with roles that they know."""
    content = message.content
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    return {"role": "system" if message.role == "developer" else message.role, "content": text}
