"""POST /v1/completions, and /v1/chat/completions, whose messages become a prompt inside Triton.

The answers are whole, or streams of server-sent events.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway import bodies
from gateway.api_error import ApiError, openai_form
from gateway.bodies import PositiveInt, json_response
from gateway.context import Gateway, gateway_of
from gateway.images import Image, image_tensors, placed
from gateway.inference import Outputs
from gateway.rows import ImageUrl, Input, TokenId, as_rows, check_count, check_ids
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
# Option of the model's input `sampling_parameters`, one JSON object -> its values that change nothing.
SAMPLING: dict[str, tuple[Any, ...]] = {
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "skip_special_tokens": (True,),
    "chat_template_kwargs": ({}, {"enable_thinking": False}),
    "structured_outputs": (),
}
SAMPLING_PARAMETERS = "sampling_parameters"
# The maximum numbers of tokens that a request may name in its options.
MAX_BIASES, MAX_STOP_IDS = 1024, 256
# Model's input -> field of the request, where the names differ.
FIELDS = {"max_new_tokens": "max_tokens", "text_input": "prompt"}
OUTPUTS = TEXT, REASON, PROMPT_TOKENS, NEW_TOKENS = (
    "text_output", "finish_reason", "num_input_tokens", "num_output_tokens",
)  # fmt: skip
# How the backends begin an error about an input or an option.
OPTION = re.compile(r"(?:unknown )?(?:input|option|parameter|sampling parameter) '(\w+)'")
# The backends' words for a prompt that leaves no room for the new tokens.
TOO_LONG = re.compile(r"has \d+ tokens; (in the model's|of the model's|the model is compiled)")
Item = TypeVar("Item")
DONE = b"data: [DONE]\n\n"
# Proxies must not collect events.
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
ENCODER = msgspec.json.Encoder()
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]


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
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=MAX_BIASES)] | None = None
    # These are vLLM's.
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = None

    def sampling(self) -> dict[str, Any]:
        """Return the options of SAMPLING that the request sets."""
        return {name: value for name in SAMPLING if (value := getattr(self, name, None)) is not None}


class CompletionsBody(GenerationBody, kw_only=True):
    prompt: Input
    max_tokens: PositiveInt = 16  # OpenAI's default
    echo: bool | None = None


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    image_url: ImageUrl


class Message(msgspec.Struct):
    """A message. Clients send the model's earlier messages back with all fields; those of None are null in them."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart | ImagePart]
    tool_calls: Annotated[list[Any], Meta(max_length=0)] | None = None
    function_call: None = None
    audio: None = None


class ChatBody(GenerationBody, kw_only=True):
    messages: list[Message]
    max_completion_tokens: PositiveInt | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None

    def sampling(self) -> dict[str, Any]:
        if self.reasoning_effort is None:
            return super().sampling()
        # A template reads one of the two names, or none.
        thinks = self.reasoning_effort != "none"
        effort = {"enable_thinking": thinks} | ({"reasoning_effort": self.reasoning_effort} if thinks else {})
        return super().sampling() | {"chat_template_kwargs": effort | (self.chat_template_kwargs or {})}


async def completions(request: Request) -> Response:
    body = await bodies.read(request, CompletionsBody)
    prompts = as_rows(body.prompt, "prompt")
    check_count(gateway_of(request), len(prompts), "prompt")
    return await respond(request, body, "text_input", prompts, bool(body.echo))


async def chat(request: Request) -> Response:
    body = await bodies.read(request, ChatBody)
    messages = conversation(body.messages)
    if body.max_completion_tokens is not None:
        body.max_tokens = body.max_completion_tokens
    return await respond(request, body, "messages", [messages], images=images_of(body.messages))


def conversation(messages: list[Message]) -> str:
    """Return the messages as a model's input has them. Raise ApiError if there are none."""
    if not messages:
        raise ApiError(400, "'messages' must have at least one message.", "messages")
    return msgspec.json.encode([plain(message) for message in messages]).decode()


