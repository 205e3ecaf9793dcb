"""Requests of unequal length in packed runs: the rows of all requests, sorted by length, in the cheapest set of runs.

What runs is somebody else's: an ONNX graph (backend packed_onnx), a PyTorch module (shared/encoder.py), one that was
compiled for some shapes only (neuron/text.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import triton_python_backend_utils as pb_utils

from shared import serving
from shared.config import parameter
from shared.errors import BadRequest, ConfigError
from shared.metrics import Metrics
from shared.packing import RunCost, cheapest_cut, row_lengths


@dataclass(frozen=True)
class Texts:
    """One request: its token tensors, all [rows, width], how much of each row is not padding, and what it asks for."""

    tokens: dict[str, np.ndarray]
    lengths: np.ndarray
    width: int
    wanted: list[str]


@dataclass(frozen=True)
class Encoder:
    """What takes token tensors [rows, length]. `per_token`: those of its outputs that have a vector for each token."""

    inputs: dict[str, type]  # name -> numpy's type; one that requests do not bring is fed zeros
    outputs: list[str]
    per_token: set[str]
    run: Callable[[list[str] | None, dict[str, np.ndarray]], list[np.ndarray]]
    # Seconds of a run, of several numbers of rows at once. None: it is measured.
    cost: Callable[[np.ndarray, int], np.ndarray] | None = None
    # What a run is to be filled up to, where it takes no other shape.
    shape: Callable[[int, int], tuple[int, int]] = lambda rows, length: (rows, length)


class PackedRuns:
    """Serves an encoder under `allow_ragged_batch: true`."""

    def __init__(self, args: dict, config: dict, encoder: Encoder, at_once: int) -> None:
        self.encoder = encoder
        self.fed = [tensor["name"] for tensor in config["input"]]
        self.mask = parameter(config, "mask", "attention_mask")
        if self.mask not in self.fed:
            raise ConfigError(f"no input '{self.mask}': packing needs the mask to know a row's length")
        self.at_once = at_once
        self.workers = ThreadPoolExecutor(at_once)
        self.metrics = Metrics(args, "tokens", "padding_tokens", "runs")
        self.cost = encoder.cost or self.measured(args["model_instance_name"], max(1, config["max_batch_size"]))

    def measured(self, instance: str, max_rows: int) -> RunCost:
        cost = RunCost.measure(self.seconds_of, max_rows)
        pb_utils.Logger.log_info(
            f"{instance}: {self.at_once} run(s) at once; a run costs "
            f"{cost.per_run * 1e3:.2f} ms and {cost.per_token * 1e6:.0f} us a token"
        )
        return cost

    def seconds_of(self, rows: int, length: int) -> float:
        """What a run of this shape costs when all workers are busy with its like."""
        feed = {n: np.full((rows, length), int(n in self.fed), dtype) for n, dtype in self.encoder.inputs.items()}
        start = time.perf_counter()
        list(self.workers.map(lambda _: self.encoder.run(None, feed), range(self.at_once)))
        return (time.perf_counter() - start) / self.at_once

    def close(self) -> None:
        self.metrics.close()

    def execute(self, requests):
        return serving.serve(requests, self.prepare, self.run, self.reply)

    def prepare(self, request) -> Texts:
        tokens = {name: serving.input_tensor(request, name) for name in self.fed}
        mask = tokens[self.mask]
        if mask.ndim != 2 or mask.shape[1] == 0:
            raise BadRequest(f"input '{self.mask}' must have shape [rows, tokens] with at least one token")
        for name, array in tokens.items():
            if array.shape != mask.shape:
                raise BadRequest(
                    f"input '{name}' has shape {list(array.shape)}, but '{self.mask}' has {list(mask.shape)}"
                )
        return Texts(tokens, row_lengths(mask), mask.shape[1], serving.wanted_outputs(request, self.encoder.outputs))

    def run(self, batch: list[Texts]) -> list[dict[str, np.ndarray]]:
        """The answers of all requests, in their order, whatever runs their rows went through."""
        lengths = np.concatenate([texts.lengths for texts in batch])
        rows = [(texts, row) for texts in batch for row in range(len(texts.lengths))]
        wanted = sorted({name for texts in batch for name in texts.wanted})
        answers: dict[str, list] = {name: [None] * len(rows) for name in wanted}
        order = np.argsort(lengths, kind="stable")

        def run(packed: np.ndarray) -> None:
            feed = self.feed([rows[i] for i in packed], *self.encoder.shape(len(packed), int(lengths[packed[-1]])))
            for name, array in zip(wanted, self.encoder.run(wanted, feed), strict=True):
                for i, answer in zip(packed, array[: len(packed)], strict=True):
                    answers[name][i] = answer

        cuts = [order[start:end] for start, end in cheapest_cut(lengths[order], self.cost)]
        # The longest first, so that no worker is left with a long one at the end.
        list(self.workers.map(run, reversed(cuts)))
        tokens = int(lengths.sum())
        padded = sum(math.prod(self.encoder.shape(len(packed), int(lengths[packed[-1]]))) for packed in cuts)
        self.metrics.add(tokens=tokens, padding_tokens=padded - tokens, runs=len(cuts))
        results = []
        first = 0
        for texts in batch:
            last = first + len(texts.lengths)
            results.append({name: self.stack(name, answers[name][first:last], texts) for name in texts.wanted})
            first = last
        return results

    def feed(self, rows: list[tuple[Texts, int]], count: int, length: int) -> dict[str, np.ndarray]:
        """One run's input: these rows, filled up with zeros."""
        feed = {name: np.zeros((count, length), dtype) for name, dtype in self.encoder.inputs.items()}
        for i, (texts, row) in enumerate(rows):
            end = texts.lengths[row]
            for name, array in texts.tokens.items():
                feed[name][i, :end] = array[row, :end]
        return feed

    def stack(self, name: str, answers: list[np.ndarray], texts: Texts) -> np.ndarray:
        """One request's rows of an output; a per-token output gets the request's own width back."""
        if name not in self.encoder.per_token:
            return np.stack(answers)
        out = np.zeros((len(answers), texts.width, *answers[0].shape[1:]), answers[0].dtype)
        for i, answer in enumerate(answers):
            end = texts.lengths[i]
            out[i, :end] = answer[:end]
        return out

    def reply(self, request, arrays: dict[str, np.ndarray]):
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in arrays.items()])
