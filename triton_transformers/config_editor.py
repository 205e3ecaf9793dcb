"""Change fields of a config.pbtxt and leave its comments, its order and its layout as they are.

protobuf reads such a text but keeps no comments, so the text itself is cut where a field begins and ends. Triton's
schema, with which protobuf reads the text before and after, proves that nothing else changed.
"""

from __future__ import annotations

import difflib
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import json_format, message_factory, text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from triton_transformers.model_config import CONFIGS, find_config
from triton_transformers.settings import UserError
from triton_transformers.triton import Config

# A comment, a string, a word or number, or one character of punctuation. Everything between is white space.
TOKEN = re.compile(r"""#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[-+.\w]+|[^\s\w]""")
CLOSING = {"{": "}", "<": ">", "[": "]"}
# Many more than the values of a configuration that differ.
MAX_STEPS = 1000
# The order of fields. A new field goes after the last of those before it in this list, or at the end.
ORDER = ("name", "platform", "backend", "default_model_filename", "max_batch_size")


@dataclass(frozen=True)
class Edit:
    """The text of one model's configuration before and after a change."""

    model: str
    name: str  # of the file in the model's folder
    before: str  # empty if there is no such file
    after: str

    @property
    def diff(self) -> str:
        return diff(self.model, self.before, self.after, self.name)


@dataclass(frozen=True)
class Element:
    """The text of one value: a scalar or a message."""

    start: int
    end: int
    fields: tuple[Field, ...] | None = None  # of a message
    comma: int | None = None  # where the comma behind it is, in a list


@dataclass(frozen=True)
class Field:
    """The text of one field, `name: value`, with the separator behind it."""

    name: str
    start: int
    end: int
    elements: tuple[Element, ...]
    is_list: bool


@dataclass(frozen=True)
class Splice:
    """A part of the text, and what takes its place."""

    start: int
    end: int
    text: str = ""


def edited(text: str, changes: Config) -> str:
    """Return the text with other values in these fields, which have the form of Triton's JSON.

    A field is set to its value as a whole, and None removes it. Only `parameters` are changed one by one, and None
    removes one. A comment is lost only inside a field that is removed, or that gets another number of values.

    Raise UserError if the text cannot be changed safely.
    """
    expected = _changed(_parsed(text), changes)
    for name in changes:
        for _ in range(MAX_STEPS):
            document = Document(text)
            splices = document.next_splices(document.whole, _parsed(text), expected, changes, name)
            if not splices:
                break
            for splice in reversed(sorted(splices, key=lambda splice: splice.start)):
                text = text[: splice.start] + splice.text + text[splice.end :]
    if _parsed(text) != expected:
        raise _unsafe("its layout is unusual")
    return text


def edits(changes: Mapping[str, Config], originals: Mapping[str, Config], repository: Path, profile: str) -> list[Edit]:
    """Return the edits that give each model the changed fields of its configuration, if its text must change.

    `originals` are the configurations that the server completed from the texts. What the server completed stays out of
    the texts, unless it is changed.
    """
    result = []
    for model, changed in changes.items():
        path = find_config(model, repository, profile)
        try:
            before = path.read_bytes().decode() if path else ""  # read_text() would translate newlines
            after = edited(before, _for_file(before, changed, originals[model]))
        except (UserError, UnicodeDecodeError) as error:
            raise UserError(f"{path or model}: {error}") from None
        if after != before:
            folder = (repository if path and path.is_relative_to(repository) else CONFIGS) / model
            name = str(path.relative_to(folder)) if path else "config.pbtxt"
            result.append(Edit(model, name, before, after))
    return result


