"""Runs the rows of many requests as planned, and scatters the results back."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from serving.encoders.plan import Plan, PlannedRun, Run
from serving.triton import tracing
from serving.triton.types import Array, Tensors


@dataclass(frozen=True)
class TokenRequest:
    """One request: its token tensors [rows, width], each row's length without padding, and the requested outputs."""

    tokens: Tensors
    lengths: Array
    width: int
    outputs: list[str]
    traced: tracing.Traced | None = None
    others: Tensors = field(default_factory=dict)  # outputs that need no run
    finish: Callable[[Tensors], Tensors] = lambda outputs: outputs  # makes the requested outputs of the encoder's


class TimedRun(NamedTuple):
    """A run of these rows: when packing began, the model, the scattering of its results, and when that ended."""

    start_ns: int
    model_ns: int
    scatter_ns: int
    end_ns: int
    rows: Array


@dataclass
class Runs:
    """Runs rows of any requests as an encoder's plan says, on its workers."""

    plan: Plan
    pad_values: dict[str, int]  # input -> the value of its padding; that of the others is 0
    count: Callable[..., None]  # adds to the counters of the model

    def run_rows(self, rows: list[tuple[TokenRequest, int]]) -> list[dict[str, Array]]:
        """Pack these rows into runs, and return the outputs of each."""
        encoder = self.plan.encoder
        lengths = np.array([texts.lengths[row] for texts, row in rows])
        outputs = sorted({name for texts, _ in rows for name in texts.outputs})
        results: list[dict[str, Array]] = [{} for _ in rows]
        timed: list[TimedRun] = []

        def run(planned: PlannedRun, call: Run = encoder.run) -> None:
            start = time.time_ns()
            feed = self.feed([rows[i] for i in planned.rows], *planned.shape)
            fed = time.time_ns()
            arrays = call(outputs, feed)
            computed = time.time_ns()
            for name, array in zip(outputs, arrays, strict=True):
                for i, result in zip(planned.rows, array[: len(planned.rows)], strict=True):
                    results[i][name] = result
            timed.append(TimedRun(start, fed, computed, time.time_ns(), planned.rows))

        runs = self.plan.runs(lengths)
        if len(runs) == 1:
            # Run in this thread: the way to another one and back would take longer than some runs.
            run(runs[0], encoder.run_alone or encoder.run)
        else:
            list(self.plan.workers.map(run, runs))
        if tracing.sender:
            for steps in traced_steps(timed, [texts.traced for texts, _ in rows], lengths):
                tracing.sender.add(*steps)
        tokens = int(lengths.sum())
        is_unpadded = encoder.is_flat or encoder.skips_padding
        padded = tokens if is_unpadded else sum(math.prod(planned.shape) for planned in runs)
        self.count(tokens=tokens, padding_tokens=padded - tokens, runs=len(runs))
        return results

    def feed(self, rows: list[tuple[TokenRequest, int]], count: int, length: int) -> Tensors:
        """Return the inputs of one run: these rows, padded to `count` rows of `length` tokens."""
        feed: Tensors = {
            name: np.full((count, length), self.pad_values.get(name, 0), dtype)
            for name, dtype in self.plan.encoder.inputs.items()
        }
        for i, (texts, row) in enumerate(rows):
            end = texts.lengths[row]
            for name, array in texts.tokens.items():
                feed[name][i, :end] = array[row, :end]
        return feed


def traced_steps(
    runs: list[TimedRun], traced: list[tracing.Traced | None], lengths: Array
) -> Iterator[tuple[tracing.Step, ...]]:
    """Yield the steps of each run. `traced` and `lengths` have an entry for each row of the execution."""
    ahead: Counter[tracing.Traced] = Counter()
    longest_ahead = 0
    for number, run in enumerate(sorted(runs, key=lambda run: run.start_ns)):
        tokens: Counter[tracing.Traced] = Counter()
        for row in run.rows:
            if request := traced[row]:
                tokens[request] += int(lengths[row])
        longest = int(lengths[run.rows[-1]])
        before = {"runs_ahead": number, "longest_ahead": longest_ahead}
        together = {"rows": len(run.rows), "longest": longest}
        yield (
            tracing.Step("wait", None, run.start_ns, tokens, ahead.copy(), before),
            tracing.Step("pack", run.start_ns, run.model_ns, tokens),
            tracing.Step("run", run.model_ns, run.scatter_ns, tokens, tokens, together),
            tracing.Step("scatter", run.scatter_ns, run.end_ns, tokens),
        )
        ahead += tokens
        longest_ahead = max(longest_ahead, longest)
