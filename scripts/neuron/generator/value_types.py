"""Types of option values: each takes a text and returns its value, or raises ValueError with what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

INT32, INT64 = 2**31 - 1, 2**63 - 1
INTEGERS = ("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64")
DATA_TYPES = ("BOOL", *INTEGERS, "FP16", "BF16", "FP32", "FP64", "STRING")


def whole_number(minimum: int, maximum: int = INT32) -> Callable[[str], int]:
    def convert(text: str) -> int:
        number = int(text) if re.fullmatch("-?[0-9]{1,19}", text) else minimum - 1
        if not minimum <= number <= maximum:
            limit = f"at most {maximum}" if number > maximum else f"at least {minimum}"
            raise ValueError(f"must be a whole number, {limit}")
        return number

    return convert


def matching(pattern: str, description: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise ValueError(f"must be {description}")
        return text

    return convert


def one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    return matching("|".join(choices), f"one of {', '.join(choices)}")


def core_range(text: str) -> range:
    match = re.fullmatch("(-?[0-9]{1,19}):(-?[0-9]{1,19})", text)
    if not match:
        raise ValueError("must be the first and the last core, such as 0:3")
    first, last = map(int, match.groups())
    if min(first, last) < 0 or max(first, last) > INT32:
        raise ValueError("cores are counted from 0, such as 0:3")
    if last < first:
        raise ValueError(f"ends before it starts; did you mean {last}:{first}?")
    return range(first, last + 1)


@dataclass
class Tensor:
    """An input or an output of the model."""

    name: str
    data_type: str
    dims: list[int] | None  # None: the model does not know how many dimensions there are
    optional: bool = False


def tensor(text: str) -> Tensor:
    """Return the tensor, or raise ValueError with one argument per mistake."""
    parts = text.split(",")
    if len(parts) != 3 or not parts[0]:
        raise ValueError("must be a name, a data type and a shape, such as INPUT__0,INT64,4x384")
    name, data_type, shape = parts
    data_type = "STRING" if data_type == "BYTES" else data_type
    mistakes = []
    if data_type not in DATA_TYPES:
        mistakes.append(f"unknown data type '{data_type}'; must be one of {', '.join(DATA_TYPES)}")
    if not all(re.fullmatch("-1|0*[1-9][0-9]{0,17}", size) for size in shape.split("x")):
        mistakes.append(f"invalid shape '{shape}'; must be sizes of at least 1, or -1 for any size, such as 4x384")
    if mistakes:
        raise ValueError(*mistakes)
    return Tensor(name, data_type, [int(size) for size in shape.split("x")])
