"""Read the tools of a chat request, in OpenAI's form; the APIs of other forms translate theirs to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.served_systems import System
from gateway.tool_calls import AnswerParser

Name = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]


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


class NamedTool(msgspec.Struct):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str  # JSON


class ToolCall(msgspec.Struct):
    """A call in an assistant's message, which clients send back."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


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
        self.family = self.reasoning = ""
        self.tools: list[dict[str, Any]] = msgspec.to_builtins(tools or [])
        self.choice = choice
        self.parallel = parallel is not False

    def options(self) -> dict[str, Any]:
        """Return what `sampling_parameters` must have for them."""
        return {}

    def parser(self) -> AnswerParser:
        """Return a parser of one answer. Each of several answers needs its own."""
        return AnswerParser(self.family, self.reasoning, self.tools)

    def messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages of OpenAI's form as chat templates expect them. Raise ApiError for a wrong one.

        The arguments of calls become objects, and a tool's message gets the name of its tool.
        """
        return [*messages]
