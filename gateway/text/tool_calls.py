"""Find the calls of tools and the reasoning in a model's answer, by the form of its family. No I/O happens here."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import uuid
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

Schema = dict[str, Any]


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


# --- calls that are read as a whole -----------------------------------------------------------------------------------


MEMBERS = ("name", "arguments", "parameters", "function", "id", "type", "index")


def json_call(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments of a call that is a JSON object; None if the text is none."""
    try:
        call = json.loads(text, strict=False)
        function = call.get("function")
        call = function if isinstance(function, dict) else call
        name, arguments = call.get("name", function), call.get("arguments", call.get("parameters")) or {}
        arguments = json.loads(arguments, strict=False) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return None
    is_call = call.keys() <= {*MEMBERS} and isinstance(name, str) and isinstance(arguments, dict)
    return (whole_characters(name), whole_characters(json.dumps(arguments, ensure_ascii=False))) if is_call else None


def whole_characters(text: str) -> str:
    """Replace halves of surrogate pairs, which a model may have written as escapes: UTF-8 has none."""
    return text.encode(errors="replace").decode()


def quoted(quote: str, text: str, schema: Schema) -> str | None:
    """Return the JSON of an object whose strings have other quotes, and whose names may have none."""
    parts = text.split(quote)
    parts[1::2] = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
    if len(parts) > 1 or '"' not in text:
        parts[::2] = [re.sub(r"(?<![\w.-])([\w.-]+)\s*:", r'"\1":', part) for part in parts[::2]]
    try:
        return whole_characters(json.dumps(json.loads("".join(parts)), ensure_ascii=False))
    except (ValueError, RecursionError):
        return None


def paired(pair: str, end: str, text: str, schema: Schema) -> str:
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
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(text)
            return text
    return json.dumps(text, ensure_ascii=False)


# --- the families -----------------------------------------------------------------------------------------------------

NAME = r"([\w.-]{1,128})"


