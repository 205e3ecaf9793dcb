"""ONNX text encoders on ragged batches: the rows of all requests, sorted by length, in the cheapest set of runs.

Takes models whose inputs are all integer [rows, tokens] with an attention mask, under `allow_ragged_batch: true`. An
input of the graph that the config leaves out (token_type_ids) is fed zeros.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

sys.path.append(str(Path(__file__).resolve().parents[1]))

from shared import onnx, serving
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


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        return auto_complete_model_config

    def initialize(self, args):
        self.model = onnx.Model.load(args, ragged=True)
        config, inputs = self.model.config, self.model.inputs
        self.mask = parameter(config, "mask", "attention_mask")
        if self.mask not in self.model.fed:
            raise ConfigError(f"no input '{self.mask}': packing needs the mask to know a row's length")
        for name in self.model.fed:
            if len(inputs[name].shape) != 2 or not np.issubdtype(inputs[name].type.numpy, np.integer):
                raise ConfigError(f"input '{name}' must be integers of shape [rows, tokens]")
        token_axis = inputs[self.mask].shape[1]
        self.per_token = {
            name
            for name, port in self.model.outputs.items()
            if len(port.shape) > 1 and isinstance(token_axis, str) and port.shape[1] == token_axis
        }
        threads = onnx.intra_op_threads(config)
        # A batch's runs go side by side on the session's threads, which beats one run after the other on all of them.
        # A GPU's runs share one stream and would only queue.
        self.at_once = 1 if args["model_instance_kind"] == "GPU" else threads
        self.workers = ThreadPoolExecutor(self.at_once)
        self.metrics = Metrics(args, "tokens", "padding_tokens", "runs")
        self.cost = RunCost.measure(self.seconds_of, max(1, config["max_batch_size"]))
        pb_utils.Logger.log_info(
            f"{args['model_instance_name']}: {threads} thread(s); a run costs "
            f"{self.cost.per_run * 1e3:.2f} ms and {self.cost.per_token * 1e6:.0f} us a token"
        )

    def seconds_of(self, rows: int, length: int) -> float:
        """What a run of this shape costs when all workers are busy with its like."""
        values = {name: int(name in self.model.fed) for name in self.model.inputs}
        feed = {name: np.full((rows, length), values[name], p.type.numpy) for name, p in self.model.inputs.items()}
        start = time.perf_counter()
        list(self.workers.map(lambda _: self.model.run(None, feed), range(self.at_once)))
        return (time.perf_counter() - start) / self.at_once

    def finalize(self):
        self.metrics.close()

    def execute(self, requests):
        return serving.serve(requests, self.prepare, self.run, self.reply)

    def prepare(self, request) -> Texts:
        tokens = {name: serving.input_tensor(request, name) for name in self.model.fed}
        mask = tokens[self.mask]
        if mask.ndim != 2 or mask.shape[1] == 0:
            raise BadRequest(f"input '{self.mask}' must have shape [rows, tokens] with at least one token")
        for name, array in tokens.items():
            if array.shape != mask.shape:
                raise BadRequest(
                    f"input '{name}' has shape {list(array.shape)}, but '{self.mask}' has {list(mask.shape)}"
                )
        return Texts(tokens, row_lengths(mask), mask.shape[1], serving.wanted_outputs(request, self.model.outputs))

    def run(self, batch: list[Texts]) -> list[dict[str, np.ndarray]]:
        """The answers of all requests, in their order, whatever runs their rows went through."""
        lengths = np.concatenate([texts.lengths for texts in batch])
        rows = [(texts, row) for texts in batch for row in range(len(texts.lengths))]
        wanted = sorted({name for texts in batch for name in texts.wanted})
        answers: dict[str, list] = {name: [None] * len(rows) for name in wanted}
        order = np.argsort(lengths, kind="stable")

        def run(packed: np.ndarray) -> None:
            feed = self.feed([rows[i] for i in packed], int(lengths[packed[-1]]))
            for name, array in zip(wanted, self.model.run(wanted, feed), strict=True):
                for i, answer in zip(packed, array, strict=True):
                    answers[name][i] = answer

        cuts = [order[start:end] for start, end in cheapest_cut(lengths[order], self.cost)]
        # The longest first, so that no worker is left with a long one at the end.
        list(self.workers.map(run, reversed(cuts)))
        tokens = int(lengths.sum())
        padded = sum(len(packed) * int(lengths[packed[-1]]) for packed in cuts)
        self.metrics.add(tokens=tokens, padding_tokens=padded - tokens, runs=len(cuts))
        results = []
        first = 0
        for texts in batch:
            last = first + len(texts.lengths)
            results.append({name: self.stack(name, answers[name][first:last], texts) for name in texts.wanted})
            first = last
        return results

    def feed(self, rows: list[tuple[Texts, int]], length: int) -> dict[str, np.ndarray]:
        """One run's input: these rows, padded with zeros to the longest of them."""
        feed = {name: np.zeros((len(rows), length), port.type.numpy) for name, port in self.model.inputs.items()}
        for i, (texts, row) in enumerate(rows):
            end = texts.lengths[row]
            for name, array in texts.tokens.items():
                feed[name][i, :end] = array[row, :end]
        return feed

    def stack(self, name: str, answers: list[np.ndarray], texts: Texts) -> np.ndarray:
        """One request's rows of an output; a per-token output gets the request's own width back."""
        if name not in self.per_token:
            return np.stack(answers)
        out = np.zeros((len(answers), texts.width, *answers[0].shape[1:]), answers[0].dtype)
        for i, answer in enumerate(answers):
            end = texts.lengths[i]
            out[i, :end] = answer[:end]
        return out

    def reply(self, request, arrays: dict[str, np.ndarray]):
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in arrays.items()])