def plain(message: Message) -> dict[str, Any]:
    """Return the message as chat templates expect it: with one text, or parts, and with roles that they know."""
    return {
        "role": "system" if message.role == "developer" else message.role,
        "content": plain_content(message.content),
    }


def plain_content(content: str | list[TextPart | ImagePart]) -> str | list[dict[str, str]]:
    """Return one text, or parts if some of them are images, whose files are in the input `images`."""
    if isinstance(content, str):
        return content
    texts = [part.text for part in content if isinstance(part, TextPart)]
    if len(texts) == len(content):
        return "\n".join(texts)
    return [
        {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"} for part in content
    ]


def images_of(messages: list[Message]) -> list[Image]:
    """Return the images of all messages, in their order."""
    return [
        (f"messages[{i}].content[{j}]", part.image_url.url)
        for i, message in enumerate(messages)
        for j, part in enumerate(message.content)
        if isinstance(part, ImagePart)
    ]


async def respond(
    request: Request,
    body: GenerationBody,
    source: str,
    texts: Sequence[Row],
    echo: bool = False,
    images: Sequence[Image] = (),
) -> Response:
    """Generate from the texts, which are the model's input `source`."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "'stream_options' requires 'stream': true.", "stream_options")
    gateway = gateway_of(request)
    system = await find(gateway.served, body, source)
    check_ids(system, texts, "prompt")
    options = option_tensors(system, body, echo)
    options += await image_tensors(gateway.config, system, images)
    answer = AnswerFormat(body, is_chat=source == "messages")
    if not body.stream:
        tensors = [Tensor.from_texts(source, texts), *options]
        (pieces,) = [pieces async for pieces in generate(gateway, system, tensors, images)]
        return json_response(answer.whole(pieces))
    prompts = [Tensor.from_texts(source, [text]) for text in texts]
    streams = [generate(gateway, system, [prompt, *options], images) for prompt in prompts]
    response = await EventStream.begin(answer.events(streams), gateway.limits.timeout)
    state = request.scope["request_state"]
    gateway.counters.first_token(state.route, state.seconds)
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
            raise unsupported(body.model, field)
    sampling = {name: value for name, value in body.sampling().items() if value not in SAMPLING[name]}
    if sampling and SAMPLING_PARAMETERS not in system.inputs:
        raise unsupported(body.model, next(iter(sampling)))
    if requested["temperature"] is None:
        requested["temperature"] = 1.0  # as OpenAI's
    tensors = [
        Tensor.from_texts(name, value) if datatype == "BYTES" else Tensor.from_values(name, datatype, [value])
        for name, (datatype, _) in OPTIONS.items()
        if name in system.inputs and (value := requested[name]) is not None
    ]
    if sampling:
        tensors.append(Tensor.from_texts(SAMPLING_PARAMETERS, [ENCODER.encode(sampling).decode()]))
    flags = {"exclude_input_in_output": not echo, "stream": bool(body.stream)}
    return tensors + [
        Tensor.from_values(name, "BOOL", [value])
        for name, value in flags.items()
        if name in system.inputs and (name != "stream" or system.streams)
    ]


def unsupported(model: str, field: str) -> ApiError:
    return ApiError(400, f"The model '{model}' does not support '{field}'.", field, "unsupported_parameter")


class Piece(NamedTuple):
    """A generated text, or a piece of it. A field is None if the model does not report it."""

    text: str
    finish_reason: str | None  # None also until the text ends
    prompt_tokens: int | None
    new_tokens: int | None


async def generate(
    gateway: Gateway, system: System, tensors: Sequence[Tensor], images: Sequence[Image] = ()
) -> AsyncGenerator[list[Piece], None]:
    """Yield each response of the model as its texts. Raise ApiError that names a field of the request."""
    names = [name for name in OUTPUTS if name in system.outputs]
    prompt_tokens = new_tokens = 0
    try:
        async with aclosing(gateway.responses(system, tensors, names)) as responses:
            async for outputs in responses:
                if TEXT in outputs:  # the last response of a stream may be empty
                    pieces = read(outputs)
                    prompt_tokens = sum(piece.prompt_tokens or 0 for piece in pieces)
                    new_tokens += sum(piece.new_tokens or 0 for piece in pieces)
                    yield pieces
    except ApiError as error:
        raise renamed(placed(error, images)) from None
    finally:
        gateway.counters.tokens(prompt_tokens, new_tokens)


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
    if match := OPTION.match(error.message):
        message = re.sub(r"'(\w+)'", lambda name: f"'{FIELDS.get(name[1], name[1])}'", error.message)
        code = "context_length_exceeded" if TOO_LONG.search(message) else None
        return ApiError(error.status, message, FIELDS.get(match[1], match[1]), code)
    return error


# --- the form of answers ----------------------------------------------------------------------------------------------


class AnswerFormat:
    """The form of the answer to one request: a whole one, or the events of a stream."""

    def __init__(self, body: GenerationBody, is_chat: bool) -> None:
        self.is_chat = is_chat
        self.includes_usage = bool(body.stream_options and body.stream_options.include_usage)
        kind = ("chat.completion.chunk" if body.stream else "chat.completion") if is_chat else "text_completion"
        id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.head = {"id": id, "object": kind, "created": int(time.time()), "model": body.model}

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        choices = []
        for index, piece in enumerate(pieces):
            message = {"content": piece.text, "role": "assistant", "refusal": None}
            content = {"message": message} if self.is_chat else {"text": piece.text}
            choices.append(self.choice(index, content, piece.finish_reason))
        tokens = usage([piece.prompt_tokens for piece in pieces], [piece.new_tokens for piece in pieces])
        return self.head | {"choices": choices, "usage": tokens}

    def choice(self, index: int, content: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, **content, "finish_reason": finish_reason, "logprobs": None}

    def event(self, index: int, delta: dict[str, str], finish_reason: str | None = None) -> bytes:
        """Return an event with a piece of a text. If one event has the usage, the others have null."""
        content = {"delta": delta} if self.is_chat else {"text": delta.get("content", "")}
        null = {"usage": None} if self.includes_usage else {}
        return event(self.head | {"choices": [self.choice(index, content, finish_reason)]} | null)

    async def events(self, streams: Sequence[AsyncGenerator[list[Piece], None]]) -> AsyncGenerator[bytes, None]:
        """Yield the events of texts that are generated side by side.

        A chat's text begins with the role. Each text ends with the reason.
        """
        prompt_tokens: dict[int, int | None] = {}  # each piece of a text repeats them
        new_tokens: list[int | None] = []
        async with aclosing(side_by_side(streams)) as arrivals:
            async for index, (piece,) in arrivals:
                new_tokens.append(piece.new_tokens)
                events = b""
                if self.is_chat and index not in prompt_tokens:
                    events += self.event(index, {"role": "assistant", "content": ""})
                if piece.text:
                    events += self.event(index, {"content": piece.text})
                if piece.finish_reason:
                    events += self.event(index, {}, piece.finish_reason)
                prompt_tokens.setdefault(index, piece.prompt_tokens)
                yield events
        if self.includes_usage:
            yield event(self.head | {"choices": [], "usage": usage(prompt_tokens.values(), new_tokens)})


def usage(prompt_tokens: Iterable[int | None], new_tokens: Iterable[int | None]) -> dict[str, int] | None:
    """Return the sums of these counts, or None if the model does not count tokens."""
    counts = [*prompt_tokens], [*new_tokens]
    if any(None in own for own in counts):
        return None
    prompt, completion = (sum(count or 0 for count in own) for own in counts)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


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
