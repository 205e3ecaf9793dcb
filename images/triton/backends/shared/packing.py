"""Cuts rows of unequal length into few, tight runs.

Padding a batch to its longest row costs more than batching gains, and one run per row pays the fixed cost of a run each
time. Dynamic programming over costs that were measured on this machine finds the cheapest cut between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import overload

import numpy as np

from shared.errors import ConfigError
from shared.types import Array

# Seconds of a run, for several numbers of rows at once, all padded to one length.
Cost = Callable[[Array, int], Array]


@dataclass(frozen=True)
class RunCost:
    """Seconds of one run of `rows` rows padded to `length`, as a sum of terms fitted to measured runs.

    per_run: fixed cost of a run. per_token: matrix products. per_pair: attention (tokens x length).
    per_token2: what a large run loses once its activations no longer fit into the cache.
    """

    per_run: float
    per_token: float
    per_pair: float = 0.0
    per_token2: float = 0.0

    @overload
    def __call__(self, rows: int, length: int) -> float: ...
    @overload
    def __call__(self, rows: Array, length: int | Array) -> Array: ...
    def __call__(self, rows: int | Array, length: int | Array) -> float | Array:
        tokens = rows * length
        return self.per_run + tokens * (self.per_token + self.per_pair * length + self.per_token2 * tokens)

    @classmethod
    def fit(cls, measured: list[tuple[int, int, float]]) -> RunCost:
        """Fit by least squares on the relative error, without terms that come out negative: those are noise."""
        rows, length, seconds = (np.array(column, float) for column in zip(*measured, strict=True))
        tokens = rows * length
        terms = np.stack([np.ones_like(tokens), tokens, tokens * length, tokens**2]) / seconds
        kept = list(range(len(terms)))
        while True:
            solution, *_ = np.linalg.lstsq(terms[kept].T, np.ones_like(tokens), rcond=None)
            if solution.min() >= 0:
                break
            kept.pop(int(solution.argmin()))
        coefficients = np.zeros(len(terms))
        coefficients[kept] = solution
        return cls(*coefficients.tolist())

    @classmethod
    def measure(cls, seconds_of: Callable[[int, int], float], max_rows: int) -> RunCost:
        """Fit to timed runs of a few shapes; the best of several is the run that nothing else disturbed.

        Every load pays for this, so it takes about a second. The first run of a shape, for which OpenVINO generates
        code, does not count. A shape that the model refuses (longer than its positions) is skipped.
        """
        measured = []
        for rows, length in ((1, 16), (1, 8), (1, 32), (8, 16), (1, 256), (16, 32), (32, 32)):
            rows = min(rows, max_rows)
            times = 3 if rows * length <= 256 else 1
            try:
                seconds_of(rows, length)
                measured.append((rows, length, min(seconds_of(rows, length) for _ in range(times))))
            except Exception as error:
                last_error = error
        if not measured:
            raise ConfigError(f"the model failed on every test input: {last_error}")
        return cls.fit(measured)


def cheapest_cut(lengths: Array, cost: Cost) -> list[tuple[int, int]]:
    """Cut ascending `lengths` into consecutive runs [start, end) of minimum total cost."""
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


def equal_lengths(lengths: Array) -> list[tuple[int, int]]:
    """Cut ascending `lengths` into runs [start, end) of rows of one length, which need no padding."""
    ends = [*(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(lengths)] if len(lengths) else []
    return list(zip([0, *ends][:-1], ends, strict=True))


def row_lengths(mask: Array) -> Array:
    """Return each row's columns up to the last one that the mask lets through; the rest need not run.

    An entirely masked row keeps its width, because it has a result too.
    """
    lengths: Array = mask.shape[1] - (mask[:, ::-1] != 0).argmax(axis=1)
    return lengths
