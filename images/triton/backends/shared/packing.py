"""Cuts rows of unequal length into few, tight runs.

Padding a batch to its longest row costs more than batching gains, and one run per row pays the fixed cost of a run each
time. Dynamic programming over costs that were measured on this machine finds the cheapest cut between the two.
"""

from __future__ import annotations

import heapq
import math
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

        Every load pays for this, so it takes about a second. Each run has another shape than the one before, as when
        serving, because that takes OpenVINO a millisecond more. The first run of a shape, for which it generates code,
        does not count. A shape that the model refuses (longer than its positions) is skipped.
        """
        shapes = ((1, 16), (1, 8), (1, 32), (8, 16), (1, 256), (16, 32), (32, 32))
        best: dict[tuple[int, int], float] = {}
        for turn in range(4):
            for rows, length in [(min(rows, max_rows), length) for rows, length in shapes]:
                if turn > 1 and rows * length > 256:
                    continue
                try:
                    seconds = seconds_of(rows, length)
                except Exception as error:
                    last_error = error
                    continue
                if turn:
                    best[rows, length] = min(seconds, best.get((rows, length), math.inf))
        measured = [(rows, length, seconds) for (rows, length), seconds in best.items()]
        if not measured:
            raise ConfigError(f"the model failed on every test input: {last_error}")
        return cls.fit(measured)


def cheapest_cut(lengths: Array, cost: Cost, workers: int = 1) -> list[tuple[int, int]]:
    """Cut ascending `lengths` into consecutive runs [start, end) of minimum total cost, spread over the workers."""
    count = len(lengths)
    best = np.zeros(count + 1)
    start_of = np.zeros(count + 1, int)
    seconds = [cost(np.arange(end, 0, -1), int(lengths[end - 1])) for end in range(1, count + 1)]  # [end - 1][start]
    for end in range(1, count + 1):
        totals = best[:end] + seconds[end - 1]
        start_of[end] = totals.argmin()
        best[end] = totals[start_of[end]]
    runs = []
    end = count
    while end:
        runs.append((int(start_of[end]), end))
        end = int(start_of[end])
    return spread(runs, seconds, workers)


def spread(runs: list[tuple[int, int]], seconds: list[Array], workers: int) -> list[tuple[int, int]]:
    """Split the longest runs as long as all workers together then end earlier. `seconds`: [end - 1][start] of each run.

    Runs of minimum total cost are few, and would leave workers idle. But fewer rows than workers that go well together
    stay one run, because that run has all threads to itself.
    """
    kept = taken = {(start, end): float(seconds[end - 1][start]) for start, end in runs}
    if workers > 1 and (len(runs) > 1 or len(seconds) >= workers):
        ends = last_ends(taken, workers)
        earliest = ends[0]
        while True:
            start, end = max(taken, key=taken.__getitem__)
            others = {run: time for run, time in taken.items() if run != (start, end)}
            splits = [
                others | {(start, cut): float(seconds[cut - 1][start]), (cut, end): float(seconds[end - 1][cut])}
                for cut in range(start + 1, end)
            ]
            taken = min(splits, key=lambda runs: last_ends(runs, workers), default=taken)
            if last_ends(taken, workers) >= ends:
                break
            ends = last_ends(taken, workers)
            # More splits may follow before the last run ends earlier. Then more time must be saved than spent.
            if workers * (earliest - ends[0]) > sum(taken.values()) - sum(kept.values()):
                kept, earliest = taken, ends[0]
    return sorted(kept)


def last_ends(runs: dict[tuple[int, int], float], workers: int) -> list[float]:
    """Return when each worker ends, the last one first, if each takes the longest run that is left."""
    ends = [0.0] * workers
    for taken in sorted(runs.values(), reverse=True):
        heapq.heapreplace(ends, ends[0] + taken)
    return sorted(ends, reverse=True)


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
