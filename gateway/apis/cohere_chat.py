"""POST /v2/chat and /v1/chat, Cohere's API. A request becomes one of a chat."""

from __future__ import annotations

import hashlib
import itertools
import json
import uuid
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.apis.chat_forms import Block, BlockForm, Conversation, PlacedPart, Step, text_part
from gateway.edge import bodies
from gateway.edge.bodies import PositiveInt, json_object
from gateway.edge.errors import ApiError, cohere_form
from gateway.edge.routes import api
from gateway.edge.streams import ENCODER, named_event
from gateway.text.generation import respond
from gateway.triton.context import gateway_of

# Field of a chat -> field of a request.
NAMES = {"stop": "stop_sequences", "top_k": "k", "top_p": "p"}
SAME = ("model", "max_tokens", "temperature", "seed", "frequency_penalty", "presence_penalty", "stream")
FINISH_REASONS = {"stop": "COMPLETE", "length": "MAX_TOKENS", "tool_calls": "TOOL_CALL"}
ROLES = {"USER": "user", "CHATBOT": "assistant", "SYSTEM": "system", "TOOL": "tool"}
# Python's types, as v1 names those of parameters.
TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object"}


class ChatBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of both versions."""

    model: str
    stream: bool = False
    max_tokens: PositiveInt | None = None
    temperature: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    k: int | None = None
    p: float | None = None
    stop_sequences: list[str] | None = None
    response_format: dict[str, Any] | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields of a chat that ask for the same."""
        fields = {name: getattr(self, name) for name in SAME}
        fields |= {name: getattr(self, own) for name, own in NAMES.items()}
        form = dict(self.response_format or {})
        if schema := form.pop("json_schema", None) or form.pop("schema", None):
            form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        return fields | {"response_format": form or None}


class BodyV2(ChatBody, kw_only=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    thinking: dict[str, Any] | None = None


class Call(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}

    @property
    def id(self) -> str:
        """Return an id, which v1 lacks: a call and its result have the same one."""
        return hashlib.sha256(json.dumps([self.name, self.parameters], sort_keys=True).encode()).hexdigest()[:9]


class Result(msgspec.Struct):
    call: Call
    outputs: list[dict[str, Any]]


class Turn(msgspec.Struct):
    role: Literal["USER", "CHATBOT", "SYSTEM", "TOOL"]
    message: str = ""
    tool_calls: list[Call] | None = None
    tool_results: list[Result] | None = None


class Parameter(msgspec.Struct):
    type: str
    description: str = ""
    required: bool = False


class Tool(msgspec.Struct):
    name: str
    description: str = ""
    parameter_definitions: dict[str, Parameter] = {}

    def chat_tool(self) -> dict[str, Any]:
        properties = {
            name: {"type": TYPES.get(own.type.lower().partition("[")[0], own.type), "description": own.description}
            for name, own in self.parameter_definitions.items()
        }
        required = [name for name, own in self.parameter_definitions.items() if own.required]
        schema = {"type": "object", "properties": properties, "required": required}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": schema},
        }


class BodyV1(ChatBody, kw_only=True):
    message: str
    preamble: str | None = None
    chat_history: list[Turn] = []
    tools: list[Tool] = []
    tool_results: list[Result] | None = None


async def chat_v2(request: Request) -> Response:
    body = await bodies.read(request, BodyV2)
    chat = Conversation(NAMES)
    chat.messages = [*map(chat_message, body.messages)]
    choice = body.tool_choice.lower() if body.tool_choice else None
    fields = body.fields() | {"tools": body.tools, "tool_choice": choice, "thinking": body.thinking}
    with chat.named_errors():
        generation = await chat.request(gateway_of(request), fields)
        return await respond(request, generation, FormV2(), body.stream)


