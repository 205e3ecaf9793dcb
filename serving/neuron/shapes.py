"""Chooses the cheapest of the shapes that a model was compiled for."""

from __future__ import annotations

import numpy as np

from serving.triton.types import BadRequest


class Shapes:
    """Compiled shapes (rows, length) with the seconds that a run of each takes."""

    def __init__(self, seconds: dict[tuple[int, int], float]) -> None:
        self.lengths = sorted({length for _, length in seconds})
        self.rows = max(rows for rows, _ in seconds)
        # length -> the cheapest shape for each number of rows; the last entry is for more rows than any shape takes.
        self.cheapest = {
            length: [
                min(
                    ((cost, shape) for shape, cost in seconds.items() if shape[0] >= rows and shape[1] >= length),
                    default=(np.inf, (rows, length)),
                )
                for rows in range(self.rows + 2)
            ]
            for length in self.lengths
        }
        self.costs = {length: np.array([cost for cost, _ in shapes]) for length, shapes in self.cheapest.items()}

    def cost(self, rows: np.ndarray, length: int, tokens: np.ndarray | None = None) -> np.ndarray:
        return self.costs[self.compiled_length(length)][np.minimum(rows, self.rows + 1)]

    def shape(self, rows: int, length: int) -> tuple[int, int]:
        return self.cheapest[self.compiled_length(length)][rows][1]

    def compiled_length(self, length: int) -> int:
        """Return the smallest compiled length that is long enough."""
        for compiled in self.lengths:
            if compiled >= length:
                return compiled
        raise BadRequest(f"a text has {length} tokens, and the model was compiled for {self.lengths[-1]} at most")
