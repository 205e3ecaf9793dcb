"""The inputs and outputs of requests, in Triton's binary format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

DTYPES = {
    "BOOL": "?", "INT8": "i1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8",
    "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8",
    "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip

# A row of an input: a text, token ids, which serving/text/token_ids.py reads, or the file of an image.
Row = str | Sequence[int] | bytes
TOKEN_IDS = b"\xff"


class Tensor(NamedTuple):
    """An input or output; `data` is in Triton's binary format."""

    name: str
    datatype: str
    shape: Sequence[int]
    data: bytes

    @classmethod
    def from_texts(cls, name: str, texts: Sequence[Row], shape: Sequence[int] | None = None) -> Tensor:
        """Build a BYTES tensor; the shape is [number of texts] unless it is given."""
        encoded = [_encoded(text) for text in texts]
        data = b"".join([part for text in encoded for part in (len(text).to_bytes(4, "little"), text)])
        return cls(name, "BYTES", shape or [len(encoded)], data)

    @classmethod
    def from_values(cls, name: str, datatype: str, values: Any) -> Tensor:
        """Build a tensor of numbers, of the shape of the values."""
        array = np.asarray(values, DTYPES[datatype])
        return cls(name, datatype, list(array.shape), array.tobytes())

    def array(self) -> npt.NDArray[Any]:
        return np.frombuffer(self.data, DTYPES[self.datatype]).reshape(self.shape)

    def texts(self) -> list[str]:
        """Return the elements of a BYTES tensor. Replace what is not UTF-8."""
        texts, start = [], 0
        for _ in range(math.prod(self.shape)):
            end = start + 4 + int.from_bytes(self.data[start : start + 4], "little")
            texts.append(self.data[start + 4 : end].decode(errors="replace"))
            start = end
        return texts


def _encoded(row: Row) -> bytes:
    if isinstance(row, bytes):
        return row
    return row.encode() if isinstance(row, str) else TOKEN_IDS + np.asarray(row, "<i4").tobytes()
