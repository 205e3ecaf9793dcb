"""POST /v1/responses, OpenAI's API without its storage. A request becomes one of a chat."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.apis.chat_forms import Block, BlockForm, Conversation, PlacedPart, Step, image_part, text_part
from gateway.edge import bodies
from gateway.edge.bodies import PositiveInt
from gateway.edge.errors import ApiError
from gateway.edge.routes import api
from gateway.edge.streams import named_event
from gateway.text.generation import respond
from gateway.triton.context import gateway_of

# Field of a chat -> field of a request.
NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "tool_call_id": "call_id",
}
LOGPROBS = "message.output_text.logprobs"
Summary = Literal["auto", "concise", "detailed"]


class Part(msgspec.Struct):
    type: Literal["input_text", "output_text", "refusal", "input_image", "summary_text", "reasoning_text"]
    text: str = ""
    refusal: str = ""
    image_url: str = ""


class Item(msgspec.Struct):
    """A message, or another item. Clients send those of earlier answers back."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


REQUIRED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: str | None = None
    summary: Summary | None = None  # an answer has the whole text
    generate_summary: Summary | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # no model here has it


class ResponsesBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    input: str | list[Item]
    instructions: str | None = None
    include: list[str] = []  # other values than LOGPROBS ask for parts of refused tools, or for reasoning, always there
    max_output_tokens: PositiveInt | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Reasoning()
    stream: bool = False
    temperature: float | None = None
    text: TextConfig | None = None
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int = 0
    top_p: float | None = None


async def responses(request: Request) -> Response:
    body = await bodies.read(request, ResponsesBody)
    chat = conversation(body)
    with chat.named_errors():
        generation = await chat.request(gateway_of(request), chat_fields(body))
        return await respond(request, generation, ResponseForm(body, generation.options), body.stream)


# --- the request as one of a chat -------------------------------------------------------------------------------------


