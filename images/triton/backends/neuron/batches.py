"""Tensors of one batch: filled up, cut into what the cores are given, put together again."""

from __future__ import annotations

import numpy as np

from shared.errors import BadRequest

Tensors = dict[str, np.ndarray]


def row_count(tensors: Tensors) -> int:
    """Of inputs that are cut along their first dimension."""
    rows = {name: len(array) if array.ndim else 0 for name, array in tensors.items()}
    if len(set(rows.values())) > 1:
        counts = ", ".join(f"'{name}' has {count}" for name, count in rows.items())
        raise BadRequest(f"the inputs must have the same number of rows: {counts}")
    count = next(iter(rows.values()))
    if not count:
        raise BadRequest(f"input '{next(iter(rows))}' has no rows")
    return count


def full(rows: int, size: int) -> int:
    """Rows to fill up to: whole chunks of the compiled size, where that is known."""
    return -(-rows // size) * size if size else rows


def sizes(rows: int, size: int, parts: int) -> list[int]:
    """How many rows go where: chunks of the compiled size, or, where that is not known (0), as even as possible."""
    if size:
        return [size] * (rows // size)
    parts = min(rows, parts)
    return [rows // parts + (part < rows % parts) for part in range(parts)]


def filled(tensors: Tensors, rows: int) -> Tensors:
    """With the last row repeated: one of zeros could be outside of what the model knows."""
    return {
        name: array if len(array) == rows else np.concatenate([array, array[-1:].repeat(rows - len(array), axis=0)])
        for name, array in tensors.items()
    }


def cut(tensors: Tensors, sizes: list[int]) -> list[Tensors]:
    if len(sizes) == 1:
        return [tensors]
    ends = np.cumsum(sizes)[:-1]
    pieces = {name: np.split(array, ends) for name, array in tensors.items()}
    return [{name: pieces[name][i] for name in pieces} for i in range(len(sizes))]


def joined(parts: list[Tensors]) -> Tensors:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def stated_sizes(tensor: dict, batching: bool) -> list[int]:
    """Of one tensor of config.pbtxt, the batch's before them; -1 is any."""
    dims = tensor["reshape"]["shape"] if tensor.get("reshape") else tensor["dims"]
    return [-1] * batching + [int(size) for size in dims]


def check_sizes(outputs: Tensors, stated: dict[str, list[int]]) -> None:
    """Triton hands out whatever a Python model gives."""
    for name in (name for name in stated if name in outputs):
        found, sizes = list(np.shape(outputs[name])) or [1], stated[name]  # a scalar goes out as [1]
        if len(found) != len(sizes) or any(said not in (-1, size) for said, size in zip(sizes, found, strict=True)):
            raise RuntimeError(f"output '{name}' has the shape {found}, and in config.pbtxt {sizes}")


def check_rows(outputs: Tensors, rows: int) -> None:
    """Before anything is cut off or handed to the request it belongs to."""
    for name, array in outputs.items():
        if array.ndim == 0 or len(array) != rows:
            raise RuntimeError(f"output '{name}' has the shape {list(array.shape)} for {rows} rows of input")
