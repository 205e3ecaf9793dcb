"""Find the calls of tools and the reasoning in a model's answer, by the form of its family. No I/O happens here."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import uuid
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
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


# --- the families -----------------------------------------------------------------------------------------------------

NAME = r"(?P<name>[\w.-]{1,128})"


class Family(NamedTuple):
    """The form of a family's calls."""

    begins: tuple[str, ...]  # a call follows: JSON, or what `header` describes
    ends: tuple[str, ...] = ()  # may stand after a call
    dropped: tuple[str, ...] = ()  # are never content
    header: str = ""  # matches the text between the beginning and the arguments
    # The arguments are JSON, unless one of these is set.
    pair: tuple[str, str] = ("", "")  # matches an argument's name and value up to the text that ends it
    quote: str = ""  # stands around the strings of an object, whose names have no quotes
    bare: bool = False  # an answer that begins with the JSON of a known tool is a call, too
    special: bool = False  # the tokenizer takes the markers for special tokens, which are not in texts by default
    # A grammar enforces these texts: before all calls, around the arguments of one, between calls, and after all.
    # Without the last one it enforces one call, because xgrammar (0.1.31) must know where a list of calls ends.
    first: str = ""
    before: str = '{"name": "%s", "arguments": '
    after: str = "}"
    between: str = ", "
    last: str = ""


