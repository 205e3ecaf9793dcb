"""Cuts rows of unequal length into tight runs that keep all workers busy.

Padding a batch to its longest row costs more than batching gains, and one run per row pays the fixed cost of a run each
time. Dynamic programming over costs that were measured on this machine finds the cheapest cut between the two.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, overload

import numpy as np

from serving.triton.types import Array, ConfigError

# A run without padding has at least so many rows if as many wait, and at most so many tokens.
FLAT_ROWS, MAXIMUM_TOKENS = 16, 2**17
# A run twice as large is worthwhile if a token takes at most this share of its time in the smaller run.
WORTHWHILE = 0.95
# Each size is timed so many times, but no more often once that took these seconds. The fastest time counts, because the
# first run is slower.
FEWEST_TIMED, MOST_TIMED, TIMING_S = 2, 4, 0.3
# With its padding, a run has at most so many times its tokens.
PADDING = 2


class Cost(Protocol):
    """Returns the seconds of a run, for several numbers of rows at once, all padded to one length.

    `tokens`: those of the rows without padding, if only attention computes it.
    """

    def __call__(self, rows: Array, length: int, tokens: Array | None = None, /) -> Array: ...


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
    def __call__(self, rows: Array, length: int | Array, tokens: Array | None = None) -> Array: ...
    def __call__(self, rows: int | Array, length: int | Array, tokens: Array | None = None) -> float | Array:
        own = rows * length if tokens is None else tokens
        return self.per_run + own * (self.per_token + self.per_token2 * own) + self.per_pair * rows * length * length

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
        accepted = list(dict.fromkeys((min(rows, max_rows), length) for rows, length in shapes))
        best: dict[tuple[int, int], float] = {}
        for turn in range(4):
            for shape in list(accepted):
                if turn > 1 and math.prod(shape) > 256:
                    continue
                try:
                    seconds = seconds_of(*shape)
                except Exception as error:
                    last_error = error
                    accepted.remove(shape)
                    continue
                if turn:
                    best[shape] = min(seconds, best.get(shape, math.inf))
        measured = [(rows, length, seconds) for (rows, length), seconds in best.items()]
        if not measured:
            raise ConfigError(f"the model failed on every test input: {last_error}")
        return cls.fit(measured)

    @classmethod
    def measure_flat(cls, seconds_of: Callable[[int, int], float], length: int) -> tuple[RunCost, int]:
        """Time ever larger runs without padding. Return the cost, and the tokens of the largest that is worthwhile.

        A run is worthwhile if it computes more tokens per second than half of it, and fits into the memory.
        """

        def fastest(rows: int) -> float:
            timed: list[float] = []
            while len(timed) < FEWEST_TIMED or (len(timed) < MOST_TIMED and sum(timed) < TIMING_S):
                timed.append(seconds_of(rows, length))
            return min(timed)

        alone, rows = fastest(1), FLAT_ROWS
        seconds = fastest(rows)
        while 2 * rows * length <= MAXIMUM_TOKENS:
            try:
                twice = fastest(2 * rows)
            except Exception:
                break
            if twice > 2 * seconds * WORTHWHILE:
                break
            rows, seconds = 2 * rows, twice
        per_token = seconds / (rows * length)
        return cls(max(0.0, alone - length * per_token), per_token), rows * length


def cheapest_cut(lengths: Array, cost: Cost, skips_padding: bool = False) -> list[tuple[int, int]]:
    """Cut ascending `lengths` into consecutive runs [start, end) of minimum total cost."""
    return _cheapest(_seconds_of_runs(lengths, cost, skips_padding))


def spread_cut(lengths: Array, cost: Cost, workers: int, skips_padding: bool = False) -> list[tuple[int, int]]:
    """Cut ascending `lengths` so that all workers together end early, and return the run that takes longest first.

    Runs of minimum total cost are few, and would leave workers idle, so long ones are split further. If that cut is one
    run, and there are fewer rows than workers, it stays whole: a run that is alone may use all threads.
    """
    seconds = _seconds_of_runs(lengths, cost, skips_padding)
    runs = accepted = {run: float(seconds[run[1] - 1][run[0]]) for run in _cheapest(seconds)}
    if workers > 1 and (len(runs) > 1 or len(lengths) >= workers):
        ends = last_ends(runs, workers)
        earliest = ends[0]
        while divisible := [run for run in runs if run[1] - run[0] > 1]:
            start, end = longest = max(divisible, key=runs.__getitem__)
            others = {run: time for run, time in runs.items() if run != longest}
            splits = [
                others | {(start, cut): float(seconds[cut - 1][start]), (cut, end): float(seconds[end - 1][cut])}
                for cut in range(start + 1, end)
            ]
            ends_of_splits = [last_ends(split, workers) for split in splits]
            if min(ends_of_splits) >= ends:
                break
            ends = min(ends_of_splits)
            runs = splits[ends_of_splits.index(ends)]
            # More splits may follow before the last run ends earlier. Then more time must be saved than spent.
            if workers * (earliest - ends[0]) > sum(runs.values()) - sum(accepted.values()):
                accepted, earliest = runs, ends[0]
    return sorted(accepted, key=accepted.__getitem__, reverse=True)


def last_ends(runs: dict[tuple[int, int], float], workers: int) -> list[float]:
    """Return when each worker ends, the last one first, if each takes the longest run that is left."""
    ends = [0.0] * workers
    for seconds in sorted(runs.values(), reverse=True):
        heapq.heapreplace(ends, ends[0] + seconds)
    return sorted(ends, reverse=True)


def _seconds_of_runs(lengths: Array, cost: Cost, skips_padding: bool) -> list[Array]:
    """Return the seconds of every run: that of the rows [start, end) is at [end - 1][start]."""
    shapes = [(np.arange(end, 0, -1), int(lengths[end - 1])) for end in range(1, len(lengths) + 1)]
    if not skips_padding:
        return [cost(rows, length) for rows, length in shapes]
    after = np.cumsum(lengths)
    before = after - lengths
    seconds = []
    for end, (rows, length) in enumerate(shapes, 1):
        tokens = after[end - 1] - before[:end]
        seconds.append(np.where(rows * length > PADDING * tokens, np.inf, cost(rows, length, tokens)))
    return seconds


def _cheapest(seconds: list[Array]) -> list[tuple[int, int]]:
    count = len(seconds)
    best = np.zeros(count + 1)
    start_of = np.zeros(count + 1, int)
    for end in range(1, count + 1):
        totals = best[:end] + seconds[end - 1]
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


def flat_cut(lengths: Array, tokens: int) -> list[tuple[int, int]]:
    """Cut ascending `lengths`, the longest first, into runs [start, end) of at most so many tokens, or of one row."""
    totals = np.concatenate([[0], np.cumsum(lengths)])
    runs, end = [], len(lengths)
    while end:
        start = int(np.searchsorted(totals, totals[end] - tokens))
        start = min(end - 1, max(start, end - PADDING * tokens // int(lengths[end - 1])))
        runs.append((start, end))
        end = start
    return runs


def row_lengths(mask: Array) -> Array:
    """Return each row's columns up to the last one that the mask lets through; the rest need not run.

    An entirely masked row keeps its width, because it has a result too.
    """
    lengths: Array = mask.shape[1] - (mask[:, ::-1] != 0).argmax(axis=1)
    return lengths
