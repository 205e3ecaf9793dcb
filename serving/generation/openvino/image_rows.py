"""The operation with which a graph of OpenVINO reads the embeddings of images that this process holds.

Each token of a chat up to its last image gets a number beyond the vocabulary. The table has the row of the number: the
token, its embedding if it is one of an image, and its place in the three axes of Qwen's positions. Chats with other
images have other numbers, so that the prefix cache, which knows texts by their numbers, keeps them apart.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from openvino import Op, PartialShape, Type

from serving.triton.types import Array

NOWHERE = -1  # of a token whose place is its position in the text
AXES = 3
FIRST, LAST = 2**24, 2**31 - 1  # the numbers; no vocabulary is as large, and OpenVINO computes with 32 bits
KNOWN = 10_000  # chats whose numbers are kept for the prefix cache


@dataclass(eq=False)
class Rows:
    """The rows of a prompt up to its last image."""

    tokens: Array  # [rows]
    embeddings: Array  # [rows, width]; the last column is 1 for the rows of images
    places: Array  # [AXES, rows]
    start: int = 0  # the number of the first row

    def numbered(self, tokens: list[int]) -> list[int]:
        """Return the prompt with the numbers of the rows."""
        count = len(self.tokens)
        return [*range(self.start, self.start + count), *tokens[count:]]


class Table:
    """The rows that prompts use, by their first numbers. Threads may share it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.rows: WeakValueDictionary[int, Rows] = WeakValueDictionary()
        self.starts: OrderedDict[bytes, int] = OrderedDict()
        self.next = FIRST

    def find(self, content: bytes) -> Rows | None:
        """Return the rows of this content if a prompt uses them."""
        with self.lock:
            return self.rows.get(self.starts.get(content, 0))

    def add(self, content: bytes, rows: Rows) -> Rows:
        """Give the rows the numbers of their content. Return those that a prompt uses already."""
        count = len(rows.tokens)
        with self.lock:
            if self.next + count > LAST:  # the prefix cache has long lost the first ones
                self.next = FIRST
                self.starts.clear()
            if content not in self.starts:
                self.starts[content], self.next = self.next, self.next + count
                if len(self.starts) > KNOWN:
                    self.starts.popitem(last=False)
            self.starts.move_to_end(content)
            rows.start = self.starts[content]
            return self.rows.setdefault(rows.start, rows)

    def look_up(self, numbers: Array, tokens: Array, embeddings: Array, places: Array) -> None:
        """Fill the rows of the numbers. Numbers of the vocabulary stay as they are."""
        is_token = numbers < FIRST
        tokens[:] = np.where(is_token, numbers, 0)
        embeddings[:] = 0
        places[:] = NOWHERE
        if is_token.all():
            return
        with self.lock:
            blocks = list(self.rows.items())
        for start, rows in blocks:
            found = np.flatnonzero((numbers >= start) & (numbers < start + len(rows.tokens)))
            own = numbers[found] - start
            tokens[found], embeddings[found], places[:, found] = (
                rows.tokens[own],
                rows.embeddings[own],
                rows.places[:, own],
            )


TABLE = Table()


class ImageRows(Op):
    """Turns numbers [texts, length] into tokens, embeddings and places. The second input has the width."""

    def __init__(self, inputs: Any = None) -> None:
        super().__init__(self, inputs)

    def validate_and_infer_types(self) -> None:
        shape, (width,) = [*self.get_input_partial_shape(0)], self.get_input_partial_shape(1)
        self.set_output_size(3)
        self.set_output_type(0, Type.i32, PartialShape(shape))
        self.set_output_type(1, Type.f32, PartialShape([*shape, width]))
        self.set_output_type(2, Type.i32, PartialShape([AXES, *shape]))

    def clone_with_new_inputs(self, new_inputs: Any) -> ImageRows:
        return ImageRows(new_inputs)

    def evaluate(self, outputs: Any, inputs: Any) -> bool:
        numbers, (width,) = inputs[0].data, inputs[1].shape
        for output, shape in zip(
            outputs, (numbers.shape, (*numbers.shape, width), (AXES, *numbers.shape)), strict=True
        ):
            output.shape = shape
        tokens, embeddings, places = (output.data for output in outputs)
        TABLE.look_up(numbers.ravel(), tokens.reshape(-1), embeddings.reshape(-1, width), places.reshape(AXES, -1))
        return True

    def has_evaluate(self) -> bool:
        return True
