"""POST /v1/completions."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway import fields
from gateway.answer_format import AnswerFormat, Piece
from gateway.context import gateway_of
from gateway.rows import check_count
from gateway.text_generation import GenerationBody, PositiveInt, respond


class CompletionsBody(GenerationBody, kw_only=True):
    prompt: str | list[str]
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


DECODER = msgspec.json.Decoder(CompletionsBody)


async def completions(request: Request) -> Response:
    body = await fields.read(request, DECODER)
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    check_count(gateway_of(request), len(prompts), "prompt")
    answer = CompletionsFormat(body.model, body.includes_usage)
    return await respond(request, body, "text_input", prompts, answer, bool(body.echo))
