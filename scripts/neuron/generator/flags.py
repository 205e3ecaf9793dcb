"""What the command line says, option by option: everything wrong with it is collected, to be told at once."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable

from generator.options import GROUPS, KINDS, MANY, OPTIONS, Group, Option


class Told(Exception):
    """Something is wrong, and among the errors already."""


class Flags:
    """flags["max_batch_size"] is its value; where that is wrong, whoever asks for it ends with Told."""

    def __init__(self, given: dict[str, list[str]], errors: list[str]) -> None:
        self.given = given  # of each option that was said its values
        self.errors = errors
        self.warnings: list[str] = []
        self.values: dict[str, object] = {}
        kind = given.get("model_type", [])[-1:]
        self.kind = kind[0] if kind and kind[0] in KINDS else None
        for group in GROUPS:
            if self.kind and self.kind not in group.kinds:
                self.leave_out(group)
            else:
                for option in group.options:
                    self.take(option, needed=bool(self.kind) or group.kinds == KINDS)

    def __getitem__(self, flag: str):
        if flag not in self.values:
            raise Told
        return self.values[flag]

    def said(self, flag: str) -> bool:
        return flag in self.given

    def text(self, flag: str) -> str:
        """As it was said, or its default, to be shown."""
        return " ".join(self.given[flag]) if self.said(flag) else str(self.values.get(flag, ""))

    def wrong(self, flag: str, what: str, value: object = None) -> Told:
        """To be raised where what follows depends on it."""
        text = self.text(flag) if value is None else str(value)
        self.errors.append(f"--{flag} {shlex.quote(text)}: {what}" if text else f"--{flag}: {what}")
        return Told()

    def attempt(self, read: Callable, *arguments: object):
        """What `read` makes of the flags; None where that was told to be wrong."""
        try:
            return read(self, *arguments)
        except Told:
            return None

    def take(self, option: Option, needed: bool) -> None:
        name, about = option.name, option.about.partition(". ")[0]
        if not option.takes:
            self.values[name] = self.said(name)
        elif not self.said(name) and option.must and needed:
            self.errors.append(f"--{name} is missing: {about}")
        elif not self.said(name):
            self.values[name] = option.default
        elif not any(self.given[name]):
            self.errors.append(f"--{name} needs a value: {about}")
        else:
            values = [self.read(option, text) for text in self.given[name]]
            if None not in values:
                self.values[name] = values if option.room == MANY else values[0]

    def read(self, option: Option, text: str) -> object:
        try:
            return option.read(text)
        except ValueError as error:
            for what in error.args:
                self.wrong(option.name, what, text)
            return None

    def leave_out(self, group: Group) -> None:
        """Options of other kinds: where one would have changed something, that is told."""
        for option in group.options:
            name, default = option.name, option.default
            self.values[name] = default
            if self.said(name) and not group.elsewhere:
                self.warnings.append(f"--{name}: ignored, it goes with --model_type {group.kinds[0]}")
            elif self.said(name) and self.text(name) != str(default):
                self.wrong(name, group.elsewhere)


def parse(arguments: list[str]) -> Flags:
    """By hand, since argparse ends with the first thing that it does not like."""
    given: dict[str, list[str]] = {}
    errors: list[str] = []
    values, room = [], 0  # what takes the next values, and how many
    for argument in arguments:
        if not argument.isprintable():
            errors.append(f"{argument!a}: has characters that cannot be printed")
        name, equals, value = argument.partition("=")
        option = OPTIONS.get(name[2:]) if name.startswith("--") else None
        if option and equals and not option.takes:
            errors.append(f"{argument}: takes no value; say {name}, or leave it out")
        elif option:
            values = given[option.name] = given.get(option.name, []) if option.room == MANY else []
            room = option.room
            if equals:
                values.append(value)
                room -= 1
        elif re.match("--?[A-Za-z]", argument):
            errors.append(f"{name}: there is no such option{close_to(name)}")
            values, room = [], MANY  # which may have been meant for it
        elif room:
            values.append(argument)
            room -= 1
        else:
            errors.append(f"{argument}: belongs to no option")
    return Flags(given, errors)


def close_to(name: str) -> str:
    close = difflib.get_close_matches(name, ["--help", *(f"--{known}" for known in OPTIONS)], 1)
    return f"; did you mean {close[0]}?" if close else ""
