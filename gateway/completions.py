"""POST /v1/completions, and /v1/chat/completions, whose messages become a prompt inside Triton."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

import grpc
import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from gateway import bodies
from gateway.answer_format import AnswerFormat, EventStream, Piece, events
from gateway.api_error import ApiError, from_triton
from gateway.bodies import PositiveInt, json_response
from gateway.context import Gateway, gateway_of
from gateway.inference import Inference, Outputs
from gateway.rows import Input, as_rows, check_count, check_ids
from gateway.served_systems import Served, System
from triton_transformers.tensors import Row, Tensor

# Option of a model -> its type, and the value that a model without the option has: it takes the most probable token.
OPTIONS: dict[str, tuple[str, float | None]] = {
    "max_new_tokens": ("INT32", None),
    "temperature": ("FP32", 0),
    "top_p": ("FP32", 1),
    "seed": ("INT64", None),
    "stop": ("BYTES", None),
}
# Model's input -> field of the request, where the names differ.
FIELDS = {"max_new_tokens": "max_tokens", "text_input": "prompt"}
OUTPUTS = TEXT, REASON, PROMPT_TOKENS, NEW_TOKENS = (
    "text_output", "finish_reason", "num_input_tokens", "num_output_tokens",
)  # fmt: skip
# The backends' words for a prompt that leaves no room for the new tokens.
TOO_LONG = re.compile(r"has \d+ tokens; (in the model's|of the model's|the model is compiled)")


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that completions and chat share."""

    model: str
    max_tokens: PositiveInt | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Meta(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


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


async def completions(request: Request) -> Response:
    body = await bodies.read(request, CompletionsBody)
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


async def chat(request: Request) -> Response:
    body = await bodies.read(request, ChatBody)
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


# --- options as tensors, and texts, whole or in pieces ----------------------------------------------------------------


async def respond(
    request: Request, body: GenerationBody, source: str, texts: Sequence[Row], answer: AnswerFormat, echo: bool = False
) -> Response:
    """Generate from the texts, which are the model's input `source`."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "'stream_options' requires 'stream': true.", "stream_options")
    gateway = gateway_of(request)
    system = await find(gateway.served, body, source)
    check_ids(system, texts, "prompt")
    options = option_tensors(system, body, echo)
    if not body.stream:
        tensors = [Tensor.from_texts(source, texts), *options]
        (pieces,) = [pieces async for pieces in generate(gateway, system, tensors)]
        return json_response(answer.whole(pieces))
    prompts = [Tensor.from_texts(source, [text]) for text in texts]
    streams = [generate(gateway, system, [prompt, *options]) for prompt in prompts]
    response = await EventStream.begin(events(answer, streams), gateway.limits.timeout)
    state = request.scope["request_state"]
    gateway.counters.first_token(state.route, time.perf_counter() - state.started)
    return response


async def find(served: Served, body: GenerationBody, source: str) -> System:
    """Return the model that the request is for: the system itself, or its companion that streams."""
    system = await served.find(body.model, "generation")
    if source not in system.inputs:
        advice = " Use /v1/completions." if source == "messages" else ""
        message = f"The model '{body.model}' has no input '{source}', which this endpoint needs.{advice}"
        raise ApiError(400, message, "model")
    if not body.stream:
        if system.streams and "stream" not in system.inputs:
            raise ApiError(400, f"The model '{body.model}' only streams: send 'stream': true.", "stream")
        return system
    if (streaming := await served.stream_of(system)) is None:
        advice = f"Serve '{body.model}_stream' too, or send 'stream': false."
        raise ApiError(400, f"The model '{body.model}' does not stream. {advice}", "stream", "unsupported_parameter")
    return streaming


def option_tensors(system: System, body: GenerationBody, echo: bool) -> list[Tensor]:
    """Return the request's options as tensors. Raise ApiError for one that the model does not have."""
    requested: dict[str, Any] = {
        "max_new_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "seed": None if body.seed is None else body.seed & (2**63 - 1),  # OpenAI's may be negative
        "stop": [body.stop] if isinstance(body.stop, str) else body.stop or None,
    }
    for name, (_, default) in OPTIONS.items():
        if name not in system.inputs and requested[name] not in (None, default):
            field = FIELDS.get(name, name)
            raise ApiError(400, f"The model '{body.model}' does not support '{field}'.", field, "unsupported_parameter")
    if requested["temperature"] is None:
        requested["temperature"] = 1.0  # as OpenAI's
    tensors = [
        Tensor.from_texts(name, value) if datatype == "BYTES" else Tensor.from_values(name, datatype, [value])
        for name, (datatype, _) in OPTIONS.items()
        if name in system.inputs and (value := requested[name]) is not None
    ]
    flags = {"exclude_input_in_output": not echo, "stream": bool(body.stream)}
    return tensors + [
        Tensor.from_values(name, "BOOL", [value])
        for name, value in flags.items()
        if name in system.inputs and (name != "stream" or system.streams)
    ]


async def generate(gateway: Gateway, system: System, tensors: Sequence[Tensor]) -> AsyncGenerator[list[Piece], None]:
    """Yield each response of the model as its texts. Raise ApiError that names a field of the request."""
    names = [name for name in OUTPUTS if name in system.outputs]
    prompt_tokens = new_tokens = 0
    try:
        async with aclosing(responses(gateway.inference, system, tensors, names)) as answers:
            async for outputs in answers:
                if TEXT in outputs:  # the last response of a stream may be empty
                    pieces = read(outputs)
                    prompt_tokens = sum(piece.prompt_tokens or 0 for piece in pieces)
                    new_tokens += sum(piece.new_tokens or 0 for piece in pieces)
                    yield pieces
    except grpc.RpcError as error:
        raise renamed(from_triton(error, system.name)) from None
    finally:
        gateway.counters.tokens(prompt_tokens, new_tokens)


async def responses(
    inference: Inference, system: System, tensors: Sequence[Tensor], names: Sequence[str]
) -> AsyncGenerator[Outputs, None]:
    if not system.streams:
        yield await inference.infer(system.name, tensors, names, system.cancellable)
        return
    async with aclosing(inference.stream(system.name, tensors, names, system.cancellable)) as stream:
        async for outputs in stream:
            yield outputs


def read(outputs: Outputs) -> list[Piece]:
    texts = outputs[TEXT].texts()
    unknown = [None] * len(texts)
    reasons = [reason or None for reason in outputs[REASON].texts()] if REASON in outputs else unknown
    prompt_tokens, new_tokens = (
        outputs[name].array().ravel().tolist() if name in outputs else unknown for name in (PROMPT_TOKENS, NEW_TOKENS)
    )
    return list(map(Piece, texts, reasons, prompt_tokens, new_tokens))


def renamed(error: ApiError) -> ApiError:
    """Return an error about an input of the model as one about a field of the request."""
    if "has no chat template" in error.message:
        return ApiError(400, "This model has no chat template: send its prompt to /v1/completions.", "messages")
    if match := re.match(r"input '(\w+)'", error.message):
        message = re.sub(r"'(\w+)'", lambda name: f"'{FIELDS.get(name[1], name[1])}'", error.message)
        code = "context_length_exceeded" if TOO_LONG.search(message) else None
        return ApiError(error.status, message, FIELDS.get(match[1], match[1]), code)
    return error
