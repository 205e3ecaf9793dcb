"""Protobuf's text format, laid out for people: plain fields first, then one block per field."""

from __future__ import annotations

import re


class Enum(str):
    """A name from the schema, which is written without quotes."""


class Map(dict):
    """A field of keys and values, which is written as one entry per line."""


def config_text(config: dict) -> str:
    plain = [field(name, value) for name, value in config.items() if not isinstance(value, (dict, list))]
    blocks = [block(name, value) for name, value in config.items() if isinstance(value, (dict, list))]
    return "\n\n".join(["\n".join(plain), *blocks]) + "\n"


def block(name: str, value: dict | list) -> str:
    if isinstance(value, Map):
        return "\n".join(field(name, {"key": key, "value": entry}) for key, entry in value.items())
    if isinstance(value, list) and len(value) > 1:
        entries = ",\n".join(f"  {value_text(entry)}" for entry in value)
        return f"{name} [\n{entries}\n]"
    return field(name, value)


def field(name: str, value: object) -> str:
    message = isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict))
    return f"{name}{'' if message else ':'} {value_text(value)}"


def value_text(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(["{", *(field(name, entry) for name, entry in value.items()), "}"])
    if isinstance(value, list):
        return f"[ {', '.join(map(value_text, value))} ]" if value else "[ ]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str) and not isinstance(value, Enum):
        return '"' + re.sub(r'[\\"\x00-\x1f\x7f]', lambda match: f"\\{ord(match.group()):03o}", value) + '"'
    return str(value)
