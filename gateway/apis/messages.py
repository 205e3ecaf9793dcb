"""POST /v1/messages, Anthropic's API, and /v1/messages/count_tokens. A request becomes one of a chat."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from gateway.apis.chat_forms import Block, BlockForm, Conversation, PlacedPart, Step, image_part, text_part
from gateway.edge import bodies
from gateway.edge.bodies import PositiveInt, json_object, json_response
from gateway.edge.errors import ApiError, anthropic_form
from gateway.edge.routes import api
from gateway.edge.streams import named_event
from gateway.text import encoders
from gateway.text.generation import SAMPLING_PARAMETERS, option_tensors, respond
from gateway.triton.context import gateway_of

# Field of a chat -> field of a request.
NAMES = {
    "chat_template_kwargs": "thinking",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "parameters": "input_schema",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "tool_call_id": "tool_use_id",
}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# Kind of a block -> the field with its text, and the type of the events with a piece of it.
DELTAS = {
    "text": ("text", "text_delta"),
    "reasoning": ("thinking", "thinking_delta"),
    "call": ("partial_json", "input_json_delta"),
}


class Base64(msgspec.Struct, tag_field="type", tag="base64"):
    media_type: Literal["image/jpeg", "image/png", "image/webp", "image/gif"]
    data: str

    @property
    def url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class Url(msgspec.Struct, tag_field="type", tag="url"):
    url: str


class Text(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class Image(msgspec.Struct, tag_field="type", tag="image"):
    source: Base64 | Url


class Thinking(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str


class ToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(msgspec.Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[Text | Image] = ""
    is_error: bool = False


class Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Text | Image | Thinking | ToolUse | ToolResult]


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class ThinkingConfig(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive"]
    display: Literal["summarized"] | None = None


class OutputFormat(msgspec.Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: str | None = None
    format: OutputFormat | None = None


class CountBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]
    system: str | list[Text] = ""
    tools: list[dict[str, Any]] = []
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig = OutputConfig()


class MessagesBody(CountBody, kw_only=True):
    max_tokens: PositiveInt
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: int | None = None
    top_p: float | None = None
    thread: Any = None  # refused


# Clients that read this send the request again without it.
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


async def messages(request: Request) -> Response:
    body = await bodies.read(request, MessagesBody)
    if body.thread is not None:
        message = "'thread' is not supported here: send the whole conversation."
        raise ApiError(400, message, "thread", "unsupported_parameter", details=NO_THREADS)
    if body.messages[-1].role == "assistant":
        place = f"messages[{len(body.messages) - 1}].role"
        message = f"'{place}' is assistant: models here begin their own message. The last one must be the user's."
        raise ApiError(400, message, place, "unsupported_value")
    chat = conversation(body)
    with chat.named_errors():
        generation = await chat.request(gateway_of(request), chat_fields(body))
        return await respond(request, generation, MessageForm(body.model), body.stream)


async def count_tokens(request: Request) -> Response:
    """Return how many tokens the prompt of a request has, without those of its images."""
    body = await bodies.read(request, CountBody)
    gateway, chat = gateway_of(request), conversation(body)
    with chat.named_errors():
        generation = await chat.request(gateway, chat_fields(body))
        # Chat templates read only these.
        options = [tensor for tensor in option_tensors(generation) if tensor.name == SAMPLING_PARAMETERS]
        (row,) = await encoders.tokenized(gateway, generation.system, generation.rows, "messages", options)
    return json_response({"input_tokens": len(row.ids)})


# --- the request as one of a chat -------------------------------------------------------------------------------------


def conversation(body: CountBody) -> Conversation:
    chat = Conversation(NAMES)
    if body.system:
        chat.add("system", "system", parts(body.system, "system"))
    for number, message in enumerate(body.messages):
        place = f"messages[{number}]"
        if isinstance(message.content, str):
            chat.add(message.role, place, parts(message.content, f"{place}.content"))
            continue
        for index, block in enumerate(message.content):
            add_block(chat, message.role, block, f"{place}.content[{index}]")
    return chat


def add_block(chat: Conversation, role: str, block: Any, place: str) -> None:
    if isinstance(block, ToolUse):
        chat.add_call(block.id, block.name, msgspec.json.encode(block.input).decode(), place)
    elif isinstance(block, ToolResult):
        # Templates have no other way to tell the model.
        failed = [text_part("Error:", place)] if block.is_error else []
        content = failed + parts(block.content, f"{place}.content")
        chat.add("tool", place, content, tool_call_id=block.tool_use_id)
    elif isinstance(block, Thinking):
        chat.add_reasoning(block.thinking, place)
    else:
        chat.add(role, place, [part(block, place)])


def parts(content: str | Sequence[Text | Image], place: str) -> list[PlacedPart]:
    if isinstance(content, str):
        return [text_part(content, place)]
    return [part(block, f"{place}[{index}]") for index, block in enumerate(content)]


def part(block: Text | Image, place: str) -> PlacedPart:
    return text_part(block.text, place) if isinstance(block, Text) else image_part(block.source.url, f"{place}.source")


def chat_fields(body: CountBody) -> dict[str, Any]:
    """Return the fields of a chat that asks for the same."""
    same = ("model", "max_tokens", "stream", "temperature", "top_k", "top_p")
    fields = {name: getattr(body, name, None) for name in same} | {"stop": getattr(body, "stop_sequences", None)}
    thinking = body.thinking.type if body.thinking else None
    fields["reasoning_effort"] = "none" if thinking == "disabled" else body.output_config.effort
    fields["chat_template_kwargs"] = {"enable_thinking": True} if thinking == "enabled" else None
    if form := body.output_config.format:
        fields["response_format"] = {"type": form.type, "json_schema": {"name": "answer", "schema": form.schema}}
    fields["tools"] = [chat_tool(tool) for tool in body.tools]
    if choice := body.tool_choice:
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    kind = tool.get("type") or "custom"
    return {
        "type": "function" if kind == "custom" else kind,
        "function": {"parameters" if name == "input_schema" else name: value for name, value in tool.items()},
    }


# --- the answer -------------------------------------------------------------------------------------------------------


class MessageForm(BlockForm):
    def __init__(self, model: str) -> None:
        super().__init__()
        self.head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}

    def answer(self) -> dict[str, Any]:
        content = [content_block(block, block.text) for block in self.blocks]
        return self.head | {"content": content, "usage": self.usage()} | self.reason()

    def reason(self) -> dict[str, str | None]:
        by_string = self.stop_reason and self.finish_reason == "stop"
        reason = "stop_sequence" if by_string else STOP_REASONS[self.finish_reason or "stop"]
        return {"stop_reason": reason, "stop_sequence": self.stop_reason}

    def usage(self) -> dict[str, int]:
        """Return the counts; 0 for what the model does not count, because clients require numbers."""
        cached = self.counts.cached_tokens or 0
        prompt, new = self.counts.prompt_tokens or 0, self.counts.new_tokens or 0
        used = {"input_tokens": prompt - cached, "output_tokens": new}
        return used | {"cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}

    def begin(self) -> Iterator[bytes]:
        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        yield event("message_start", message=self.head | nothing | {"usage": self.usage()})

    def step(self, step: Step) -> Iterator[bytes]:
        index, (name, kind) = step.block.index, DELTAS[step.block.kind]
        if step.name == "start":
            yield event("content_block_start", index=index, content_block=content_block(step.block, ""))
        elif step.name == "delta":
            yield event("content_block_delta", index=index, delta={"type": kind, name: step.text})
        else:
            yield event("content_block_stop", index=index)

    def finish(self) -> Iterator[bytes]:
        yield event("message_delta", delta=self.reason(), usage=self.usage())
        yield event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return named_event("error", anthropic_form(error))


def event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})


def content_block(block: Block, text: str) -> dict[str, Any]:
    if block.call:  # there is no object if the answer ended inside it
        return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": json_object(text) or {}}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


ROUTES = [
    *api("/v1/messages", messages, "chat", anthropic_form),
    *api("/v1/messages/count_tokens", count_tokens, "", anthropic_form),
]