HERMES = Family(
    ("<tool_call>",), ("</tool_call>",),
    first="<tool_call>\n", between="\n</tool_call>\n<tool_call>\n", last="\n</tool_call>",
)  # fmt: skip
GENERIC = Family((), bare=True, first="[", last="]")
PHI = Family(
    ("<|tool_call|>", "functools"), ("<|/tool_call|>",), ("<|end|>",), special=True,
    first="<|tool_call|>[", last="]<|/tool_call|>",
)  # fmt: skip
DEEPSEEK = Family(
    ("<｜tool▁call▁begin｜>",), ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"), ("<｜tool▁calls▁begin｜>",),
    header=rf"(function<｜tool▁sep｜>)?{NAME}(<｜tool▁sep｜>|\s*```json\s*)", special=True,
    first="<｜tool▁calls▁begin｜>", before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n",
    after="\n```<｜tool▁call▁end｜>", between="\n", last="<｜tool▁calls▁end｜>",
)  # fmt: skip
MISTRAL = Family(
    ("[TOOL_CALLS]",), dropped=("</s>",), header=rf"{NAME}(\[CALL_ID\]\w+)?\[ARGS\]\s*", special=True,
    first="[TOOL_CALLS][", last="]",
)  # fmt: skip
FAMILIES = {
    "": GENERIC,
    "json": GENERIC,
    "hermes": HERMES,
    "llama3": Family(
        ("<|python_tag|>",), dropped=("<|eom_id|>", "<|eot_id|>"), bare=True, special=True,
        before='{"name": "%s", "parameters": ', after="", between="}; ", last="}",
    ),
    "mistral": MISTRAL,
    "mistral_args": MISTRAL._replace(first="", before="[TOOL_CALLS]%s[ARGS]", after="", last=""),
    "phi": PHI,
    "granite": PHI._replace(last="]"),
    "harmony": Family(
        (), special=True, before="<|channel|>commentary to=functions.%s <|constrain|>json<|message|>", after=""
    ),
    "qwen3_coder": HERMES._replace(
        begins=("<tool_call>", "<function="), ends=("</function>", "</tool_call>"),
        header=rf"\s*(<function=)?{NAME}>", pair=(r"<parameter=([^>]*)>\n?(.*)", "</parameter>"),
    ),
    "glm": HERMES._replace(
        header=rf"\s*{NAME}\s*", pair=(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>\n?(.*)", "</arg_value>")
    ),
    "gemma4": Family(
        ("<|tool_call>",), ("<tool_call|>",), header=rf"call:{NAME}", special=True, quote='<|"|>',
        first="<|tool_call>", before="call:%s", after="", between="<tool_call|><|tool_call>", last="<tool_call|>",
    ),
    "deepseek": DEEPSEEK,
    "deepseek_v31": DEEPSEEK._replace(
        before="<｜tool▁call▁begin｜>%s<｜tool▁sep｜>", after="<｜tool▁call▁end｜>", between=""
    ),
}  # fmt: skip
# The kind of reasoning -> the text before it, and the text after it.
THINK = ("<think>", "</think>")
REASONING = {"think": THINK, "think_opened": THINK, "mistral": ("[THINK]", "[/THINK]"),
             "gemma4": ("<|channel>thought\n", "<channel|>")}  # fmt: skip
HARMONY = "harmony"
HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")


def keeps_special_tokens(family: str, reasoning: str, tools: Sequence[Any]) -> bool:
    """Return whether the parser must see the special tokens of an answer."""
    return reasoning in (HARMONY, "mistral", "gemma4") or bool(tools and FAMILIES[family].special)


# --- reading an answer ------------------------------------------------------------------------------------------------

ARGUMENTS = ("arguments", "parameters")
OTHER_KEYS = ("id", "type", "index")
# The maximum number of characters between the beginning of a call and its arguments.
MAX_HEADER = 300
# Outside of its strings, JSON has no other characters.
JSON = re.compile(r"[\w\s{}\[\]:,+.-]", re.ASCII)
STRING_END = re.compile(r'["\\]')
# A part of the reader. It receives pieces of the answer, and "" at the end.
Steps = Generator[None, str, None]
TextSteps = Generator[None, str, str]
Emit = Callable[[str], None]


class Malformed(Exception):
    """Raised where a text that looked like a call is none."""


class AnswerParser:
    """Reads one answer, in pieces that may be cut anywhere."""

    def __init__(
        self, family: str, reasoning: str, tools: Sequence[dict[str, Any]] = (), parallel: bool = True
    ) -> None:
        """Read the calls that this family of models writes, if the request has tools, and this kind of reasoning.

        Without `parallel`, leave out all calls but the first.
        """
        self._form = FAMILIES[family]
        self._reasoning = reasoning
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        self._parallel = parallel
        self._deltas: list[Delta] = []
        self._text, self._at = "", 0  # the last piece, and the place of its next character
        self._ended = False
        self._raw: list[str] = []  # the text since the beginning of a call: content, if it is none
        self._space = ""  # becomes content only if content follows
        self._calls = 0
        # The reader drops spaces after a reasoning or a call, and markers that end calls only after a call.
        self._trims = self._after_call = False
        self._steps = self._answer() if reasoning or self._schemas else None
        if self._steps:
            next(self._steps)

    def feed(self, text: str, is_last: bool) -> list[Delta]:
        """Return the deltas that this piece of the answer completes."""
        if self._steps is None:
            return [Delta(content=text)] if text else []
        with contextlib.suppress(StopIteration):
            if text:
                self._steps.send(text)
            if is_last:
                self._steps.send("")
        deltas, self._deltas = self._deltas, []
        return [delta for delta in deltas if self._parallel or not delta.call or not delta.call.index]

    # These make deltas of what the reader finds.

    def _add(self, delta: Delta) -> None:
        last = self._deltas[-1] if self._deltas else Delta()
        if delta.call and last.call and last.call.index == delta.call.index:
            arguments = last.call.arguments + delta.call.arguments
            self._deltas[-1] = Delta(call=replace(last.call, arguments=arguments))
        elif (delta.content and last.content) or (delta.reasoning and last.reasoning):
            self._deltas[-1] = Delta(last.content + delta.content, last.reasoning + delta.reasoning)
        else:
            self._deltas.append(delta)

    def _content(self, text: str) -> None:
        self._space += text.lstrip() if self._trims else text
        if stripped := self._space.rstrip():
            self._add(Delta(content=stripped))
            self._space = self._space[len(stripped) :]
            self._trims = self._after_call = False

    def _thought(self, text: str) -> None:
        if text:
            self._add(Delta(reasoning=text))

    def _arguments(self, text: str) -> None:
        self._add(Delta(call=CallDelta(self._calls - 1, "", "", text)))
        self._raw.clear()

    def _call(self, name: str) -> None:
        self._space = ""
        self._trims = self._after_call = True
        self._add(Delta(call=CallDelta(self._calls, f"call_{uuid.uuid4().hex[:24]}", name, "")))
        self._calls += 1
        self._raw.clear()

    # The reader.

    def _next(self) -> TextSteps:
        """Read a character, or "" at the end."""
        if self._at == len(self._text) and not self._ended:
            self._text, self._at = (yield), 0
            self._ended = not self._text
        char = self._text[self._at : self._at + 1]
        self._at += len(char)
        self._raw.append(char)
        return char

    def _back(self, text: str) -> None:
        """Let the next reader read the last characters again."""
        self._text, self._at = text + self._text[self._at :], 0
        del self._raw[len(self._raw) - len(text) :]

    def _run(self, stop: re.Pattern[str]) -> str:
        """Read the rest of the piece up to a match."""
        match = stop.search(self._text, self._at)
        run = self._text[self._at : match.start() if match else None]
        self._at += len(run)
        self._raw.append(run)
        return run

    def _after(self, skipped: str = "") -> TextSteps:
        """Read the first character that is neither a space nor one of these."""
        while (char := (yield from self._next())) and (char.isspace() or char in skipped):
            pass
        return char

    def _until(self, markers: tuple[str, ...], emit: Emit) -> TextSteps:
        """Read up to one of the markers and return it, or "" at the end. Emit the text before it."""
        held = ""
        first = first_characters(markers)
        while True:
            if not held and (run := self._run(first)):
                emit(run)
            if not (char := (yield from self._next())):
                break
            held += char
            while held and not any(marker.startswith(held) for marker in markers):
                emit(held[0])
                held = held[1:]
            if held in markers:
                return held
        emit(held)
        return ""

    def _answer(self) -> Steps:
        if self._reasoning == HARMONY:
            yield from self._channels()
        else:
            if self._reasoning:
                yield from self._reasoned(*REASONING[self._reasoning])
            yield from self._contents()
        if self._space:
            self._add(Delta(content=self._space))

    def _reasoned(self, begin: str, end: str) -> Steps:
        """Read the reasoning at the beginning of the answer, if there is one."""
        read = ""
        while read.lstrip() != begin and (char := (yield from self._next())):
            if not begin.startswith((read + char).lstrip()):
                self._back(char)
                break
            read += char
        if read.lstrip() == begin or self._reasoning == "think_opened":
            self._thought(read.lstrip().removeprefix(begin))
            yield from self._until((end,), self._thought)
            self._trims = True
        else:
            self._back(read)

    def _channels(self) -> Steps:
        """Read messages, each with a header that names its channel. The prompt has begun the first header."""
        header = marker = ""
        while True:
            pieces: list[str] = []
            is_header = yield from self._until(("<|message|>",), pieces.append)
            header = marker + "".join(pieces)
            if not is_header:
                if "<|" not in header:
                    self._content(header)
                return
            recipient = re.search(r"to=functions\.([\w.-]+)", header)
            emit = self._thought if "<|channel|>analysis" in header else self._content
            if recipient and self._schemas:
                self._call(recipient[1])
                emit = self._arguments
            marker = yield from self._until(HARMONY_ENDS, emit)
            if not marker:
                return
            marker = marker if marker == "<|channel|>" else ""

    def _contents(self) -> Steps:
        """Read content and calls."""
        form = self._form
        markers = (*form.begins, *form.ends, *form.dropped) if self._schemas else ()
        if form.bare and self._schemas:
            yield from self._attempt("")
        while marker := (yield from self._until(markers, self._content)):
            if marker in form.begins:
                yield from self._attempt(marker)
            elif marker in form.ends and not self._after_call:
                self._content(marker)

    def _attempt(self, marker: str) -> Steps:
        """Read the calls after a marker. Where there is none, the text is content."""
        self._raw = [marker]
        form = self._form
        try:
            char = yield from self._after()
            if char and char in "{[":
                yield from self._json_calls(char, is_bare=not marker)
                return
            self._back(char)
            if form.pair[0] or form.quote:
                yield from self._whole_call(form)
            elif form.header:
                yield from self._headed_call(form.header)
            else:
                raise Malformed
        except Malformed:
            self._content("".join(self._raw))

    def _json_calls(self, char: str, is_bare: bool) -> Steps:
        """Read calls as a JSON list, or one after the other. Bare ones must be of known tools."""
        calls = self._calls
        is_list = char == "["
        if is_list:
            char = yield from self._after()
        while char == "{":
            yield from self._json_call(is_bare)
            char = yield from self._after(",;")
        if not is_list or char != "]":
            self._back(char)
        if self._calls == calls:
            raise Malformed

    def _json_call(self, is_bare: bool, is_inner: bool = False) -> Steps:
        """Read the members of a call, after its brace."""
        calls = self._calls
        name, held = "", ""
        while (char := (yield from self._after(","))) != "}":
            key = yield from self._string(char)
            if (yield from self._after()) != ":":
                raise Malformed
            char = yield from self._after()
            if key in ("name", "function") and char == '"':
                name = yield from self._string(char)
                if is_bare and name not in self._schemas:
                    raise Malformed
                if held:
                    self._call(name)
                    self._arguments(held)
            elif key == "function" and char == "{" and not is_inner:
                yield from self._json_call(is_bare, is_inner=True)
            elif key in ARGUMENTS and char == "{" and name and self._calls == calls:
                self._call(name)
                yield from self._value(char, self._arguments)
            elif key in ARGUMENTS and self._calls == calls:
                held = yield from self._held_arguments(char)
                if name:
                    self._call(name)
                    self._arguments(held)
            elif is_bare and key not in OTHER_KEYS:
                raise Malformed
            else:
                yield from self._value(char, lambda _: None)
        if self._calls == calls:
            if not name or is_bare:
                raise Malformed
            self._call(name)
            self._arguments("{}")
        self._raw.clear()

    def _held_arguments(self, char: str) -> TextSteps:
        """Return the arguments that come before the name, or as a string with JSON."""
        pieces: list[str] = []
        yield from self._value(char, pieces.append)
        try:
            value = json.loads("".join(pieces), strict=False)
            value = json.loads(value or "{}", strict=False) if isinstance(value, str) else value or {}
        except (ValueError, RecursionError):
            raise Malformed from None
        if not isinstance(value, dict):
            raise Malformed
        return whole_characters(json.dumps(value, ensure_ascii=False))

    def _headed_call(self, header: str) -> Steps:
        """Read a call whose name stands in a header before the arguments."""
        text = ""
        while (char := (yield from self._next())) and char != "{" and len(text) < MAX_HEADER:
            text += char
        match = re.fullmatch(header, text)
        if char != "{" or not match:
            self._back(char)
            raise Malformed
        self._call(match["name"])
        yield from self._value(char, self._arguments)

    def _whole_call(self, form: Family) -> Steps:
        """Read a call whose arguments are JSON only when all of them are there."""
        pieces: list[str] = []
        marker = yield from self._until(form.ends, pieces.append)
        text = "".join(pieces)
        match = re.match(form.header, text)
        if not marker or not match:
            raise Malformed
        name, rest = match["name"], text[match.end() :]
        arguments = unquoted(rest, form.quote) if form.quote else paired(*form.pair, rest, self._schemas.get(name, {}))
        self._call(name)
        self._arguments(arguments)

    def _string(self, quote: str) -> TextSteps:
        """Return a string of JSON after its first quote."""
        if quote != '"':
            self._back(quote)
            raise Malformed
        pieces: list[str] = []
        yield from self._value(quote, pieces.append)
        try:
            return whole_characters(str(json.loads("".join(pieces), strict=False)))
        except ValueError:
            raise Malformed from None

    def _value(self, char: str, emit: Emit) -> Steps:
        """Read one value of JSON from its first character on, and emit its characters. Stop at what is no JSON."""
        depth = 0
        is_string = is_escaped = False
        while char:
            if is_string:
                is_string = is_escaped or char != '"'
                is_escaped = char == "\\" and not is_escaped
            elif char == '"':
                is_string = True
            elif not JSON.match(char) or (not depth and (char in "]}," or char.isspace())):
                break
            else:
                depth += (char in "[{") - (char in "]}")
            emit(char)
            if not depth and not is_string and char in '"]}':
                return
            if is_string and not is_escaped and (run := self._run(STRING_END)):
                emit(run)
            char = yield from self._next()
        self._back(char)


@functools.cache
def first_characters(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join({re.escape(marker[0]) for marker in markers}) or "$^")


def whole_characters(text: str) -> str:
    """Replace halves of surrogate pairs, which a model may have written as escapes: UTF-8 has none."""
    return text.encode(errors="replace").decode()


def unquoted(text: str, quote: str) -> str:
    """Return the JSON of an object whose strings have other quotes, and whose names may have none."""
    parts = text.split(quote)
    parts[1::2] = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
    if len(parts) > 1 or '"' not in text:
        parts[::2] = [re.sub(r"(?<![\w.-])([\w.-]+)\s*:", r'"\1":', part) for part in parts[::2]]
    try:
        return whole_characters(json.dumps(json.loads("".join(parts)), ensure_ascii=False))
    except (ValueError, RecursionError):
        raise Malformed from None


def paired(pair: str, end: str, text: str, schema: dict[str, Any]) -> str:
    """Return the JSON of arguments that are pairs, with the types that the schema has.

    The time grows with the text, not with its square: a client can bring a model to write long ones without an end.
    """
    found = [match for part in text.split(end)[:-1] if (match := re.search(pair, part, re.DOTALL))]
    values = {match[1].strip(): match[2].removesuffix("\n") for match in found}
    types = schema.get("properties")
    types = types if isinstance(types, dict) else {}
    written = [f"{json.dumps(name)}: {typed(value, types.get(name))}" for name, value in values.items()]
    return f"{{{', '.join(written)}}}"


def typed(text: str, schema: Any) -> str:
    """Return the JSON of a value that a model wrote without quotes."""
    kinds = str(schema.get("type")) if isinstance(schema, dict) else ""
    if "string" not in kinds or (text == "null" and "null" in kinds):
        try:
            json.loads(text)
            return text
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


# --- grammars ---------------------------------------------------------------------------------------------------------


def grammar(
    family: str,
    tools: Sequence[dict[str, Any]],
    tool_choice: str | dict[str, Any],
    parallel: bool,
    reasoning: str = "",
    structured: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Return the value of `structured_outputs` that enforces required or named tools, None if nothing is enforced.

    The tools are OpenAI's, {"type": "function", "function": {"name", "description", "parameters", "strict"}}. A model
    that reasons may do so first. `structured`, if given, is the form of an answer without calls.
    """
    is_enforced = tool_choice not in ("none", "auto")
    if not is_enforced and not structured:
        return None
    formats = []
    if tools and tool_choice != "none":
        formats.append(calls_format(FAMILIES[family], tools, tool_choice, parallel))
    if structured and not is_enforced:
        if not formats and not reasoning:
            return structured
        final = [constant("<|channel|>final<|message|>")] if reasoning == HARMONY else []
        formats.append(sequence(*final, answer_format(structured)))
    return {"structural_tag": {"type": "structural_tag", "format": after_reasoning(reasoning, either(*formats))}}


def calls_format(
    form: Family, tools: Sequence[dict[str, Any]], choice: str | dict[str, Any], parallel: bool
) -> dict[str, Any]:
    """Return xgrammar's format of at least one call of the tools that may be chosen."""
    named = choice["function"]["name"] if isinstance(choice, dict) else ""
    functions = [tool["function"] for tool in tools if not named or tool["function"]["name"] == named]
    tags = [
        tag(form.before % own["name"], schema_format({"type": "object"} | (own.get("parameters") or EMPTY)), form.after)
        for own in functions
    ]
    if named or not parallel or not form.last:
        return sequence(constant(form.first), either(*tags), constant(form.last))
    calls = {"type": "tags_with_separator", "tags": tags, "separator": form.between, "at_least_one": True}
    return tag(form.first, calls, form.last)


def answer_format(structured: dict[str, Any]) -> dict[str, Any]:
    """Return xgrammar's format for another value of `structured_outputs`."""
    ((kind, value),) = structured.items()
    forms: dict[str, Callable[[], dict[str, Any]]] = {
        "json": lambda: schema_format(value),
        "json_object": lambda: schema_format({"type": "object"}),
        "regex": lambda: {"type": "regex", "pattern": value},
        "choice": lambda: either(*map(constant, value)),
        "grammar": lambda: {"type": "grammar", "grammar": value},
        "structural_tag": lambda: value["format"],
    }
    return forms[kind]()


def after_reasoning(reasoning: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Return the format of the answer, after the model's reasoning if it is in tokens that grammars allow.

    They allow no special tokens, so that the others spell the markers of a family that has special ones.
    """
    if reasoning not in ("think", "think_opened"):
        return answer
    begin, end = THINK
    is_opened = reasoning == "think_opened"
    thoughtful = sequence(tag("" if is_opened else begin, ANY_TEXT, f"{end}\n\n"), answer)
    return thoughtful if is_opened else either(thoughtful, answer)


ANY_TEXT = {"type": "any_text"}
EMPTY = {"additionalProperties": False}


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


def constant(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    kept = [element for element in elements if element != constant("")]
    return kept[0] if len(kept) == 1 else {"type": "sequence", "elements": kept}


def either(*elements: dict[str, Any]) -> dict[str, Any]:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}
