"""Find the calls of tools and the reasoning in a model's answer, by the form of its family. No I/O happens here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class CallDelta:
    """A piece of a call. Only the first one has the id and the name."""

    index: int
    id: str
    name: str
    arguments: str  # a piece of JSON


class Delta(NamedTuple):
    """A piece of an answer: exactly one field is set."""

    content: str = ""
    reasoning: str = ""
    call: CallDelta | None = None


class AnswerParser:
    """Reads one answer, in pieces that may be cut anywhere."""

    def __init__(self, family: str, reasoning: str, tools: Sequence[dict[str, Any]] = ()) -> None:
        """Read the calls that this family of models writes, if the request has tools, and this kind of reasoning."""

    def feed(self, text: str, is_last: bool) -> list[Delta]:
        """Return the deltas that this piece of the answer completes."""
        return [Delta(content=text)] if text else []


def grammar(
    family: str, tools: Sequence[dict[str, Any]], tool_choice: str | dict[str, Any], parallel: bool
) -> dict[str, Any] | None:
    """Return the value of `structured_outputs` that enforces required or named tools, None if nothing is enforced.

    The tools are OpenAI's, {"type": "function", "function": {"name", "description", "parameters", "strict"}}.
    """
    return None