def diff(model: str, before: str, after: str, name: str = "config.pbtxt") -> str:
    """Return the change as `patch -p1` reads it in the model repository; nothing if there is none."""
    old, new = (io.StringIO(text, newline="\n").readlines() for text in (before, after))
    label = f"a/{model}/{name}" if before else "/dev/null"
    changed = difflib.unified_diff(old, new, label, f"b/{model}/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in changed)


def _for_file(text: str, changed: Config, original: Config) -> Config:
    """Return the changes to the text that turn the server's original configuration into the changed one."""
    written = json_format.MessageToDict(_parsed(text), preserving_proto_field_name=True)
    result = {
        key: value if key == "parameters" else _merged(written.get(key), original.get(key), value)
        for key, value in changed.items()
    }
    required = [] if text.strip() else ["name", "platform", "backend", "max_batch_size"]
    # Triton completes a configuration without inputs or outputs, and then turns dynamic batching on.
    if changed.get("dynamic_batching", ...) is None and not (written.get("input") and written.get("output")):
        required += ["max_batch_size", "input", "output"]
    return {key: original[key] for key in required if original.get(key)} | result


def _merged(written: Any, original: Any, changed: Any) -> Any:
    """Return the written value with the difference between the other two."""
    if original == changed:
        return written
    if isinstance(original, dict) and isinstance(changed, dict):
        written = written or {}
        merged = {key: _merged(written.get(key), original.get(key), changed.get(key)) for key in {**written, **changed}}
        return without_none(merged)
    if isinstance(original, list) and isinstance(changed, list) and len(original) == len(changed):
        written = written or [None] * len(original)
        if len(written) == len(original):
            return [_merged(*values) for values in zip(written, original, changed, strict=True)]
    return changed


def without_none(config: Config) -> Config:
    return {key: value for key, value in config.items() if value is not None}


def _parsed(text: str) -> Any:
    try:
        return text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        reason = str(error).partition(" : ")[2] or str(error)
        raise _unsafe(f"line {error.GetLine() or 1} is not understood ({reason})") from None


def _changed(original: Any, changes: Config) -> Any:
    """Return a copy of the message with the changes."""
    message = ModelConfig()
    message.CopyFrom(original)
    present = without_none(changes)
    if "parameters" in present:
        for key in present["parameters"]:
            message.parameters.pop(key, None)
        present["parameters"] = without_none(present["parameters"])
    try:
        values = json_format.ParseDict(present, ModelConfig())
        for name in changes:
            if name not in present or name != "parameters":
                message.ClearField(name)
    except (json_format.ParseError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise _unsafe(f"the new value is not one of Triton's ({reason})") from None
    message.MergeFrom(values)
    return message


def _unsafe(reason: str) -> UserError:
    return UserError(f"the configuration cannot be changed safely, because {reason}: change it by hand")


class Document:
    """The text of a configuration, cut into fields."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.newline = "\r\n" if "\r\n" in text else "\n"
        self.tokens = [match for match in TOKEN.finditer(text) if not match[0].startswith("#")]
        self.position = 0
        self.whole = Element(0, len(text), self._read_fields(""))

    # --- reading ----------------------------------------------------------------------------------------------------

    @property
    def _token(self) -> str:
        return self.tokens[self.position][0] if self.position < len(self.tokens) else ""

    def _next(self) -> re.Match[str]:
        if not self._token:
            raise _unsafe("it ends too early")
        self.position += 1
        return self.tokens[self.position - 1]

    def _read_fields(self, closing: str) -> tuple[Field, ...]:
        fields = []
        while self._token != closing:
            fields.append(self._read_field())
        return tuple(fields)

    def _read_field(self) -> Field:
        name = self._next()
        if self._token == ":":
            self._next()
        is_list = self._token == "["
        elements = tuple(self._read_list() if is_list else [self._read_element()])
        if self._token in (",", ";"):
            self._next()
        return Field(name[0], name.start(), self.tokens[self.position - 1].end(), elements, is_list)

    def _read_list(self) -> Iterator[Element]:
        self._next()
        while self._token != "]":
            element = self._read_element()
            comma = self._next().start() if self._token == "," else None
            yield Element(element.start, element.end, element.fields, comma)
        self._next()

    def _read_element(self) -> Element:
        first = self._next()
        if first[0] in "{<":
            fields = self._read_fields(CLOSING[first[0]])
            return Element(first.start(), self._next().end(), fields)
        if first[0][0] in "\"'":
            while self._token[:1] in ('"', "'"):  # strings one after the other are one string
                self._next()
        return Element(first.start(), self.tokens[self.position - 1].end())

    # --- changing ---------------------------------------------------------------------------------------------------

    def next_splices(self, message: Element, old: Any, new: Any, values: Config, name: str) -> list[Splice]:
        """Return the next step in changing a field of a message, whose JSON form is `values`; nothing at the end.

        Each step reads the text afresh, so that no two splices can overlap.
        """
        descriptor = new.DESCRIPTOR.fields_by_name[name]
        own = [field for field in message.fields or () if field.name == name]
        before, after = _values(old, descriptor), _values(new, descriptor)
        if before == after:
            return []
        if _is_map(descriptor) and after:
            return self._next_of_map(message, own, descriptor, dict(after))
        elements = [element for field in own for element in field.elements]
        if not after and elements and not descriptor.is_repeated and values.get(name) is not None:
            after = [getattr(new, name)]  # a zero that is given is written
        if len(elements) == len(after) and (len(before) == len(after) or not descriptor.message_type):
            given = values.get(name) or {}
            if not isinstance(given, list):
                given = [given] * len(after)
            splices = []
            for number, (element, value) in enumerate(zip(elements, after, strict=True)):
                if element.fields is not None:
                    splices += self._next_of_message(element, before[number], value, given[number])
                elif not before or before[number] != value:
                    splices.append(Splice(element.start, element.end, _printed(descriptor, value)))
            return splices
        if not after:
            return [self._removed(field) for field in own]
        printed = [_printed(descriptor, value) for value in after]
        value = f"[ {', '.join(printed)} ]" if descriptor.is_repeated else printed[0]
        text = f"{name}{'' if descriptor.message_type else ':'} {value}"
        if own:  # another number of values: a list in place of the first
            return [Splice(own[0].start, own[0].end, text), *(self._removed(field) for field in own[1:])]
        return self._added(message, name, text)

    def _next_of_message(self, message: Element, old: Any, new: Any, values: Config) -> list[Splice]:
        names = dict.fromkeys(descriptor.name for side in (old, new) for descriptor, _ in side.ListFields())
        steps = (self.next_splices(message, old, new, values, name) for name in names)
        return next(filter(None, steps), [])

    def _next_of_map(self, message: Element, own: list[Field], descriptor: Any, new: Config) -> list[Splice]:
        entry = message_factory.GetMessageClass(descriptor.message_type)
        keys = set()
        for field in own:
            for element in field.elements:
                old = text_format.Parse(self.text[element.start + 1 : element.end - 1], entry())
                keys.add(old.key)
                if old.key not in new:
                    return [self._removed_element(field, element)]
                if old.value != new[old.key]:
                    return self._next_of_message(element, old, entry(key=old.key, value=new[old.key]), {})
        key = next(key for key in new if key not in keys)
        text = _printed(descriptor, entry(key=key, value=new[key]))
        if own and own[-1].is_list and own[-1].elements:
            return self._inserted(own[-1].elements[-1], text, ",")
        text = f"{descriptor.name} {text}"
        return self._inserted(own[-1], text) if own else self._added(message, descriptor.name, text)

    # --- removing ---------------------------------------------------------------------------------------------------

    def _removed(self, field: Field) -> Splice:
        return self._cut(field.start, field.end)

    def _removed_element(self, field: Field, element: Element) -> Splice:
        if len(field.elements) == 1:
            return self._removed(field)
        if element.comma:
            return self._cut(element.start, element.comma + 1)
        return Splice(field.elements[-2].end, element.end)  # the one before it becomes the last and loses its comma

    def _cut(self, start: int, end: int) -> Splice:
        """Cut a part of the text, with its lines if nothing else is on them. Keep a comment behind it."""
        first, last = self._line_start(start), self._line_end(end)
        if self.text[first:start].strip() or self.text[end:last].strip():
            while self.text[end : end + 1] == " ":
                end += 1
            return Splice(start, end)
        last = self._next_line(last)
        if not self._line(first - 1).strip() and not self._line(last).strip():  # one empty line is enough
            last = self._next_line(self._line_end(last))
        return Splice(first, last)

    def _line_start(self, position: int) -> int:
        return self.text.rfind("\n", 0, max(position, 0)) + 1

    def _line_end(self, position: int) -> int:
        """Return where the line at this position ends, without its newline."""
        end = self.text.find("\n", position)
        end = len(self.text) if end < 0 else end
        return end - self.text.endswith("\r", position, end)

    def _next_line(self, line_end: int) -> int:
        return self.text.find("\n", line_end) + 1 or len(self.text)

    def _line(self, position: int) -> str:
        """Return the line at this position, nothing if it is before the text."""
        return self.text[self._line_start(position) : self._line_end(max(position, 0))] if position >= 0 else ""

    # --- adding -----------------------------------------------------------------------------------------------------

    def _added(self, message: Element, name: str, text: str) -> list[Splice]:
        """Add a field to a message that does not have it."""
        fields = message.fields or ()
        if message is not self.whole:
            return self._inserted(fields[-1], text) if fields else [self._into_empty(message, text)]
        if not fields:
            newline = self.newline if self.text and not self.text.endswith("\n") else ""
            return [Splice(message.end, message.end, f"{newline}{text}{self.newline}")]
        if name not in ORDER:
            return self._inserted(fields[-1], text, empty_line=2 * self.newline in self.text)
        before = [field for field in fields if field.name in ORDER[: ORDER.index(name)]]
        if not before:
            return [Splice(fields[0].start, fields[0].start, text + self.newline)]
        return self._inserted(before[-1], text)

    def _into_empty(self, message: Element, text: str) -> Splice:
        end = message.end - 1  # of the closing bracket
        if self.text[message.start + 1 : end].strip():  # a comment, so the bracket begins a line
            return Splice(end, end, f"  {text}{self.newline}{self._indent(end)}")
        return Splice(message.start + 1, end, f" {text} ")

    def _inserted(
        self, anchor: Field | Element, text: str, separator: str = "", empty_line: bool = False
    ) -> list[Splice]:
        """Insert a field or element behind this one, on a line of its own if that begins and ends a line."""
        end = self._line_end(anchor.end)
        rest = self.text[anchor.end : end].strip()
        if (rest and not rest.startswith("#")) or not self._begins_line(anchor.start):
            return [Splice(anchor.end, anchor.end, f"{separator} {text}")]
        newlines = self.newline * (2 if empty_line else 1)
        line = f"{newlines}{self._indent(anchor.start)}{text}"
        return [Splice(anchor.end, anchor.end, separator), Splice(end, end, line)]

    def _begins_line(self, position: int) -> bool:
        return not self.text[self._line_start(position) : position].strip()

    def _indent(self, position: int) -> str:
        line = self._line(position)
        return line[: len(line) - len(line.lstrip())]


def _values(message: Any, descriptor: Any) -> list[Any]:
    """Return the values that a message has for a field: none, one, or all of a repeated one."""
    value = getattr(message, descriptor.name)
    if descriptor.is_repeated:
        return sorted(value.items()) if _is_map(descriptor) else list(value)
    is_present = message.HasField(descriptor.name) if descriptor.has_presence else value != descriptor.default_value
    return [value] if is_present else []


def _is_map(descriptor: Any) -> bool:
    return bool(descriptor.message_type and descriptor.message_type.GetOptions().map_entry)


def _printed(descriptor: Any, value: Any) -> str:
    text = io.StringIO()
    text_format.PrintFieldValue(
        descriptor, value, text, as_utf8=True, as_one_line=True, use_short_repeated_primitives=True
    )
    return text.getvalue()
