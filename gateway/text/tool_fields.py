"""Read the tools of a chat request, in OpenAI's form; the APIs of other forms translate theirs to it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.edge.bodies import json_object
from gateway.edge.errors import ApiError, shown
from gateway.text.tool_calls import FAMILIES, HARMONY, REASONING, AnswerParser, grammar, keeps_special_tokens
from gateway.triton.served import System

# The names that templates give to the switch of a model's reasoning.
THINKING = ("enable_thinking", "thinking")
Name = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,128}$")]  # as Anthropic's; OpenAI's have 64


class Function(msgspec.Struct, omit_defaults=True):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class Tool(msgspec.Struct):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct, tag_field="type", tag="function"):
    function: FunctionName


class Allowed(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1)]


class AllowedTools(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    allowed_tools: Allowed


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str  # JSON


class ToolCall(msgspec.Struct):
    """A call in an assistant's message, which clients send back."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


# For models whose chat template has no place for tools.
INSTRUCTION = "\n\nAnswer with calls of these functions, as a JSON list of objects with name and arguments:\n"
MISTRAL_ID = re.compile("[a-zA-Z0-9]{9}")


class ToolUse:
    """The tools of one request: what the model gets for them, and how its answer is read. Without tools, too."""

    def __init__(
        self,
        system: System,
        tools: Sequence[Tool] | None = None,
        choice: ToolChoice | None = None,
        parallel: bool | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Check the fields. Raise ApiError for a wrong one, and for tools that the model cannot use."""
        check_choice(tools or [], choice)
        check_schemas(tools or [])
        if isinstance(choice, AllowedTools):  # the model sees no others
            names = [tool.function.name for tool in choice.allowed_tools.tools]
            tools = [tool for tool in tools or [] if tool.function.name in names]
            choice = choice.allowed_tools.mode
        self.choice = msgspec.to_builtins(choice or "auto")
        self.tools: list[dict[str, Any]] = []
        self.parallel = parallel is not False
        self.family = system.tool_parser if system.tool_parser in FAMILIES else ""
        reasoning = system.parameter("reasoning")
        self.reasoning = reasoning if reasoning in (HARMONY, *REASONING) else ""
        self.thinks = False not in [(template_kwargs or {}).get(name) for name in THINKING]
        if self.reasoning == "think_opened" and not self.thinks:
            self.reasoning = "think"
        if choice != "none":
            self.tools = msgspec.to_builtins(tools or [])
        if self.tools and not self.family and self.choice == "auto":
            message = (
                "This model has no form of tool calls that is known here, so that it cannot choose to call one. "
                "Send 'tool_choice': 'required', or set TOOL_PARSER on the server."
            )
            raise ApiError(400, message, "tools", "unsupported_parameter")

    def options(self, structured: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return what `sampling_parameters` must have for them. `structured` is the form of an answer without calls."""
        options: dict[str, Any] = {"tools": self.tools} if self.tools and self.family else {}
        if keeps_special_tokens(self.family, self.reasoning, self.tools):
            options["skip_special_tokens"] = False
        reasoning = self.reasoning if self.thinks else ""
        if form := grammar(self.family, self.tools, self.choice, self.parallel, reasoning, structured):
            options["structured_outputs"] = form
        return options

    def parser(self) -> AnswerParser:
        """Return a parser of one answer. Each of several answers needs its own."""
        return AnswerParser(self.family, self.reasoning, self.tools, self.parallel)

    def messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages of OpenAI's form as chat templates expect them. Raise ApiError for a wrong one.

        The arguments of calls become objects, and a tool's message gets the name of its tool.
        """
        names: dict[str, str] = {}  # of the tools, by the ids of their calls
        result = []
        for number, message in enumerate(messages):
            if calls := message.get("tool_calls"):
                names |= {call["id"]: call["function"]["name"] for call in calls}
                # Some templates fail without a content.
                message = message | {
                    "content": message.get("content") or "",
                    "tool_calls": [self._call(call) for call in calls],
                }
            if message["role"] == "tool":
                id = message.get("tool_call_id")
                if id not in names:
                    param = f"messages[{number}].tool_call_id"
                    raise ApiError(400, f"'{param}' must be the id of a call in an earlier message.", param)
                message = {"name": names[id]} | message | {"tool_call_id": self._id(id)}
            result.append(message)
        if self.tools and not self.family:
            instruct(result, json.dumps([tool["function"] for tool in self.tools], ensure_ascii=False))
        return result

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return a call as templates expect it. Arguments that a model wrote wrong stay a string."""
        function = call["function"]
        if (arguments := json_object(function["arguments"] or "{}")) is not None:
            function = function | {"arguments": arguments}
        return call | {"id": self._id(call["id"]), "function": function}

    def _id(self, id: str) -> str:
        """Return the id of a call, in the only form that the templates of Mistral's models take."""
        is_short = not self.family.startswith("mistral") or MISTRAL_ID.fullmatch(id)
        return id if is_short else hashlib.sha256(id.encode()).hexdigest()[:9]


def check_choice(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    named = [choice] if isinstance(choice, NamedTool) else []
    named += choice.allowed_tools.tools if isinstance(choice, AllowedTools) else []
    known = [tool.function.name for tool in tools]
    if unknown := [one.function.name for one in named if one.function.name not in known]:
        message = f"'tool_choice' names '{shown(unknown[0])}', which is not in 'tools'."
        raise ApiError(400, message, "tool_choice")
    if choice == "required" and not tools:
        raise ApiError(400, "'tool_choice' 'required' needs 'tools'.", "tool_choice")


def check_schemas(tools: Sequence[Tool]) -> None:
    for tool in tools:
        kind = (tool.function.parameters or {}).get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            name, kind = tool.function.name, shown(json.dumps(kind))
            message = f"The parameters of the tool '{name}' must be a JSON schema of the type 'object', not {kind}."
            raise ApiError(400, message, "tools")


def instruct(messages: list[dict[str, Any]], tools: str) -> None:
    """Tell the tools to a model in the last message of the user."""
    for number, message in reversed([*enumerate(messages)]):
        if message["role"] == "user":
            content, text = message["content"], INSTRUCTION + tools
            content = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
            messages[number] = message | {"content": content}
            return
