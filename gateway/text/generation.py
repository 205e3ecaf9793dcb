"""Generate texts: what the APIs of completions, chats, responses and messages have in common.

Each of them reads its body into a GenerationRequest, and writes the chunks of the answer in its own form.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.edge.bodies import json_response
from gateway.edge.errors import ApiError, about_request, not_found
from gateway.edge.streams import ENCODER, EventStream
from gateway.text.image_urls import IMAGES, Image, image_tensors
from gateway.text.tool_calls import AnswerParser, CallDelta, Delta
from gateway.triton.context import Gateway, gateway_of
from gateway.triton.inference import Outputs
from gateway.triton.served import Served, System
from triton_transformers.errors import NO_CHAT_TEMPLATE, UNKNOWN_ADAPTER
from triton_transformers.tensors import Row, Tensor

# The options that are inputs of the model -> their types. The others go into `sampling_parameters`, one JSON object.
OPTIONS = {"max_new_tokens": "INT32", "temperature": "FP32", "top_p": "FP32", "seed": "INT64", "stop": "BYTES"}
# The values of options that change nothing, so that models without the option take them, where they are not NOTHING.
NOTHING: tuple[Any, ...] = (None, 0, [], {})
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,), "top_k": (0, -1), "repetition_penalty": (1,), "skip_special_tokens": (True,), "logprobs": (),
    "prompt_logprobs": (),
}  # fmt: skip
NO_TEMPLATE = (
    "This model has no chat template: send its prompt to /v1/completions, or add a template to the model "
    "(docs/generation.md)."
)
SAMPLING_PARAMETERS = "sampling_parameters"
# Option or input of the model -> field of a request to OpenAI's API, where the names differ.
FIELDS = {"max_new_tokens": "max_tokens", "text_input": "prompt"}
TEXT, REASON, LOGPROBS, STOP = "text_output", "finish_reason", "logprobs", "stop_reason"
COUNTS = "num_input_tokens", "num_output_tokens", "num_cached_tokens"
MAX_SEED = 2**63 - 1
# Texts of one request that run at once, more than engines batch by default. All 2,048 would fill the engine's queue, so
# that it refuses other clients, and gRPC fails with as many streams.
AT_ONCE = 64
PLAIN = partial(AnswerParser, "", "")  # without tools and reasoning
Item = TypeVar("Item")


@dataclass(kw_only=True, slots=True)
class GenerationRequest:
    """Texts to continue, or a chat to answer."""

    system: System  # as `find` returned it
    source: Literal["text_input", "messages"]  # the model's input with the rows
    rows: Sequence[Row]
    options: Mapping[str, Any]  # with the names that the model has
    fields: Mapping[str, str]  # option or input of the model -> field of the request, where the names differ
    model: str  # as the client named it
    streams: bool = False
    n: int = 1  # choices for each row
    echo: bool = False
    images: Sequence[Image] = ()  # of all messages, in their order
    new_parser: Callable[[], AnswerParser] = PLAIN  # reads one answer

    def __post_init__(self) -> None:
        """Let the checkpoint have options where the request sets none."""
        self.options = {**self.system.sampling(self.adapter), **self.options}

    @property
    def adapter(self) -> str:
        return self.model.partition(":")[2]


class TokenLogprob(msgspec.Struct, omit_defaults=True):
    """A token and its logarithmic probability; `top` has the most probable tokens at its place."""

    id: int
    token: str
    logprob: float | None  # None: the first token of a prompt
    bytes: list[int] | None = None  # of a part of a character
    top: list[TokenLogprob] = []


LOGPROBS_DECODER = msgspec.json.Decoder(list[TokenLogprob])


class Chunk(NamedTuple):
    """A choice, or a piece of one. A count is None if the model does not report it."""

    choice: int
    deltas: Sequence[Delta]
    finish_reason: str | None  # "stop", "length" or "tool_calls"; None until the choice ends
    prompt_tokens: int | None  # each piece of a choice repeats them
    new_tokens: int | None  # of the piece
    cached_tokens: int | None  # of the prompt
    logprobs: list[TokenLogprob] | None  # of the prompt's tokens, if asked for, then of each new one
    stop_reason: str | None  # the stop string that ended the choice

    @property
    def content(self) -> str:
        return "".join([delta.content for delta in self.deltas])

    @property
    def reasoning(self) -> str:
        return "".join([delta.reasoning for delta in self.deltas])

    @property
    def calls(self) -> list[CallDelta]:
        return [delta.call for delta in self.deltas if delta.call]


# A row of a response: its text, and the rest of its chunk.
Piece = tuple[str, Chunk]


class TokenCounts:
    """The sums of the tokens of some chunks; None if the model does not count them. Choices share their prompt."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._prompts: set[int] = set()
        self.prompt_tokens: int | None = 0
        self.new_tokens: int | None = 0
        self.cached_tokens: int | None = 0
        self.reasoning_tokens = 0  # of a model that streams

    def add(self, chunk: Chunk) -> None:
        self.new_tokens = _sum(self.new_tokens, chunk.new_tokens)
        if chunk.deltas and all(delta.reasoning for delta in chunk.deltas):
            self.reasoning_tokens += chunk.new_tokens or 0
        if (prompt := chunk.choice // self._n) not in self._prompts:
            self._prompts.add(prompt)
            self.prompt_tokens = _sum(self.prompt_tokens, chunk.prompt_tokens)
            self.cached_tokens = _sum(self.cached_tokens, chunk.cached_tokens)


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


class Form(Protocol):
    """The form of an API's answers."""

    end: bytes  # follows the last event of a stream

    def whole(self, choices: Sequence[Chunk]) -> Any: ...

    def events(self, chunks: AsyncGenerator[Chunk, None]) -> AsyncGenerator[bytes, None]: ...

    def failure(self, error: ApiError) -> bytes: ...


async def respond(http_request: Request, request: GenerationRequest, form: Form, as_events: bool) -> Response:
    """Generate, and return the answer in this form: whole, or a stream of events."""
    gateway = gateway_of(http_request)
    if (count := len(request.rows) * request.n) > gateway.config.limits.texts:
        message = f"'n' asks for {count} texts; at most {gateway.config.limits.texts} are possible (GATEWAY_TEXTS)."
        raise ApiError(400, message, "n", "too_many_inputs")
    chunks = generate(gateway, request)
    if not as_events:
        choices = [chunk async for chunk in chunks]
        return json_response(form.whole(sorted(choices, key=lambda chunk: chunk.choice)))
    events = form.events(chunks)
    first = await anext(events, b"")  # an error before it gets its own status
    response = EventStream(first, events, gateway.config.limits.timeout, form.end, form.failure)
    state = http_request.scope["request_state"]
    gateway.counters.first_token(state.route, state.seconds)
    return response


async def find(served: Served, model: str, source: str, streams: bool) -> System:
    """Return the model that generates for the request: the system's engine, its companion that streams, or itself."""
    system = await served.find(model, "generation")
    if source not in system.inputs:
        if source == "messages":
            raise ApiError(400, NO_TEMPLATE, "messages")
        raise ApiError(400, f"The model '{model}' has no input '{source}', which this endpoint needs.", "model")
    if not (streams or system.engine):
        if system.streams and "stream" not in system.inputs:
            raise ApiError(400, f"The model '{model}' only streams: send 'stream': true.", "stream")
        return system
    if (streaming := await served.stream_of(system)) is None:
        advice = f"Serve '{model}_stream' too, or send 'stream': false."
        raise ApiError(400, f"The model '{model}' does not stream. {advice}", "stream", "unsupported_parameter")
    return streaming


async def generate(gateway: Gateway, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
    """Yield the choices, or their pieces in the order of arrival. Raise ApiError that names a field of the request.

    A model that streams takes one text per request. Choices of a row have different seeds.
    """
    tensors, n = option_tensors(request), request.n
    tensors += await image_tensors(gateway.config, request.system, request.images)
    size = 1 if request.streams else len(request.rows)
    # Choices share the bytes of their prompt.
    prompts = {
        first: Tensor.from_texts(request.source, request.rows[first : first + size])
        for first in range(0, len(request.rows), size)
    }
    parts = [(first, number) for first in prompts for number in range(n)]
    answers = [
        _pieces(gateway, request, [prompts[first], *tensors, *_seed_tensor(request, number)]) for first, number in parts
    ]
    parsers: defaultdict[int, AnswerParser] = defaultdict(request.new_parser)
    async with aclosing(side_by_side(answers)) as arrivals:
        async for part, pieces in arrivals:
            first, number = parts[part]
            for row, (text, chunk) in enumerate(pieces, first):
                parser, reason = parsers[index := row * n + number], chunk.finish_reason
                deltas = parser.feed(text, bool(reason) or not request.streams, is_cut=reason == "length")
                reason = "tool_calls" if parser.calls and reason == "stop" else reason
                yield chunk._replace(choice=index, deltas=deltas, finish_reason=reason)


def _seed_tensor(request: GenerationRequest, number: int) -> list[Tensor]:
    """Return the seed of the choice with this number. OpenAI's may be negative."""
    seed = request.options.get("seed")
    return [] if seed is None else [Tensor.from_values("seed", "INT64", [(seed + number) & MAX_SEED])]


def option_tensors(request: GenerationRequest) -> list[Tensor]:
    """Return the options as tensors, without the seed. Raise ApiError for one that the model does not have."""
    inputs, tensors = request.system.inputs, []
    sampling: dict[str, Any] = {"lora_name": request.adapter} if request.adapter else {}
    default: dict[str, Any] = {"temperature": 1.0} if "temperature" in inputs else {}  # OpenAI's
    for name, value in {**default, **request.options}.items():
        if (name if name in OPTIONS else SAMPLING_PARAMETERS) not in inputs:
            if value not in NEUTRAL.get(name, NOTHING):
                raise unsupported(request, name)
        elif name == "seed" or value == []:
            continue
        elif name == "stop":
            tensors.append(Tensor.from_texts(name, [value] if isinstance(value, str) else value))
        elif name in OPTIONS:
            tensors.append(Tensor.from_values(name, OPTIONS[name], [value]))
        else:
            sampling[name] = value
    if sampling:
        tensors.append(Tensor.from_texts(SAMPLING_PARAMETERS, [ENCODER.encode(sampling)]))
    flags = {"exclude_input_in_output": not request.echo, "stream": request.streams}
    return tensors + [
        Tensor.from_values(name, "BOOL", [value])
        for name, value in flags.items()
        if name in inputs and (name != "stream" or request.system.streams)
    ]


def unsupported(request: GenerationRequest, option: str) -> ApiError:
    field = request.fields.get(option, option)
    message = f"The model '{request.model}' does not support '{field}'."
    return ApiError(400, message, field, "unsupported_parameter")


async def _pieces(
    gateway: Gateway, request: GenerationRequest, tensors: Sequence[Tensor]
) -> AsyncGenerator[list[Piece], None]:
    """Yield each response of the model as its texts. Raise ApiError that names a field of the request."""
    unneeded = {
        LOGPROBS: not request.options.keys() & {LOGPROBS, "prompt_logprobs"},
        STOP: not request.options.get("stop"),
    }
    wanted = (TEXT, REASON, *COUNTS, LOGPROBS, STOP)
    names = [name for name in wanted if name in request.system.outputs and not unneeded.get(name)]
    prompt_tokens = new_tokens = 0
    try:
        async with aclosing(gateway.responses(request.system, tensors, names)) as responses:
            async for outputs in responses:
                if TEXT in outputs:  # the last response of a stream may be empty
                    pieces = read(outputs)
                    prompt_tokens = sum([chunk.prompt_tokens or 0 for _, chunk in pieces])
                    new_tokens += sum([chunk.new_tokens or 0 for _, chunk in pieces])
                    yield pieces
    except ApiError as error:
        raise of_request(error, request) from None
    finally:
        gateway.counters.tokens(prompt_tokens, new_tokens)


def read(outputs: Outputs) -> list[Piece]:
    texts = outputs[TEXT].texts()
    unknown = [None] * len(texts)
    reasons, stops = (
        [reason or None for reason in outputs[name].texts()] if name in outputs else unknown for name in (REASON, STOP)
    )
    counts = (outputs[name].array().ravel().tolist() if name in outputs else unknown for name in COUNTS)
    logprobs = [*map(LOGPROBS_DECODER.decode, outputs[LOGPROBS].texts())] if LOGPROBS in outputs else unknown
    columns = zip(reasons, *counts, logprobs, stops, strict=True)
    return [(text, Chunk(0, (), *fields)) for text, fields in zip(texts, columns, strict=True)]


def of_request(error: ApiError, request: GenerationRequest) -> ApiError:
    """Return a model's error as one about the request."""
    code = error.typed.code if error.typed else ""
    if code == UNKNOWN_ADAPTER:  # it was removed after the gateway had read the list
        return not_found(request.model)
    if code == NO_CHAT_TEMPLATE:
        return ApiError(400, NO_TEMPLATE, "messages")
    return about_request(error, request.fields, {IMAGES: [place for place, _ in request.images]})


async def side_by_side(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[tuple[int, Item], None]:
    """Yield what each stream yields, with the stream's number, in the order of arrival. Close them at the end.

    Only so many run at once: the next one begins when one has ended.
    """
    if len(streams) == 1:  # needs no task
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    arrivals: asyncio.Queue[tuple[int, Item] | Exception | None] = asyncio.Queue(1)

    waiting = enumerate(streams)

    async def read_next() -> None:
        end = None
        try:
            for number, stream in waiting:
                async with aclosing(stream):
                    async for item in stream:
                        await arrivals.put((number, item))
        except Exception as error:
            end = error
        await arrivals.put(end)

    tasks = [asyncio.create_task(read_next()) for _ in streams[:AT_ONCE]]
    try:
        running = len(tasks)
        while running:
            arrival = await arrivals.get()
            if isinstance(arrival, Exception):
                raise arrival
            if arrival is None:
                running -= 1
            else:
                yield arrival
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
