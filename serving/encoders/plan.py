"""Plans the runs of a text encoder: measures what a run costs, and cuts rows into the cheapest set of runs."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from serving.engines.measurements import Measured, recall_or_measure
from serving.engines.packing import MAXIMUM_TOKENS, Cost, RunCost, cheapest_cut, equal_lengths, flat_cut, spread_cut
from serving.triton.types import Array, InstanceArgs, ModelConfig, Tensors

# Increase it when a new version of this project may measure another cost.
COST_VERSION = 3
SHORT = 16  # tokens

Run = Callable[[list[str], Tensors], list[Array]]


@dataclass(frozen=True)
class Encoder:
    """A model that takes token tensors [rows, length]."""

    inputs: dict[str, type]  # name -> numpy type; an input that requests lack is fed zeros
    outputs: list[str]
    per_token: set[str]  # the outputs that have a vector for each token
    run: Run
    run_alone: Run | None = None  # what runs while nothing else does; None: `run`
    parallel_runs: int = 1
    independent_runs: int | None = None  # as many of them as do not slow each other down; None: all
    cost: Cost | None = None  # None: measure it when the model is loaded
    # What a measured cost depends on; None: measure it at each load.
    cost_depends_on: Callable[[], Measured] | None = None
    # The shape that a run of (rows, length) is padded to, for models that take only some shapes.
    shape: Callable[[int, int], tuple[int, int]] = lambda rows, length: (rows, length)
    short: int = SHORT  # tokens of a short text, which the model accepts
    # Pad runs of several rows to a multiple of this, for engines whose first run of a shape is slow.
    length_step: int = 1
    is_flat: bool = False  # a run costs its tokens, whatever their texts' lengths
    rounds_alone: bool = False  # pad a run of one row, too
    skips_padding: bool = False  # compute the padding of a run in attention only
    # The layers after the pooling, for the vectors [rows, width] of spans.
    head: Callable[[Array], Array] | None = None


class PlannedRun(NamedTuple):
    """The rows of a run in ascending order of their lengths, and the shape that they are padded to."""

    rows: Array
    shape: tuple[int, int]


class Plan:
    """Knows what the runs of an encoder cost, and cuts rows into runs."""

    def __init__(
        self,
        config: ModelConfig,
        args: InstanceArgs,
        encoder: Encoder,
        pads: bool,
        log: Callable[[str], None],
    ) -> None:
        """Measure what a run costs, unless the encoder knows it. `pads`: runs may pad their rows."""
        self.inputs = [tensor["name"] for tensor in config["input"]]
        self.encoder, self.pads, self.log = encoder, pads, log
        self.workers = ThreadPoolExecutor(encoder.parallel_runs)
        self.maximum_rounded = self.longest_accepted() if encoder.length_step > 1 and pads else 0
        self.tokens_of_run = MAXIMUM_TOKENS  # of a flat one, until it is measured
        self.cost: Cost = encoder.cost or self.measured_cost(config, args)
        self.seconds_alone = lru_cache(lambda length: self.cost(np.array([1]), length))

    def runs(self, lengths: Array) -> list[PlannedRun]:
        """Cut rows of these lengths into runs, and return the run that takes longest first."""
        order = np.argsort(lengths, kind="stable")
        padded_lengths = self.rounded(lengths)
        if self.encoder.is_flat:
            cuts = flat_cut(lengths[order], self.tokens_of_run)
        elif self.pads:
            cuts = spread_cut(
                padded_lengths[order],
                self.cost,
                self.encoder.independent_runs or self.encoder.parallel_runs,
                self.encoder.skips_padding,
            )
        else:
            cuts = equal_lengths(lengths[order])[::-1]
        planned = []
        for start, end in cuts:
            rows = order[start:end]
            is_padded = self.encoder.rounds_alone or len(rows) > 1
            longest = int((padded_lengths if is_padded else lengths)[rows[-1]])
            planned.append(PlannedRun(rows, self.encoder.shape(len(rows), longest)))
        return planned

    def seconds_of_rows(self, lengths: Array) -> Array:
        """Return the seconds that each row adds, in ascending order of their lengths, if no others run with them."""
        if len(lengths) == 1:
            return self.seconds_alone(int(lengths[0]))
        if self.encoder.is_flat and len(lengths) * lengths.max() <= self.tokens_of_run:  # one run
            return np.full(len(lengths), self.cost(lengths.sum(keepdims=True), 1) / len(lengths))
        lengths = np.sort(self.rounded(lengths))
        seconds = np.zeros(len(lengths))
        if self.encoder.is_flat:
            for start, end in flat_cut(lengths, self.tokens_of_run):
                seconds[start:end] = self.cost(lengths[start:end].sum(keepdims=True), 1) / (end - start)
            return seconds
        cuts = cheapest_cut(lengths, self.cost, self.encoder.skips_padding) if self.pads else equal_lengths(lengths)
        for start, end in cuts:
            tokens = lengths[start:end].sum(keepdims=True) if self.encoder.skips_padding else None
            seconds[start:end] = self.cost(np.array([end - start]), int(lengths[end - 1]), tokens) / (end - start)
        return seconds

    def measured_cost(self, config: ModelConfig, args: InstanceArgs) -> RunCost:
        """Return the cost of a run, from the measurement of an earlier load if nothing that it depends on changed."""
        max_rows, depends_on = max(1, config["max_batch_size"]), self.encoder.cost_depends_on
        own = {"measuring": COST_VERSION, "parallel_runs": self.encoder.parallel_runs, "max_rows": max_rows}
        how = "measured before"

        def measure() -> Measured:
            nonlocal how
            how = "measured"
            if self.encoder.is_flat:
                flat, tokens = RunCost.measure_flat(self.seconds_of_run, self.encoder.short)
                return asdict(flat) | {"tokens": tokens}
            return asdict(RunCost.measure(self.seconds_of_run, max_rows))

        if depends_on is None:
            terms = measure()
        else:
            terms = recall_or_measure(
                f"{args['model_name']}-{args['model_version']}-cost",
                lambda: depends_on() | own,
                measure,
                lambda kept: (
                    all(0 <= kept[term.name] < math.inf for term in fields(RunCost))
                    and (not self.encoder.is_flat or kept["tokens"] > 0)
                ),
            )
        self.tokens_of_run = terms.get("tokens", MAXIMUM_TOKENS)
        if how != "measured":
            self.seconds_of_run(1, SHORT)  # the first run of a model takes longer, which no client should notice
        cost = RunCost(*(terms[term.name] for term in fields(RunCost)))
        self.log(
            f"{args['model_instance_name']}: {self.encoder.parallel_runs} run(s) in parallel; a run costs "
            f"{cost.per_run * 1e3:.2f} ms and {cost.per_token * 1e6:.2f} us per token ({how})"
            + (f", for up to {self.tokens_of_run} tokens" if self.encoder.is_flat else "")
        )
        return cost

    def longest_accepted(self) -> int:
        """Return a length that the model accepts: it may not accept the next multiple of `length_step`."""
        for length in (512, 256, 128, 64, 32, 16):
            with contextlib.suppress(Exception):
                self.seconds_of_run(1, length)
                return length
        return 0

    def rounded(self, lengths: Array) -> Array:
        """Return the length to pad each row to: multiples of `length_step`, so that there are fewer shapes."""
        step = self.encoder.length_step
        rounded: Array = np.maximum(lengths, np.minimum(-(-lengths // step) * step, self.maximum_rounded))
        return rounded

    def seconds_of_run(self, rows: int, length: int) -> float:
        """Time a run of this shape while all workers run the same shape."""
        feed: Tensors = {
            name: np.full((rows, length), int(name in self.inputs), dtype)
            for name, dtype in self.encoder.inputs.items()
        }
        start = time.perf_counter()
        list(
            self.workers.map(lambda _: self.encoder.run(self.encoder.outputs, feed), range(self.encoder.parallel_runs))
        )
        return (time.perf_counter() - start) / self.encoder.parallel_runs
