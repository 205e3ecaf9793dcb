"""Describe the forms of pipelines' answers as JSON, and check answers without transformers."""

from __future__ import annotations

from typing import Any, NamedTuple

# A shape is one of these, a type, a list of one shape (at least one element), or the fields that an object must have.
NUMBER, TEXT, ANY = float, str, object


class Some(NamedTuple):
    """A list that may be empty: a detector may find nothing."""

    shape: Any


class Numbers(NamedTuple):
    """Numbers in nested lists, at least one."""


class File(NamedTuple):
    """A file in base64, by how it begins."""

    start: str


PNG, WAV = File("iVBORw0KGgo"), File("UklGR")
LABEL_SCORES = [{"score": NUMBER, "label": TEXT}]
CONTINUED = [{"generated_text": ANY}]  # a text, or a chat if the request is one


def defect(answer: Any, shape: Any, place: str = "the answer") -> str:
    """Return where an answer does not have the shape, or nothing."""
    match shape:
        case dict():
            if not isinstance(answer, dict) or (missing := [name for name in shape if name not in answer]):
                return f"{place} has no '{missing[0]}'" if isinstance(answer, dict) else f"{place} is no object"
            parts = [(answer[name], own, f"{place}.{name}") for name, own in shape.items()]
        case [own] if isinstance(shape, list):
            if not isinstance(answer, list) or not answer:
                return f"{place} is no list with an element"
            parts = [(part, own, f"{place}[{number}]") for number, part in enumerate(answer)]
        case Some(own):
            if answer == []:
                return ""
            return defect(answer, [own], place)
        case Numbers():
            nested = isinstance(answer, list) and answer
            return defect(answer, [Numbers()], place) if nested else defect(answer, NUMBER, place)
        case File(start):
            is_file = isinstance(answer, str) and answer.startswith(start)
            return "" if is_file else f"{place} is no {'image' if shape == PNG else 'sound'} in base64"
        case _:
            kinds = (int, float) if shape is NUMBER else shape
            is_right = isinstance(answer, kinds) and answer is not None and not isinstance(answer, bool)
            return "" if is_right else f"{place} is no {'number' if shape is NUMBER else 'text'}"
    return next(filter(None, (defect(*part) for part in parts)), "")


def leaves(value: Any) -> list[Any]:
    """Return the numbers and texts of an answer in order, with the names and lengths that hold them."""
    if isinstance(value, dict):
        return [leaf for name in sorted(value) for leaf in (name, *leaves(value[name]))]
    if isinstance(value, list):
        return [len(value), *(leaf for part in value for leaf in leaves(part))]
    return [value]
