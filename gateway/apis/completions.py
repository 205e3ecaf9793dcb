"""POST /v1/completions, and /v1/chat/completions, whose messages become a prompt inside Triton."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from gateway.edge import bodies
from gateway.edge.bodies import PositiveInt
from gateway.edge.errors import ApiError, openai_form
from gateway.edge.routes import api
from gateway.edge.streams import event
from gateway.text.generation import FIELDS, Chunk, GenerationRequest, TokenCounts, TokenLogprob, find, respond
from gateway.text.image_urls import Image
from gateway.text.row_fields import ImageUrl, Input, TokenId, as_rows, check_count, check_ids
from gateway.text.tool_calls import CallDelta, Delta
from gateway.text.tool_fields import Tool, ToolCall, ToolChoice, ToolUse
from gateway.triton.context import Gateway, gateway_of
from gateway.triton.served import System

# The maximum numbers of tokens that a request may name in its options, and of alternatives to each new token.
MAX_BIASES, MAX_STOP_IDS, MAX_LOGPROBS = 300, 128, 20
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
LogprobCount = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # each schema is enforced, as by vLLM


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The form that the text must have: one of these."""

    json: dict[str, Any] | str | None = None  # a schema; vLLM also takes it as a string
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None

    def option(self) -> dict[str, Any] | None:
        """Return the option of the model. Raise ApiError if there is not exactly one."""
        forms = {name: form for name, form in msgspec.to_builtins(self).items() if form not in (None, False)}
        if len(forms) > 1:
            message = f"'structured_outputs' must have one of {' and '.join(map(repr, forms))}."
            raise ApiError(400, message, "structured_outputs", "invalid_value")
        for name in forms.keys() & {"json", "structural_tag"}:
            form = forms[name] if isinstance(forms[name], dict) else bodies.json_object(forms[name])
            if form is None or (name == "structural_tag" and "format" not in form):
                param = f"structured_outputs.{name}"
                raise ApiError(
                    400, f"'{param}' must be an object of JSON that describes the text.", param, "invalid_value"
                )
            forms[name] = form
        return forms or None