def chat_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without the parts that only this API has."""
    message = {name: value for name, value in message.items() if value is not None and name != "citations"}
    plan, content = message.pop("tool_plan", None), message.get("content")
    if isinstance(content, list):
        thoughts = [part for part in content if isinstance(part, dict) and part.get("type") == "thinking"]
        if thoughts:
            message["reasoning_content"] = "".join(str(part.get("thinking")) for part in thoughts)
        message["content"] = [document_text(part) for part in content if part not in thoughts]
    return message | ({"content": plan} if plan and not content else {})


def document_text(part: Any) -> Any:
    """Return a document, such as the result of a tool, as a text."""
    if not isinstance(part, dict) or part.get("type") != "document":
        return part
    document = part.get("document")
    data = document.get("data") if isinstance(document, dict) else document
    return {"type": "text", "text": data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)}


async def chat_v1(request: Request) -> Response:
    body = await bodies.read(request, BodyV1)
    chat = Conversation(NAMES)
    if body.preamble:
        chat.add("system", "preamble", [text_part(body.preamble, "preamble")])
    now = Turn("USER", body.message, tool_results=body.tool_results)
    for place, turn in [*((f"chat_history[{i}]", turn) for i, turn in enumerate(body.chat_history)), ("message", now)]:
        add_turn(chat, turn, place)
    with chat.named_errors():
        tools = [tool.chat_tool() for tool in body.tools]
        generation = await chat.request(gateway_of(request), body.fields() | {"tools": tools})
        response = await respond(request, generation, FormV1(body), body.stream)
    if body.stream:
        response.headers["content-type"] = "application/stream+json"
    return response


def add_turn(chat: Conversation, turn: Turn, place: str) -> None:
    parts: list[PlacedPart] = [text_part(turn.message, place)] if turn.message else []
    if parts or not (turn.tool_calls or turn.tool_results):
        chat.add(ROLES[turn.role], place, parts)
    results = turn.tool_results or []
    since = itertools.takewhile(lambda message: message["role"] != "user", reversed(chat.messages))
    known = [call["id"] for message in since for call in message.get("tool_calls", ())]
    for call in [*(turn.tool_calls or []), *(result.call for result in results if result.call.id not in known)]:
        chat.add_call(call.id, call.name, json.dumps(call.parameters, ensure_ascii=False), place)
    for result in results:
        text = json.dumps(result.outputs, ensure_ascii=False)
        chat.add("tool", place, [text_part(text, place)], tool_call_id=result.call.id)


# --- the answers ------------------------------------------------------------------------------------------------------


class CohereForm(BlockForm):
    def __init__(self) -> None:
        super().__init__()
        self.id = str(uuid.uuid4())

    @property
    def reason(self) -> str:
        by_string = self.stop_reason and self.finish_reason == "stop"
        return "STOP_SEQUENCE" if by_string else FINISH_REASONS[self.finish_reason or "stop"]

    def usage(self) -> dict[str, Any]:
        """Return the counts; none if the model does not count tokens."""
        counts = {"input_tokens": self.counts.prompt_tokens, "output_tokens": self.counts.new_tokens}
        known = {name: count for name, count in counts.items() if count is not None}
        return {"billed_units": known, "tokens": known}

    def of_kind(self, kind: str) -> list[Block]:
        return [block for block in self.blocks if block.kind == kind]


class FormV2(CohereForm):
    def answer(self) -> dict[str, Any]:
        content = [content_part(block, block.text) for block in self.blocks if not block.call and block.text]
        calls = [called(block, block.text) for block in self.of_kind("call")]
        message = {"role": "assistant"} | ({"content": content} if content else {})
        message |= {"tool_calls": calls} if calls else {}
        return {"id": self.id, "finish_reason": self.reason, "message": message, "usage": self.usage()}

    def begin(self) -> Iterator[bytes]:
        nothing: dict[str, Any] = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": []}
        yield event("message-start", id=self.id, delta={"message": nothing})

    def step(self, step: Step) -> Iterator[bytes]:
        block = step.block
        # Calls and other parts are counted apart.
        index = [bool(other.call) for other in self.blocks[: block.index]].count(bool(block.call))
        kind, name = ("tool-call", "tool_calls") if block.call else ("content", "content")
        if step.name == "start":
            part = called(block, "") if block.call else content_part(block, "")
        elif step.name == "delta":
            part = {"function": {"arguments": step.text}} if block.call else content_part(block, step.text)
            part.pop("type", None)
        fields = {} if step.name == "end" else {"delta": {"message": {name: part}}}
        yield event(f"{kind}-{step.name}", index=index, **fields)

    def finish(self) -> Iterator[bytes]:
        yield event("message-end", delta={"finish_reason": self.reason, "usage": self.usage()})

    def failure(self, error: ApiError) -> bytes:
        return event("message-end", delta={"finish_reason": "ERROR", "error": error.message})


class FormV1(CohereForm):
    """v1 has no reasoning, and sends lines of JSON."""

    def __init__(self, body: BodyV1) -> None:
        super().__init__()
        now = [Turn("USER", body.message)] if body.message else []
        results = [Turn("TOOL", tool_results=body.tool_results)] if body.tool_results else []
        self.history = [*body.chat_history, *now, *results]

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [
            {"name": block.call.name, "parameters": json_object(block.text) or {}}
            for block in self.blocks
            if block.call
        ]

    def answer(self) -> dict[str, Any]:
        text, calls = "".join(block.text for block in self.of_kind("text")), self.calls
        more: dict[str, Any] = {"tool_calls": calls} if calls else {}
        said = {"role": "CHATBOT", "message": text} | more
        ids = {"response_id": self.id, "generation_id": self.id, "finish_reason": self.reason.replace(*TOOL_CALL)}
        meta = {"api_version": {"version": "1"}} | self.usage()
        return ids | {"text": text, "chat_history": [*self.history, said], "meta": meta} | more

    def begin(self) -> Iterator[bytes]:
        yield line("stream-start", generation_id=self.id)

    def step(self, step: Step) -> Iterator[bytes]:
        if step.name == "delta" and step.block.kind == "text":
            yield line("text-generation", text=step.text)

    def finish(self) -> Iterator[bytes]:
        if self.calls:
            yield line("tool-calls-generation", tool_calls=self.calls)
        answer = self.answer()
        yield line("stream-end", True, finish_reason=answer["finish_reason"], response=answer)

    def failure(self, error: ApiError) -> bytes:
        return line("stream-end", True, finish_reason="ERROR", response={"text": error.message})


TOOL_CALL = ("TOOL_CALL", "COMPLETE")  # what v1 calls it


def content_part(block: Block, text: str) -> dict[str, Any]:
    name = "thinking" if block.kind == "reasoning" else "text"
    return {"type": name, name: text}


def called(block: Block, arguments: str) -> dict[str, Any]:
    assert block.call
    return {"id": block.call.id, "type": "function", "function": {"name": block.call.name, "arguments": arguments}}


def event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})


def line(kind: str, is_finished: bool = False, **fields: Any) -> bytes:
    return b"%b\n" % ENCODER.encode({"is_finished": is_finished, "event_type": kind, **fields})


ROUTES = [
    *api("/v2/chat", chat_v2, "chat", cohere_form),
    *api("/v1/chat", chat_v1, "chat", cohere_form),
]
