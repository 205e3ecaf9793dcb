"""Make the requests of rows, and compare their answers with those of the library."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image

from tests.conformance.tasks.references import SPARSE, Answer, SparseVector
from tests.conformance.tasks.rows import Columns

Tensors = dict[str, np.ndarray]
PADDING = (0, -1, b"")


def tensors(columns: Columns) -> Tensors:
    """Return the tensors of a request. Images are sent as pixels, or as files."""
    forms = {"image": lambda images: np.stack(images).astype(np.float32), "image_bytes": files, "spans": padded}
    return {name: forms.get(name, texts)(values) for name, values in columns.items()}


def texts(values: Sequence[str]) -> np.ndarray:
    return np.array([[value.encode()] for value in values], np.object_)


def files(images: Sequence[np.ndarray | bytes]) -> np.ndarray:
    return np.array([[image if isinstance(image, bytes) else png(image)] for image in images], np.object_)


def padded(spans: Sequence[Any]) -> np.ndarray:
    """Return the spans of texts, in which -1 is none."""
    longest = max(map(len, spans))
    return np.array([[*own, *[(-1, -1)] * (longest - len(own))] for own in spans])


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def single(columns: Columns) -> list[Columns]:
    """Return a request for each row."""
    rows = zip(*columns.values(), strict=True)
    return [{name: [value] for name, value in zip(columns, row, strict=True)} for row in rows]


def expect(answer: Callable[..., Answer], columns: Columns) -> list[Answer]:
    """Return the library's answer to each row."""
    rows = single(columns)
    return [answer(**{name.removesuffix("_bytes"): value for name, (value,) in row.items()}) for row in rows]


def check(given: Tensors, expected: Sequence[Answer]) -> None:
    """Fail unless the outputs of each row are the library's, followed by nothing but padding."""
    for row, own in enumerate(expected):
        assert "score" in own or "score" not in given
        for name, value in own.items():
            if name == SPARSE:
                value, served = value.vector, vector_of_words(given, row, value)
            else:
                served = given[name][row]
            compare(served, np.asarray(value), f"row {row}: {name}")


def compare(served: np.ndarray, own: np.ndarray, where: str) -> None:
    if own.dtype.kind in "US":
        assert [text.decode() for text in served[: len(own)]] == own.tolist(), where
    elif len(own):
        np.testing.assert_allclose(served[: len(own)], own, atol=1e-5, rtol=1e-4, err_msg=where)
    assert all(value in PADDING for value in served[len(own) :].ravel().tolist()), where


def vector_of_words(given: Tensors, row: int, expected: SparseVector) -> np.ndarray:
    """Return the whole vector of a row's words, which come by their weights."""
    is_word = given["token_id"][row] >= 0
    ids, weights = given["token_id"][row][is_word], given["weight"][row][is_word]
    assert (np.diff(weights) <= 0).all()
    assert [token.decode() for token in given["token"][row][is_word]] == [expected.words[id] for id in ids]
    vector = np.zeros_like(expected.vector)
    vector[ids] = weights
    return vector


def differ(expected: Sequence[Answer]) -> bool:
    """Return whether some output has other numbers in another row: otherwise a constant would pass."""
    values: dict[str, list[float]] = {}
    for own in expected:
        for name, value in own.items():
            value = value.vector if name == SPARSE else value
            if np.asarray(value).dtype.kind == "f" and np.size(value):
                values.setdefault(name, []).append(float(np.abs(value).sum()))
    return max(np.ptp(own) for own in values.values()) > 1e-3
