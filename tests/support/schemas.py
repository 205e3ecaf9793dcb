"""Two hundred JSON schemas as applications send them, always the same ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

WORDS = (
    "name",
    "title",
    "status",
    "city",
    "amount",
    "price",
    "tags",
    "kind",
    "note",
    "owner",
    "size",
    "colour",
    "näme",
)
TITLES = ("open", "closed", "in progress", "über", 'say "yes"', "a\\b", "línea\n2", "東京", "opened", "close")


def schemas(count: int = 200) -> list[Schema]:
    made = [*FIXED]
    while len(made) < count:
        choice = random.Random(len(made))
        made.append(objects(choice, 3) | {"title": f"Answer {len(made)}"})
    return made[:count]


def closed(properties: Schema, required: list[str] | None = None, **more: Any) -> Schema:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False, **more}


def objects(choice: random.Random, depth: int) -> Schema:
    names = choice.sample(WORDS, choice.randint(1, 5))
    properties = {name: value(choice, depth - 1) for name in names}
    return closed(properties, [name for name in names if choice.random() < 0.6])


def value(choice: random.Random, depth: int) -> Schema:
    made: list[Callable[[], Schema]] = [
        lambda: {"type": "string", "maxLength": choice.randint(0, 12)},
        lambda: {"type": "string", "minLength": 2, "maxLength": 5, "description": "a short text"},
        lambda: {"type": "string", "pattern": choice.choice(PATTERNS)},
        lambda: {"type": "string", "format": choice.choice(("date", "date-time", "uuid", "ipv4", "time", "duration"))},
        lambda: {"enum": choice.sample(TITLES, choice.randint(1, 6))},
        lambda: {"type": "string", "const": choice.choice(TITLES)},
        lambda: {"enum": [1, 10, 100, 1.5, None, True, "1"]},
        lambda: {"type": "integer", "minimum": choice.randint(-500, 5), "maximum": choice.randint(6, 20_000)},
        lambda: {"type": "integer", "exclusiveMinimum": 0},
        lambda: {"type": "number", "minimum": 0, "maximum": round(choice.uniform(0.1, 900), 2)},
        lambda: {"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 1},
        lambda: {"type": ["integer", "null"]},
        lambda: {"type": "boolean", "default": False},
        lambda: {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}], "default": None},
    ]
    if depth > 0:
        made += [
            lambda: objects(choice, depth),
            lambda: {"type": "array", "items": value(choice, depth - 1), "maxItems": choice.randint(0, 3)},
            lambda: {"type": "array", "items": value(choice, depth - 1), "minItems": 1, "maxItems": 2},
            lambda: {"type": "array", "prefixItems": [value(choice, 0), value(choice, 0)], "items": False},
            lambda: {"anyOf": [objects(choice, depth - 1), value(choice, 0)]},
            lambda: {"type": "object", "additionalProperties": value(choice, 0), "maxProperties": 2},
        ]
    return choice.choice(made)()


PATTERNS = (
    "^[A-Z]{2}-[0-9]{3,5}$",
    "^(red|green|grey|great)$",
    "^[^a-z]{1,6}$",
    r"^\+?\d{2,3}( \d{2}){2}$",
    "^#[0-9a-fA-F]{6}$",
    r'^"\w+\\$',
    "^.{0,5}$",
    r"^(\d+|\d+\.\d{2})$",
)
TREE = closed({"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}})
SHAPES = [
    closed({"shape": {"const": "circle"}, "radius": {"type": "number", "exclusiveMinimum": 0, "maximum": 10}}),
    closed({"shape": {"const": "square"}, "side": {"type": "integer", "minimum": 1, "maximum": 9}}),
    closed({"shape": {"const": "squircle"}, "side": {"type": "integer", "minimum": 1, "maximum": 9}}),
]
ADDRESS = closed({"street": {"type": "string", "maxLength": 8}, "zip": {"type": "string", "pattern": r"^\d{5}$"}})
FIXED: list[Schema] = [
    {"$defs": {"node": TREE}, "$ref": "#/$defs/node"},
    {"oneOf": SHAPES},
    {"anyOf": SHAPES, "description": "any of them"},
    {
        "$defs": {"shape": {"oneOf": SHAPES}},
        **closed({"shapes": {"type": "array", "items": {"$ref": "#/$defs/shape"}}}),
    },
    {
        "$defs": {"address": ADDRESS},
        **closed({"home": {"$ref": "#/$defs/address"}, "work": {"$ref": "#/$defs/address"}}),
    },
    {"$defs": {"address": ADDRESS}, **closed({"home": {"allOf": [{"$ref": "#/$defs/address"}], "default": None}})},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"enum": ["a", "b"]}], "minItems": 2, "maxItems": 2},
    {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    {"oneOf": [{"type": "integer"}, {"type": ["string", "null"], "maxLength": 3}]},
    {"oneOf": [{"const": 1, "enum": [1], "title": "one"}, {"enum": ["two", 2]}]},
    {"discriminator": {"propertyName": "shape"}, "oneOf": [own | {"required": []} for own in SHAPES]},
    {"type": "object", "propertyNames": {"enum": ["a", "ab"]}, "additionalProperties": {"type": "null"}},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 5},
    {"type": "object", "propertyNames": {"pattern": "^[a-z]{1,3}$"}, "additionalProperties": {"type": "integer"}},
    {"type": "object", "patternProperties": {"^x-[a-c]$": {"type": "boolean"}}, "additionalProperties": False},
    {"enum": [f"{number}" for number in range(300)]},
    {"type": "integer", "minimum": -1_000_000, "maximum": 1_000_000},
    {"type": "number", "minimum": -0.125, "maximum": 1e6},
    closed({f"field {number}": {"type": "boolean"} for number in range(30)}, []),
    closed({"text": {"type": "string", "maxLength": 200}}),
]
