"""Parse the command line. Collect its errors, so that one run reports every wrong argument."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable
from typing import Any

from generator.options import GROUPS, KINDS, OPTIONS, Group, Option, build_parser


class InvalidArgument(Exception):
    """An argument is wrong. `Arguments.errors` has the message already."""


class Arguments:
    """The options' values: `arguments["max_batch_size"]` raises InvalidArgument if that value is wrong or missing."""

    def __init__(self, command_line: list[str]) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.values: dict[str, Any] = {}
        self.texts = self.parse(command_line)
        kind = self.text("model_type")
        self.kind = kind if kind in KINDS else None
        for group in GROUPS:
            for option in group.options:
                if self.kind and self.kind not in group.kinds:
                    self.reject(option, group)
                else:
                    self.convert(option, required=option.required and bool(self.kind or group.kinds == KINDS))

    def __getitem__(self, name: str) -> Any:
        if name not in self.values:
            raise InvalidArgument
        return self.values[name]

    def given(self, name: str) -> bool:
        return name in self.texts

    def text(self, name: str) -> str:
        """Return the value as the user wrote it, or the default."""
        return " ".join(self.texts[name]) if self.given(name) else str(self.values.get(name, ""))

    def error(self, name: str, problem: str, value: object = None) -> InvalidArgument:
        """Record an error; the caller raises the result if it cannot go on without the value."""
        text = self.text(name) if value is None else str(value)
        self.errors.append(f"--{name} {shlex.quote(text)}: {problem}" if text else f"--{name}: {problem}")
        return InvalidArgument()

    def attempt(self, function: Callable, *more: object) -> Any:
        """Return the function's result, or None if an argument that it needs is wrong."""
        try:
            return function(self, *more)
        except InvalidArgument:
            return None

    def parse(self, command_line: list[str]) -> dict[str, list[str]]:
        """Return the texts of each option that was given.

        argparse exits at its first error. So it only splits the command line, with nothing left that it would reject.
        """
        accepted, unknown = [], set()
        for argument in command_line:
            name, equals, _ = argument.partition("=")
            option = OPTIONS.get(name[2:]) if name.startswith("--") else None
            if not argument.isprintable():
                self.errors.append(f"{argument!a}: has characters that cannot be printed")
            if option and equals and not option.metavar:
                self.errors.append(f"{argument}: takes no value; write {name}, or leave it out")
                continue
            elif not option and re.match("--?[A-Za-z]", argument):
                close = difflib.get_close_matches(name, ["--help", *(f"--{known}" for known in OPTIONS)], 1)
                self.errors.append(f"{name}: unknown option" + (f"; did you mean {close[0]}?" if close else ""))
                unknown.add(name)
            accepted.append(argument)
        parser = build_parser(single="?", many="*")
        if unknown:
            parser.add_argument(*unknown, dest="unknown", nargs="*")  # takes the values that may be meant for it
        namespace, rest = parser.parse_known_args(accepted)
        self.errors += [f"{argument}: belongs to no option" for argument in rest]
        return {name: text if isinstance(text, list) else [text or ""] for name, text in vars(namespace).items()}

    def convert(self, option: Option, required: bool) -> None:
        name, summary = option.name, option.help.partition(". ")[0]
        if not option.metavar:
            self.values[name] = self.given(name)
        elif not self.given(name) and required:
            self.errors.append(f"--{name} is missing: {summary}")
        elif not self.given(name):
            self.values[name] = option.default
        elif not any(self.texts[name]):
            self.errors.append(f"--{name} needs a value: {summary}")
        else:
            values = [self.convert_text(option, text) for text in self.texts[name]]
            if None not in values:
                self.values[name] = values if option.many else values[0]

    def convert_text(self, option: Option, text: str) -> object:
        try:
            return option.type(text)
        except ValueError as error:
            for problem in error.args:
                self.error(option.name, problem, text)
            return None

    def reject(self, option: Option, group: Group) -> None:
        """Report an option of another kind of model: an error if it would have changed something."""
        self.values[option.name] = option.default
        if self.given(option.name) and not group.not_applicable:
            self.warnings.append(f"--{option.name}: ignored, it goes with --model_type {group.kinds[0]}")
        elif self.given(option.name) and self.text(option.name) != str(option.default):
            self.error(option.name, group.not_applicable)
