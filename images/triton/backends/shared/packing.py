"""Rows of unequal length in few, tight runs.

Padding a batch to its longest row costs more than batching gains; one run per row costs the fixed price of a run each
time. Between the two lies a cheapest cut of the length-sorted rows, found here by dynamic programming over what runs
were measured to cost on this machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shared.errors import ConfigError


@dataclass(frozen=True)
class RunCost:
    """Seconds of one run of `rows` rows padded to `length`, as a sum of terms fitted to measured runs.

    per_run: what a run costs whatever is in it. per_token: the matrix products. per_pair: attention (tokens x length).
    per_token2: what a large run loses once its activations leave the cache.
    """

    per_run: float
    per_token: float
    per_pair: float = 0.0
    per_token2: float = 0.0

    def __call__(self, rows, length):
        tokens = rows * length
        return self.per_run + tokens * (self.per_token + self.per_pair * length + self.per_token2 * tokens)

    @classmethod
    def fit(cls, measured: list[tuple[int, int, float]]) -> RunCost:
        """Least squares on the relative error; a term that comes out negative is noise and is left out."""
        rows, length, seconds = (np.array(column, float) for column in zip(*measured, strict=True))
        tokens = rows * length
        terms = np.stack([np.ones_like(tokens), tokens, tokens * length, tokens**2]) / seconds
        kept = list(range(len(terms)))
        while True:
            found, *_ = np.linalg.lstsq(terms[kept].T, np.ones_like(tokens), rcond=None)
            if found.min() >= 0:
                break
            kept.pop(int(found.argmin()))
        coefficients = np.zeros(len(terms))
        coefficients[kept] = found
        return cls(*coefficients.tolist())

    @classmethod
    def measure(cls, seconds_of: Callable[[int, int], float], max_rows: int) -> RunCost:
        """Time runs of a few shapes; the best of several is the run that nothing else disturbed.

        Under a second in all, for it is part of every load. A shape the model refuses (longer than its positions
        reach) tells nothing and is passed over.
        """
        measured = []
        for rows, length in ((1, 16), (1, 8), (1, 32), (8, 16), (1, 256), (16, 32), (32, 32)):
            rows = min(rows, max_rows)
            times = 3 if rows * length <= 256 else 1
            try:
                measured.append((rows, length, min(seconds_of(rows, length) for _ in range(times))))
            except Exception as error:
                refused = error
        if not measured:
            raise ConfigError(f"the model ran on no input at all: {refused}")
        return cls.fit(measured)


def cheapest_cut(lengths: np.ndarray, cost: RunCost) -> list[tuple[int, int]]:
    """Cut ascending `lengths` into consecutive runs [start, end) whose total cost is least."""
    count = len(lengths)
    best = np.zeros(count + 1)
    start_of = np.zeros(count + 1, int)
    for end in range(1, count + 1):
        totals = best[:end] + cost(np.arange(end, 0, -1), int(lengths[end - 1]))
        start_of[end] = totals.argmin()
        best[end] = totals[start_of[end]]
    runs = []
    end = count
    while end:
        runs.append((int(start_of[end]), end))
        end = int(start_of[end])
    return runs[::-1]


def row_lengths(mask: np.ndarray) -> np.ndarray:
    """Columns up to the last one each row's mask lets through; what is to the right of it need not be run.

    An entirely masked row keeps its width: it has an answer too.
    """
    return mask.shape[1] - (mask[:, ::-1] != 0).argmax(axis=1)
