"""Protobuf's text format, as people write config.pbtxt: plain fields first, then block by block."""

from __future__ import annotations

import re


class Enum(str):
    """A name of the schema's own: written without quotes."""


class Map(dict):
    """A field of keys and values: one entry a line."""


def config_text(config: dict) -> str:
    plain = [field(name, value) for name, value in config.items() if not isinstance(value, (dict, list))]
    blocks = [block(name, value) for name, value in config.items() if isinstance(value, (dict, list))]
    return "\n\n".join(["\n".join(plain), *blocks]) + "\n"


def block(name: str, value: dict | list) -> str:
    if isinstance(value, Map):
        return "\n".join(field(name, {"key": key, "value": each}) for key, each in value.items())
    if isinstance(value, list) and len(value) > 1:
        entries = ",\n".join(f"  {shown(each)}" for each in value)
        return f"{name} [\n{entries}\n]"
    return field(name, value)


def field(name: str, value: object) -> str:
    message = isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict))
    return f"{name}{'' if message else ':'} {shown(value)}"


def shown(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(["{", *(field(name, each) for name, each in value.items()), "}"])
    if isinstance(value, list):
        return f"[ {', '.join(map(shown, value))} ]" if value else "[ ]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str) and not isinstance(value, Enum):
        return '"' + re.sub(r'[\\"\x00-\x1f\x7f]', lambda found: f"\\{ord(found.group()):03o}", value) + '"'
    return str(value)
