"""The form of the page with which one tries a system."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Field:
    """One field of a form. `type` is text, number, choice, or a file's: image, images, audio or video."""

    name: str
    label: str
    type: str = "text"
    value: str = ""
    rows: int = 1
    required: bool = True
    min: str = "0"
    step: str = "any"
    choices: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Box:
    """The form to try a system. `kind` names the function of page.js that sends it.

    `answer` names the function of page_answers.js that draws a pipeline's answer. `options` are fields that are folded.
    """

    kind: str
    fields: Sequence[Field]
    button: str
    streams: bool = False
    answer: str = ""
    options: Sequence[Field] = ()
    chats: bool = False