class Sampling(msgspec.Struct, kw_only=True):
    """The fields with the names of the model's options. The second half is vLLM's."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Meta(max_length=16)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=MAX_BIASES)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    skip_special_tokens: bool | None = None


class GenerationBody(Sampling, kw_only=True, forbid_unknown_fields=True):
    """The fields that completions and chat share."""

    model: str
    max_tokens: PositiveInt | None = None
    n: PositiveInt | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    def options(self) -> dict[str, Any]:
        """Return the options of the model. Raise ApiError for fields that exclude each other."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "'stream_options' requires 'stream': true.", "stream_options")
        options = {name: getattr(self, name) for name in Sampling.__struct_fields__}
        return options | {"max_new_tokens": self.max_tokens, "structured_outputs": self.structure()}

    def request(self, system: System, options: Mapping[str, Any], **fields: Any) -> GenerationRequest:
        given = {name: value for name, value in options.items() if value is not None}
        fields |= {"model": self.model, "streams": bool(self.stream), "n": self.n or 1, "fields": self.names()}
        return GenerationRequest(system=system, options=given, **fields)

    def names(self) -> dict[str, str]:
        """Return the fields that have other names than the model's options."""
        names = dict(FIELDS)
        if self.response_format is not None:
            names["structured_outputs"] = "response_format"
        elif self.structured_outputs is None:
            names["structured_outputs"] = "tools"
        return names

    def structure(self) -> dict[str, Any] | None:
        form = self.response_format
        if form is None or form.type == "text":
            return self.structured_outputs.option() if self.structured_outputs else None
        if self.structured_outputs is not None:
            message = "'structured_outputs' and 'response_format' exclude each other: send one."
            raise ApiError(400, message, "structured_outputs", "invalid_value")
        if form.type == "json_object":
            return {"json_object": True}
        if form.json_schema is None:
            param = "response_format.json_schema"
            raise ApiError(400, f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
        return {"json": form.json_schema.schema}


class CompletionsBody(GenerationBody, kw_only=True):
    prompt: Input
    max_tokens: Annotated[int, Meta(ge=0)] = 16  # OpenAI's default
    echo: bool | None = None
    best_of: int | None = None
    logprobs: LogprobCount | None = None
    prompt_logprobs: LogprobCount | None = None  # vLLM's

    def options(self) -> dict[str, Any]:
        if self.best_of not in (None, self.n or 1):
            raise ApiError(400, "'best_of' must be equal to 'n'.", "best_of", "unsupported_value")
        prompt_logprobs = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            if prompt_logprobs not in (None, self.logprobs):
                message = "With 'echo', 'prompt_logprobs' must be equal to 'logprobs'."
                raise ApiError(400, message, "prompt_logprobs", "unsupported_value")
            prompt_logprobs = self.logprobs
        return super().options() | {"logprobs": self.logprobs, "prompt_logprobs": prompt_logprobs}

    def names(self) -> dict[str, str]:
        return super().names() | ({"prompt_logprobs": "echo"} if self.prompt_logprobs is None else {})


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    image_url: ImageUrl


class Message(msgspec.Struct, omit_defaults=True):
    """A message. Clients send the model's earlier messages back with all fields; those of None are null in them."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | ImagePart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's name of the same
    name: str | None = None
    function_call: None = None
    audio: None = None


class Thinking(msgspec.Struct):
    """As in Anthropic's API, and in those of models that took it over."""

    type: Literal["enabled", "disabled", "adaptive"]


class Reasoning(msgspec.Struct):
    effort: Effort | None = None


class ChatBody(GenerationBody, kw_only=True):
    messages: list[Message]
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    thinking: Thinking | None = None  # for models that reason, as `reasoning`
    reasoning: Reasoning | None = None  # OpenRouter's
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's

    def options(self) -> dict[str, Any]:
        options = super().options()
        options["max_new_tokens"] = self.max_completion_tokens or self.max_tokens
        if self.logprobs:
            options["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            raise ApiError(400, "'top_logprobs' requires 'logprobs': true.", "top_logprobs", "invalid_value")
        return options

    def template_kwargs(self, system: System) -> dict[str, Any] | None:
        """Return the variables of the chat template. `thinking` and `reasoning` are for models that reason."""
        kwargs: dict[str, Any] = {}
        effort = self.reasoning_effort
        if system.parameter("reasoning"):
            effort = effort or (self.reasoning.effort if self.reasoning else None)
            if self.thinking and self.thinking.type != "adaptive":
                kwargs = {"enable_thinking": self.thinking.type == "enabled"}
        if effort == "none":
            kwargs = {"enable_thinking": False}
        elif effort is not None:  # a template reads one of the two names, or none
            kwargs = {"enable_thinking": True, "reasoning_effort": effort}
        return kwargs | (self.chat_template_kwargs or {}) or None

    def names(self) -> dict[str, str]:
        names = super().names()
        if self.top_logprobs:
            names["logprobs"] = "top_logprobs"
        if self.reasoning_effort is not None and not self.chat_template_kwargs:
            names["chat_template_kwargs"] = "reasoning_effort"
        return names


async def completions(request: Request) -> Response:
    body = await bodies.read(request, CompletionsBody)
    return await answer_completions(request, body, CompletionsForm(body))


async def answer_completions(request: Request, body: CompletionsBody, form: CompletionsForm) -> Response:
    prompts = as_rows(body.prompt, "prompt")
    gateway = gateway_of(request)
    check_count(gateway, len(prompts), "prompt")
    options = body.options()
    system = await find(gateway.served, body.model, "text_input", bool(body.stream))
    check_ids(system, prompts, "prompt")
    generation = body.request(system, options, source="text_input", rows=prompts, echo=bool(body.echo))
    return await respond(request, generation, form, generation.streams)


async def chat(request: Request) -> Response:
    return await answer_chat(request, await bodies.read(request, ChatBody))


async def answer_chat(request: Request, body: ChatBody) -> Response:
    return await respond(request, await chat_request(gateway_of(request), body), ChatForm(body), bool(body.stream))


async def chat_request(gateway: Gateway, body: ChatBody) -> GenerationRequest:
    options = body.options()
    system = await find(gateway.served, body.model, "messages", bool(body.stream))
    options["chat_template_kwargs"] = body.template_kwargs(system)
    tools = ToolUse(system, body.tools, body.tool_choice, body.parallel_tool_calls, options["chat_template_kwargs"])
    options |= tools.options(options["structured_outputs"])
    request = body.request(
        system,
        options,
        source="messages",
        rows=[conversation(body.messages, tools)],
        images=images_of(body.messages),
        new_parser=tools.parser,
    )
    # A model that reasons streams, which counts the tokens.
    request.streams |= system.streams and bool(system.parameter("reasoning"))
    return request


def conversation(messages: Sequence[Message], tools: ToolUse) -> str:
    """Return the messages as a model's input has them. Raise ApiError if there are none, or for a wrong one."""
    if not messages:
        raise ApiError(400, "'messages' must have at least one message.", "messages")
    return msgspec.json.encode(tools.messages([plain(*one) for one in enumerate(messages)])).decode()


def plain(number: int, message: Message) -> dict[str, Any]:
    """Return the message as chat templates expect it: with one text, and with roles that they know."""
    if message.content is None and not message.tool_calls:
        param = f"messages[{number}].content"
        raise ApiError(400, f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    fields: dict[str, Any] = msgspec.to_builtins(message)
    if reasoning := fields.pop("reasoning", None):
        fields.setdefault("reasoning_content", reasoning)  # templates know this name
    if isinstance(message.content, list):
        fields["content"] = plain_content(message.content)
    if message.role == "developer":
        fields["role"] = "system"
    return fields


def plain_content(parts: Sequence[TextPart | ImagePart]) -> str | list[dict[str, str]]:
    """Return one text, or parts if some of them are images, whose files are in the input `images`."""
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    if len(texts) == len(parts):
        return "\n".join(texts)
    return [{"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"} for part in parts]


def images_of(messages: Sequence[Message]) -> list[Image]:
    """Return the images of all messages, in their order."""
    return [
        (f"messages[{i}].content[{j}]", part.image_url.url)
        for i, message in enumerate(messages)
        if isinstance(message.content, list)
        for j, part in enumerate(message.content)
        if isinstance(part, ImagePart)
    ]


# --- the form of answers ----------------------------------------------------------------------------------------------


class Form:
    """The form that the answers of completions and chats share."""

    end = b"data: [DONE]\n\n"
    prefix, whole_kind, event_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: GenerationBody) -> None:
        self.n = body.n or 1
        options = body.stream_options or StreamOptions()
        self.includes_usage = bool(options.include_usage)
        self.repeats_usage = bool(options.continuous_usage_stats)
        kind = self.event_kind if body.stream else self.whole_kind
        id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.head = {"id": id, "object": kind, "created": int(time.time()), "model": body.model}

    def whole(self, choices: Sequence[Chunk]) -> dict[str, Any]:
        counts = TokenCounts(self.n)
        for chunk in choices:
            counts.add(chunk)
        groups = itertools.groupby(choices, lambda chunk: chunk.choice)
        return self.head | {"choices": [self.choice(joined([*pieces])) for _, pieces in groups], "usage": usage(counts)}

    async def events(self, chunks: AsyncGenerator[Chunk, None]) -> AsyncGenerator[bytes, None]:
        """Yield the events of choices that are generated side by side. Each choice ends with the reason."""
        counts = TokenCounts(self.n)
        # If one event has the usage, the others have null.
        more: dict[str, Any] = {"usage": None} if self.includes_usage else {}
        async with aclosing(chunks):
            async for chunk in chunks:
                counts.add(chunk)
                if self.repeats_usage:
                    more = {"usage": usage(counts)}
                fields = more | self.event_fields(chunk)
                yield b"".join([event(self.head | {"choices": [piece]} | fields) for piece in self.pieces(chunk)])
        if self.includes_usage:
            yield event(self.head | {"choices": [], "usage": usage(counts)})

    def failure(self, error: ApiError) -> bytes:
        return event(openai_form(error))

    def choice(self, chunk: Chunk) -> dict[str, Any]:
        """Return a whole choice."""
        raise NotImplementedError

    def pieces(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        """Yield the pieces of a choice that events have."""
        raise NotImplementedError

    def event_fields(self, chunk: Chunk) -> dict[str, Any]:
        """Return the fields of a chunk's events that OpenAI's API lacks."""
        return {}


def joined(pieces: Sequence[Chunk]) -> Chunk:
    """Return the pieces of a choice as one."""
    deltas: list[Delta] = []
    for delta in (delta for piece in pieces for delta in piece.deltas):
        if (call := delta.call) and not call.name and (last := deltas[-1].call):
            deltas[-1] = Delta(call=replace(last, arguments=last.arguments + call.arguments))
        else:
            deltas.append(delta)
    logprobs = [token for piece in pieces for token in piece.logprobs or ()]
    return pieces[-1]._replace(deltas=deltas, logprobs=logprobs or None)


class CompletionsForm(Form):
    def __init__(self, body: CompletionsBody) -> None:
        super().__init__(body)
        self.body = body
        self.offsets: dict[int, int] = {}  # by choice: of its next token in the text

    def choice(self, chunk: Chunk) -> dict[str, Any]:
        return choice(chunk.choice, {"text": chunk.content}, chunk.finish_reason, **self.logprobs(chunk))

    def pieces(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        text, logprobs = chunk.content, self.logprobs(chunk)
        if text or logprobs:
            yield choice(chunk.choice, {"text": text}, None, **logprobs)
        if chunk.finish_reason:
            yield choice(chunk.choice, {"text": ""}, chunk.finish_reason)

    def logprobs(self, chunk: Chunk) -> dict[str, Any]:
        """Return the fields `logprobs` and `prompt_logprobs`. The model reports the prompt's tokens first."""
        fields: dict[str, Any] = {}
        tokens = chunk.logprobs or []
        body, is_first = self.body, chunk.choice not in self.offsets
        scores_prompt = body.prompt_logprobs is not None
        if tokens and is_first and scores_prompt:
            fields["prompt_logprobs"] = [*map(vllm_logprobs, tokens[: chunk.prompt_tokens])]
            if body.logprobs is None or not body.echo:
                tokens = tokens[chunk.prompt_tokens :]
        offsets = []
        offset = self.offsets.get(chunk.choice, 0)
        for token in tokens:
            offsets.append(offset)
            offset += len(token.token)
        if chunk.logprobs:
            self.offsets[chunk.choice] = offset
        if tokens:
            fields["logprobs"] = {
                "tokens": [token.token for token in tokens],
                "token_logprobs": [token.logprob for token in tokens],
                "top_logprobs": [*map(openai_logprobs, tokens)],
                "text_offset": offsets,
            }
        return fields


def openai_logprobs(token: TokenLogprob) -> dict[str, float | None] | None:
    """Return the logprobs of a token and its alternatives; None for the first token of a prompt."""
    return None if token.logprob is None else {top.token: top.logprob for top in (token, *token.top)}


def vllm_logprobs(token: TokenLogprob) -> dict[str, dict[str, Any]] | None:
    if token.logprob is None:
        return None
    ranks = {top.id: rank for rank, top in enumerate(token.top, 1)}
    return {
        str(one.id): {"logprob": one.logprob, "rank": ranks.get(one.id), "decoded_token": one.token}
        for one in (token, *token.top)
    }


class ChatForm(Form):
    prefix, whole_kind, event_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatBody) -> None:
        super().__init__(body)
        self.begun: set[int] = set()  # the choices whose role was sent

    def choice(self, chunk: Chunk) -> dict[str, Any]:
        calls = [called(call) for call in chunk.calls]
        message: dict[str, Any] = {
            "content": chunk.content or (None if calls else ""),
            "role": "assistant",
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = calls
        if reasoning := chunk.reasoning:
            message["reasoning_content"] = reasoning
        return choice(chunk.choice, {"message": message}, chunk.finish_reason, chat_logprobs(chunk))

    def pieces(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        if chunk.choice not in self.begun:
            self.begun.add(chunk.choice)
            yield choice(chunk.choice, {"delta": {"role": "assistant", "content": ""}})
        logprobs = chat_logprobs(chunk)
        for delta in chunk.deltas or [Delta()] * bool(logprobs):
            yield choice(chunk.choice, {"delta": chat_delta(delta)}, None, logprobs)
            logprobs = None
        if chunk.finish_reason:
            yield choice(chunk.choice, {"delta": {}}, chunk.finish_reason)


def choice(
    index: int,
    content: dict[str, Any],
    finish_reason: str | None = None,
    logprobs: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    return {"index": index, **content, "finish_reason": finish_reason, "logprobs": logprobs, **more}


def chat_delta(delta: Delta) -> dict[str, Any]:
    if delta.call:
        return {"tool_calls": [{"index": delta.call.index} | called(delta.call)]}
    return {"reasoning_content": delta.reasoning} if delta.reasoning else {"content": delta.content}


def called(call: CallDelta) -> dict[str, Any]:
    """Return a call, or a piece of its arguments, which has no name."""
    if not call.name:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def chat_logprobs(chunk: Chunk) -> dict[str, Any] | None:
    if not chunk.logprobs:
        return None
    content = [chat_token(token) | {"top_logprobs": [*map(chat_token, token.top)]} for token in chunk.logprobs]
    return {"content": content, "refusal": None}


def chat_token(token: TokenLogprob) -> dict[str, Any]:
    # A part of a character becomes U+FFFD, whose bytes are not those of the token.
    encoded = token.bytes if "\ufffd" in token.token else list(token.token.encode())
    return {"token": token.token, "logprob": token.logprob, "bytes": encoded}


def usage(counts: TokenCounts) -> dict[str, Any] | None:
    """Return the counts in OpenAI's form, or None if the model does not count tokens."""
    prompt, completion, cached = counts.prompt_tokens, counts.new_tokens, counts.cached_tokens
    if prompt is None or completion is None:
        return None
    tokens = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    if counts.reasoning_tokens:
        details["completion_tokens_details"] = {"reasoning_tokens": counts.reasoning_tokens}
    return tokens | details


ROUTES = [
    *api("/v1/completions", completions, "generation"),
    *api("/v1/chat/completions", chat, "chat"),
]
