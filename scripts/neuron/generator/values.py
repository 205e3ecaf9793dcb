"""What a value may be: each reader takes a text, and raises ValueError with what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

INT32, INT64 = 2**31 - 1, 2**63 - 1
INTEGERS = ("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64")
DATA_TYPES = ("BOOL", *INTEGERS, "FP16", "BF16", "FP32", "FP64", "STRING")


def whole(least: int, most: int = INT32) -> Callable[[str], int]:
    def read(text: str) -> int:
        number = int(text) if re.fullmatch("-?[0-9]{1,19}", text) else least - 1
        if not least <= number <= most:
            raise ValueError(f"must be a whole number, at {f'most {most}' if number > most else f'least {least}'}")
        return number

    return read


def like(pattern: str, what: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise ValueError(f"must be {what}")
        return text

    return read


def one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    return like("|".join(choices), f"one of {', '.join(choices)}")


def cores(text: str) -> range:
    found = re.fullmatch("(-?[0-9]{1,19}):(-?[0-9]{1,19})", text)
    if not found:
        raise ValueError("must be the first and the last core, such as 0:3")
    first, last = (int(index) for index in found.groups())
    if min(first, last) < 0 or max(first, last) > INT32:
        raise ValueError("cores are counted from 0 on, such as 0:3")
    if last < first:
        raise ValueError(f"ends before it starts: did you mean {last}:{first}")
    return range(first, last + 1)


@dataclass
class Tensor:
    name: str
    data_type: str
    dims: list[int] | None  # None: not even their number is known
    optional: bool = False


def tensor(text: str) -> Tensor:
    """A ValueError may have two sentences."""
    parts = text.split(",")
    if len(parts) != 3 or not parts[0]:
        raise ValueError("must be a name, a data type and a shape, such as INPUT__0,INT64,4x384")
    name, data_type, shape = parts
    data_type = "STRING" if data_type == "BYTES" else data_type
    wrong = []
    if data_type not in DATA_TYPES:
        wrong.append(f"'{data_type}' is no data type; must be one of {', '.join(DATA_TYPES)}")
    if not all(re.fullmatch("-1|0*[1-9][0-9]{0,17}", size) for size in shape.split("x")):
        wrong.append(f"'{shape}' is no shape; must be sizes from 1 on, or -1 for any, such as 4x384")
    if wrong:
        raise ValueError(*wrong)
    return Tensor(name, data_type, [int(size) for size in shape.split("x")])
