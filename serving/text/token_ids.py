"""Token ids in place of texts: how a request sends them, and the output that turns texts into ids and ids into texts.

Each row of a text input may be token ids instead: the byte FF, which no text in UTF-8 has, and then each id as a
little-endian INT32. The model reads exactly these ids, without special tokens or a prompt around them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from serving.triton import responses
from serving.triton.types import Array, BadRequest

MARK = b"\xff"


class TokenIds(list[int]):
    """The tokens of one row."""


def read_rows(request: pb_utils.InferenceRequest, name: str, noun: str = "row") -> list[str | TokenIds]:
    """Return the rows of an input: texts, or token ids. Error messages call a row `noun`."""
    rows: list[str | TokenIds] = []
    for number, value in enumerate(responses.input_tensor(request, name).ravel()):
        if value.startswith(MARK) and len(value) > 1 and len(value) % 4 == 1:
            rows.append(TokenIds(np.frombuffer(value, "<i4", offset=1).tolist()))
        else:
            rows.append(responses.text(value, name, number, noun))
    return rows


def check_ids(ids: TokenIds, vocabulary: int, name: str, row: int) -> None:
    """Raise BadRequest for an id that the model has no token for."""
    if unknown := [id for id in ids if not 0 <= id < vocabulary]:
        raise BadRequest(
            f"input '{name}': row {row} has the token id {unknown[0]}; this model's ids are 0 to {vocabulary - 1}: "
            "send texts, or ids of the model's own tokenizer",
            name,
        )


# The ids of a text, and the characters [start, end) of each token that is not special; None where they are unknown.
EncodedText = tuple[list[int], list[tuple[int, int]] | None]


def special_tokens(encode: Callable[[str, bool], EncodedText]) -> tuple[int, int]:
    """Return how many special tokens come before and after a text. `encode` gets the text, and whether to add them."""
    text = "a"
    (own, _), (every, _) = encode(text, False), encode(text, True)
    before = next((n for n in range(len(every)) if own and every[n : n + len(own)] == own), 0)
    return before, len(every) - len(own) - before


def tokenized(
    rows: Sequence[str | TokenIds],
    encode: Callable[[str, bool], EncodedText],
    decode: Callable[[TokenIds, bool], str],
    max_length: int | None,
) -> Array:
    """Return the rows in the other form. `decode` gets ids, and whether to skip the special ones."""
    special = special_tokens(encode)

    def other_form(row: str | TokenIds) -> dict[str, Any]:
        if isinstance(row, TokenIds):
            return {"text": decode(row, False), "plain_text": decode(row, True)}
        ids, offsets = encode(row, True)
        form: dict[str, Any] = {"ids": ids, "special": special, "max_length": max_length}
        if offsets is None:
            return form
        marks = ids[: special[0]] + ids[len(ids) - special[1] :]
        return form | {"offsets": offsets, "special_texts": [decode(TokenIds([id]), False) for id in marks]}

    return np.array([json.dumps(other_form(row)).encode() for row in rows], np.object_)