def conversation(body: ResponsesBody) -> Conversation:
    """Return the messages. Raise ApiError for an item that lacks a field."""
    chat = Conversation(NAMES)
    if body.instructions:
        chat.add("system", "instructions", parts(body.instructions, "instructions"))
    items = [Item(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    for number, item in enumerate(items):
        place = f"input[{number}]" if items is body.input else "input"
        if missing := [f"{place}.{name}" for name in REQUIRED[item.type] if getattr(item, name) is None]:
            message = f"Missing required parameter: '{missing[0]}'."
            raise ApiError(400, message, missing[0], "missing_required_parameter")
        add_item(chat, item, place)
    return chat


def add_item(chat: Conversation, item: Item, place: str) -> None:
    if item.type == "function_call":
        chat.add_call(item.call_id or "", item.name or "", item.arguments or "", place)
    elif item.type == "function_call_output":
        chat.add("tool", place, parts(item.output, f"{place}.output"), tool_call_id=item.call_id)
    elif item.type == "reasoning":
        chat.add_reasoning("\n".join(part["text"] for part, _ in parts(item.content, place)), place)
    else:
        role = "system" if item.role == "developer" else item.role or ""
        chat.add(role, place, parts(item.content, f"{place}.content"))


def parts(content: str | Sequence[Part] | None, place: str) -> list[PlacedPart]:
    if not isinstance(content, list):
        return [text_part(str(content or ""), place)]
    return [
        image_part(part.image_url, f"{place}[{number}].image_url")
        if part.type == "input_image"
        else text_part(part.text or part.refusal, f"{place}[{number}]")
        for number, part in enumerate(content)
    ]


def chat_fields(body: ResponsesBody) -> dict[str, Any]:
    """Return the fields of a chat that asks for the same."""
    fields: dict[str, Any] = {name: getattr(body, name) for name in ("model", "temperature", "top_p", "stream")}
    fields |= {"max_completion_tokens": body.max_output_tokens, "reasoning_effort": body.reasoning.effort}
    if body.text and body.text.format:
        fields["response_format"] = nested(body.text.format, "json_schema")
    if LOGPROBS in body.include or body.top_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    fields |= {"tool_choice": chat_choice(body.tool_choice), "parallel_tool_calls": body.parallel_tool_calls}
    return fields | {"tools": [nested(tool, "function") for tool in body.tools]}


def chat_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return nested(choice, "function") if isinstance(choice, dict) else choice
    tools = choice.get("tools")
    if isinstance(tools, list):
        tools = [nested(tool, "function") if isinstance(tool, dict) else tool for tool in tools]
    return nested(choice | {"tools": tools}, "allowed_tools")


def nested(value: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a value whose fields beside its type are in another one of this name, as chats have them."""
    rest = {key: field for key, field in value.items() if key != "type"}
    return {key: field for key, field in value.items() if key == "type"} | ({name: rest} if rest else {})


# --- the answer -------------------------------------------------------------------------------------------------------

# Kind of a block -> the type of its item, what events call its text, and the beginning of its id.
KINDS = {
    "text": ("message", "output_text", "msg"),
    "reasoning": ("reasoning", "reasoning_text", "rs"),
    "call": ("function_call", "function_call_arguments", "fc"),
}
NOT_ECHOED = ("input", "include", "stream")


class ResponseForm(BlockForm):
    def __init__(self, body: ResponsesBody, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.number = -1  # of the last event
        self.head = {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time())}
        self.head |= {name: value for name, value in msgspec.to_builtins(body).items() if name not in NOT_ECHOED}
        self.head |= {name: options.get(name, 1.0) for name in ("temperature", "top_p")}
        self.head["text"] = {"format": (body.text and body.text.format) or {"type": "text"}}
        self.head |= {"background": False, "previous_response_id": None, "store": False, "truncation": "disabled"}

    def response(self, status: str = "in_progress", **fields: Any) -> dict[str, Any]:
        rest: dict[str, Any] = {"error": None, "incomplete_details": None, "output": [], "usage": None}
        return self.head | rest | {"status": status} | fields

    def answer(self) -> dict[str, Any]:
        output = [self.item(block) for block in self.blocks]
        details = {"reason": "max_output_tokens"} if self.status == "incomplete" else None
        return self.response(self.status, output=output, incomplete_details=details, usage=self.usage())

    @property
    def status(self) -> str:
        return "incomplete" if self.finish_reason == "length" else "completed"

    def usage(self) -> dict[str, Any] | None:
        """Return the counts, or None if the model does not count tokens."""
        prompt, new, cached = self.counts.prompt_tokens, self.counts.new_tokens, self.counts.cached_tokens
        if prompt is None or new is None:
            return None
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached or 0, "cache_write_tokens": 0},
            "output_tokens": new,
            "output_tokens_details": {"reasoning_tokens": self.counts.reasoning_tokens},
            "total_tokens": prompt + new,
        }

    def item(self, block: Block, is_new: bool = False) -> dict[str, Any]:
        kind = KINDS[block.kind][0]
        status = "in_progress" if is_new else self.status if block is self.blocks[-1] else "completed"
        item = {"id": item_id(block), "type": kind, "status": status}
        if block.call:
            return item | {"call_id": block.call.id, "name": block.call.name, "arguments": block.text}
        more: dict[str, Any] = (
            {"role": "assistant"} if block.kind == "text" else {"summary": [], "encrypted_content": None}
        )
        return item | more | {"content": [] if is_new else [part(block)]}

    def begin(self) -> Iterator[bytes]:
        yield self.event("created", response=self.response())
        yield self.event("in_progress", response=self.response())

    def step(self, step: Step) -> Iterator[bytes]:
        block = step.block
        text, index = KINDS[block.kind][1], {"output_index": block.index}
        place = index | {"item_id": item_id(block)} | ({} if block.call else {"content_index": 0})
        if step.name == "start":
            yield self.event("output_item.added", item=self.item(block, is_new=True), **index)
            if not block.call:
                yield self.event("content_part.added", part=part(block), **place)
        elif step.name == "delta":
            yield self.event(f"{text}.delta", delta=step.text, logprobs=step.logprobs, **place)
        else:
            whole = {"arguments" if block.call else "text": block.text}
            yield self.event(f"{text}.done", logprobs=block.logprobs, **whole, **place)
            if not block.call:
                yield self.event("content_part.done", part=part(block), **place)
            yield self.event("output_item.done", item=self.item(block), **index)

    def finish(self) -> Iterator[bytes]:
        yield self.event(self.status, response=self.answer())

    def failure(self, error: ApiError) -> bytes:
        failed = {"code": "server_error", "message": error.message}
        return self.event("failed", response=self.response("failed", error=failed))

    def event(self, name: str, **fields: Any) -> bytes:
        self.number += 1
        kind = f"response.{name}"
        return named_event(kind, {"type": kind, "sequence_number": self.number, **fields})


def item_id(block: Block) -> str:
    return f"{KINDS[block.kind][2]}_{block.id}"


def part(block: Block) -> dict[str, Any]:
    more = {"annotations": [], "logprobs": block.logprobs} if block.kind == "text" else {}
    return {"type": KINDS[block.kind][1], "text": block.text} | more


ROUTES = [
    *api("/v1/responses", responses, "chat"),
]
