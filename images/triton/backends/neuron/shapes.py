"""Which of the shapes that a model was compiled for a run takes."""

from __future__ import annotations

import numpy as np

from shared.errors import BadRequest


class Shapes:
    """By what a run of each costs: the cheapest that the rows and the longest text fit into."""

    def __init__(self, seconds: dict[tuple[int, int], float]) -> None:
        self.lengths = sorted({length for _, length in seconds})
        self.rows = max(rows for rows, _ in seconds)
        # By length and number of rows. The last: more rows than any shape takes.
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
        self.costs = {length: np.array([cost for cost, _ in found]) for length, found in self.cheapest.items()}

    def cost(self, rows: np.ndarray, length: int) -> np.ndarray:
        return self.costs[self.compiled(length)][np.minimum(rows, self.rows + 1)]

    def shape(self, rows: int, length: int) -> tuple[int, int]:
        return self.cheapest[self.compiled(length)][rows][1]

    def compiled(self, length: int) -> int:
        """The shortest that there is for texts of so many tokens."""
        for each in self.lengths:
            if each >= length:
                return each
        raise BadRequest(f"a text has {length} tokens, and the model was compiled for {self.lengths[-1]} at most")