class Family(NamedTuple):
    """The form of a family's calls: JSON, or what `header` describes."""

    begins: tuple[str, ...]  # a call follows
    ends: tuple[str, ...] = ()  # may stand after a call
    dropped: tuple[str, ...] = ()  # are never content
    header: str = ""  # matches the text between the beginning and the arguments
    arguments: Callable[[str, Schema], str | None] | None = None  # makes JSON of all arguments, if they are none
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
    header=rf"(?:function<｜tool▁sep｜>)?{NAME}(?:<｜tool▁sep｜>|\s*```json\s*)", special=True,
    first="<｜tool▁calls▁begin｜>", before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n",
    after="\n```<｜tool▁call▁end｜>", between="\n", last="<｜tool▁calls▁end｜>",
)  # fmt: skip
MISTRAL = Family(
    ("[TOOL_CALLS]",), dropped=("</s>",), header=rf"{NAME}(?:\[CALL_ID\]\w+)?\[ARGS\]\s*", special=True,
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
        header=rf"\s*(?:<function=)?{NAME}>",
        arguments=partial(paired, r"<parameter=([^>]*)>\n?(.*)", "</parameter>"),
    ),
    "glm": HERMES._replace(
        header=rf"\s*{NAME}\s*",
        arguments=partial(paired, r"<arg_key>([^<]*)</arg_key>\s*<arg_value>\n?(.*)", "</arg_value>"),
    ),
    "gemma4": Family(
        ("<|tool_call>",), ("<tool_call|>",), header=rf"call:{NAME}", arguments=partial(quoted, '<|"|>'), special=True,
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

# A call up to its arguments, if it is JSON with its members in the order in which templates ask for them.
JSON_HEADER = (
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?(?:"function": \{\s*)?'
    rf'"name"\s*:\s*"{NAME}"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)
# A bracket after the first one: a header that does not end before it is none.
BRACKET = re.compile(r'(?<!"function": )[{}]')
SEPARATORS = r"[\s,;\[]*"  # before and between calls
BEFORE = re.compile(SEPARATORS)
LIST_END = re.compile(r"\s*\]?")
# The first member of an object, and its value if it is a string.
MEMBER = re.compile(SEPARATORS + r'\{\s*(?:"(?P<name>[^"]*)"\s*:\s*(?:"(?P<value>[^"]*)")?|[^"\s])')
# As MEMBER, of a text that may end anywhere.
BEGINNING = re.compile(SEPARATORS + r'\{?\s*(?:"(?P<name>[^"]*)(?:"\s*:?\s*(?:"(?P<value>[^"]*))?)?)?')
# The maximum number of characters between the beginning of a call and its arguments.
MAX_HEADER = 300
# Outside of its strings, JSON has no other characters.
JSON = re.compile(r"[\w\s{}\[\]:,+.-]", re.ASCII)
# A part of the reader. It yields where it needs more of the answer.
Steps = Generator[None, None, None]
Emit = Callable[[str], None]


class AnswerParser:
    """Reads one answer, in pieces that may be cut anywhere."""

    def __init__(
        self, family: str, reasoning: str, tools: Sequence[dict[str, Any]] = (), parallel: bool = True
    ) -> None:
        """Read the calls that this family of models writes, if the request has tools, and this kind of reasoning.

        Without `parallel`, leave out all calls but the first.
        """
        self._form = FAMILIES[family]
        self._own_header = "" if self._form.arguments else self._form.header
        self._header = header_pattern(self._own_header)
        self._reasoning = reasoning
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        self._parallel = parallel
        self._deltas: list[Delta] = []
        self._text, self._ended = "", False  # what was not read yet, and whether it is all
        self._cut = False  # the answer ended at its limit, perhaps within a marker or a call: no such piece is content
        self._space = ""  # becomes content only if content follows
        self.calls = 0  # so far
        # The reader drops spaces after a reasoning or a call, and markers that end calls only after a call.
        self._trims = self._after_call = False
        self._steps = self._answer() if reasoning or self._schemas else None

    def feed(self, text: str, is_last: bool, is_cut: bool = False) -> list[Delta]:
        """Return the deltas that this piece of the answer completes. `is_cut`: a limit ended the answer with it."""
        if self._steps is None:
            return [Delta(content=text)] if text else []
        self._text, self._ended, self._cut = self._text + text, is_last, is_cut
        next(self._steps, None)
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
        if text:
            self._add(Delta(call=CallDelta(self.calls - 1, "", "", text)))

    def _call(self, name: str, arguments: str = "") -> None:
        self._space = ""
        self._trims = self._after_call = True
        self._add(Delta(call=CallDelta(self.calls, f"call_{uuid.uuid4().hex[:24]}", name, arguments)))
        self.calls += 1

    # The reader.

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        return taken

    def _until(self, markers: tuple[str, ...], emit: Emit) -> Generator[None, None, str]:
        """Read up to one of the markers and return it, or "" at the end. Emit the text before it."""
        pattern = marker_pattern(markers)
        while True:
            match = pattern.search(self._text)
            marker = match["marker"] if match else ""
            if match is None or (self._ended and not marker and not self._may_be_cut(match[0])):
                emit(self._take(len(self._text)))
            else:
                emit(self._take(match.start()))
                if marker:
                    return self._take(len(marker))
            if self._ended:
                self._text = ""
                return ""
            yield

    def _may_be_cut(self, beginning: str) -> bool:
        """Return whether the last text is a piece of a marker, and not of a word, such as `functools`."""
        return self._cut and not beginning[0].isalnum()

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
        while (text := self._text.lstrip()) != begin and begin.startswith(text) and not self._ended:
            yield
        if self._cut and text != "" and begin.startswith(text):
            self._text = ""
        elif text.startswith(begin) or self._reasoning == "think_opened":
            self._text = text.removeprefix(begin)
            yield from self._until((end,), self._thought)
            self._trims = True

    def _channels(self) -> Steps:
        """Read messages, each with a header that names its channel. The prompt has begun the first header."""
        marker = ""
        while True:
            pieces = [marker]
            is_header = yield from self._until(("<|message|>",), pieces.append)
            header = "".join(pieces)
            if not is_header:
                if "<|" not in header:
                    self._content(header)
                return
            recipient = re.search(rf"to=functions\.{NAME}", header)
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
            yield from self._json_calls("")
        while marker := (yield from self._until(markers, self._content)):
            if marker in form.begins:
                while form.arguments and not self._text.strip() and not self._ended:
                    yield
                is_json = not form.arguments or self._text.lstrip().startswith(("{", "["))
                yield from self._json_calls(marker) if is_json else self._whole_call(marker)
            elif marker in form.ends and not self._after_call:
                self._content(marker)

    def _whole_call(self, marker: str) -> Steps:
        """Read a call whose arguments are JSON only when all of them are there."""
        pieces: list[str] = []
        end = yield from self._until(self._form.ends, pieces.append)
        text = "".join(pieces)
        match = re.match(self._form.header, text)
        if end and match and self._form.arguments:
            arguments = self._form.arguments(text[match.end() :], self._schemas.get(match[1], {}))
            if arguments is not None:
                self._call(match[1], arguments)
                return
        if end or not self._cut:
            self._content(marker + text + end)

    def _json_calls(self, marker: str) -> Steps:
        """Read calls after a marker, one after the other or as a JSON list. If there is none, the text is content."""
        count = self.calls
        while (yield from self._json_call(is_bare=not marker)):
            pass
        if self.calls == count:
            self._content(marker if self._text or not self._cut else "")
        elif end := LIST_END.match(self._text):
            self._take(end.end())

    def _json_call(self, is_bare: bool) -> Generator[None, None, bool]:
        """Read a call if there is one, and return whether another one may follow without a marker.

        Its arguments are emitted as they arrive if they follow the name. Bare calls must be of known tools.
        """
        while not (header := self._header.match(self._text)):
            before = BEFORE.match(self._text)
            start = before.end() if before else 0
            is_json = self._text[start : start + 1] == "{"
            is_other = start < len(self._text) and not is_json and not self._own_header
            if is_other or (is_bare and not self._may_be_bare()):
                return False
            bracket = BRACKET.search(self._text, start + is_json)
            if self._ended and self._cut and not bracket and (not is_bare or self._begins_call()):
                self._text = ""
            if self._ended or len(self._text) > MAX_HEADER or bracket:
                return is_json and (yield from self._held_call(start, is_bare))
            yield
        name = header[header.lastindex or 0]
        if is_bare and name not in self._schemas:
            return False
        depth = self._take(header.end()).count("{")
        self._call(name)
        yield from self._value(0, self._arguments)
        if depth:  # read the rest of the call
            yield from self._value(depth, lambda _: None)
        return bool(depth)

    def _may_be_bare(self) -> bool:
        """Return whether the text so far may begin a call of a known tool."""
        if not (member := MEMBER.match(self._text)):
            return True
        name, value = member["name"], member["value"]
        return name in MEMBERS and (name != "name" or value is None or value in self._schemas)

    def _begins_call(self) -> bool:
        """Return whether the text, which a limit cut, begins a call of a known tool, and not other JSON."""
        name, value = BEGINNING.match(self._text).groups()  # type: ignore[union-attr]
        if value is None:
            return name is None or any(member.startswith(name) for member in ("name", "type", "function"))
        return any(known.startswith(value) for known in {"name": [*self._schemas], "type": ["function"]}.get(name, ()))

    def _held_call(self, start: int, is_bare: bool) -> Generator[None, None, bool]:
        """Read a call whose members have another order. Return whether it is one."""
        pieces = [self._take(start)]
        yield from self._value(0, pieces.append)
        call = json_call("".join(pieces[1:]))
        if call and (call[0] in self._schemas or not is_bare):
            self._call(*call)
            return True
        if is_bare or self._text or not self._cut:
            self._text = "".join(pieces) + self._text
        return False

    def _value(self, depth: int, emit: Emit) -> Steps:
        """Read JSON inside of so many brackets up to their end, and emit it. Stop at what is no JSON."""
        is_string = is_escaped = False
        while True:
            for at, char in enumerate(self._text):
                if is_string:
                    is_string = is_escaped or char != '"'
                    is_escaped = char == "\\" and not is_escaped
                elif char == '"':
                    is_string = True
                elif not JSON.match(char):
                    emit(self._take(at))
                    return
                else:
                    depth += (char in "[{") - (char in "]}")
                    if depth <= 0:
                        emit(self._take(at + 1))
                        return
            emit(self._take(len(self._text)))
            if self._ended:
                return
            yield


@functools.cache
def marker_pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Return what finds a marker, or the beginning of one at the end of a text."""
    beginnings = {marker[:end] for marker in markers for end in range(1, len(marker))}
    return re.compile(rf"(?P<marker>{any_of(markers)})|(?:{any_of(beginnings)})\Z")


def any_of(texts: Iterable[str]) -> str:
    return "|".join(map(re.escape, texts)) or "(?!)"


@functools.cache
def header_pattern(header: str) -> re.Pattern[str]:
    return re.compile(rf"{SEPARATORS}(?:{JSON_HEADER}|{header or '(?!)'})(?={{)")


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
        tag(form.before % own["name"], schema_format((own.get("parameters") or EMPTY) | {"type": "object"}), form.after)
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
