"""Splits the tensors of a batch into chunks for the cores, and joins the chunks' outputs."""

from __future__ import annotations

import numpy as np

from serving.triton.types import BadRequest, Tensors


def row_count(tensors: Tensors) -> int:
    """Return the number of rows, which all inputs must share."""
    rows = {name: len(array) if array.ndim else 0 for name, array in tensors.items()}
    if len(set(rows.values())) > 1:
        counts = ", ".join(f"'{name}' has {count}" for name, count in rows.items())
        raise BadRequest(f"the inputs must have the same number of rows: {counts}")
    count = next(iter(rows.values()))
    if not count:
        raise BadRequest(f"input '{next(iter(rows))}' has no rows", next(iter(rows)))
    return count


def padded_count(rows: int, compiled_rows: int) -> int:
    """Round up to a multiple of the compiled size, if that is known (not 0)."""
    return -(-rows // compiled_rows) * compiled_rows if compiled_rows else rows


def chunk_sizes(rows: int, compiled_rows: int, parts: int) -> list[int]:
    """Return chunks of the compiled size, or, if that is unknown (0), chunks of nearly equal size."""
    if compiled_rows:
        return [compiled_rows] * (rows // compiled_rows)
    parts = min(rows, parts)
    return [rows // parts + (part < rows % parts) for part in range(parts)]


def padded(tensors: Tensors, rows: int) -> Tensors:
    """Repeat the last row, because a row of zeros can be invalid input for the model."""
    return {
        name: array if len(array) == rows else np.concatenate([array, array[-1:].repeat(rows - len(array), axis=0)])
        for name, array in tensors.items()
    }


def split(tensors: Tensors, sizes: list[int]) -> list[Tensors]:
    if len(sizes) == 1:
        return [tensors]
    ends = np.cumsum(sizes)[:-1]
    pieces = {name: np.split(array, ends) for name, array in tensors.items()}
    return [{name: pieces[name][i] for name in pieces} for i in range(len(sizes))]


def joined(chunks: list[Tensors]) -> Tensors:
    if len(chunks) == 1:
        return chunks[0]
    return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}


def config_shape(tensor: dict, batching: bool) -> list[int]:
    """Return the shape of a tensor of config.pbtxt with the batch dimension; -1 is any size."""
    dims = tensor["reshape"]["shape"] if tensor.get("reshape") else tensor["dims"]
    return [-1] * batching + [int(size) for size in dims]


def check_shapes(outputs: Tensors, expected: dict[str, list[int]]) -> None:
    """Compare outputs with config.pbtxt, because Triton returns whatever shape a Python model gives."""
    for name in (name for name in expected if name in outputs):
        shape, sizes = list(np.shape(outputs[name])) or [1], expected[name]  # a scalar is returned as [1]
        if len(shape) != len(sizes) or any(size not in (-1, actual) for size, actual in zip(sizes, shape, strict=True)):
            raise RuntimeError(f"output '{name}' has the shape {shape}, and in config.pbtxt {sizes}")


def check_rows(outputs: Tensors, rows: int) -> None:
    """Raise if an output has more or fewer rows than the input, before they are dropped or given to requests."""
    for name, array in outputs.items():
        if array.ndim == 0 or len(array) != rows:
            raise RuntimeError(f"output '{name}' has the shape {list(array.shape)} for {rows} rows of input")
