"""Quantize text encoders for OpenVINO within a bound of quality: matrices in 8 bits, activations at each run.

Before that, each channel of an activation is scaled, so that those with large numbers cost the others less. The matrix
is scaled back. Matrices that still cost too much accuracy stay in fp32 until the bound holds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from export.catalogue import Outcome
from export.check.quality import Quality, measure_quality
from export.check.served import Tensors
from export.recipes.text.network import TextModel
from triton_transformers.cli import err
from triton_transformers.settings import UserError

if TYPE_CHECKING:
    import openvino

# The numbers of a matrix or of an activation that share a scale. Groups of 128 were no faster than those of 64 on a CPU
# with AVX-512 VNNI, and groups of 32 cost a fourth of the speed.
GROUP = 64
ROWS = 16  # of a run
SAMPLE = 4  # runs that are timed, and that show what one matrix costs
ROUNDS = 3
LARGEST = 127  # of eight bits, with equally many negative ones
# A channel is divided by its size to this power, and multiplied by that of its weights to the rest. Weights share
# scales, too, and must not get all the differences that activations lose.
SMOOTHING = 0.7
DAMPING = 0.01  # of the mean of the diagonal, for channels of which the texts show too little
MARGIN = 0.95  # of the loss that is allowed: the aim of the next variant
MIN_SPEEDUP = 1.1  # with less, the loss of accuracy is not worth it


@dataclass
class Channels:
    """The channels of the input of some matrices: what they are like for some rows, and by what they are divided."""

    weights: np.ndarray  # of all these matrices: [outputs, channels]
    count: int = 0
    products: Any = 0.0

    def add(self, rows: np.ndarray) -> None:
        self.count += len(rows)
        self.products = self.products + rows.T @ rows

    @cached_property
    def divisors(self) -> np.ndarray:
        sizes = np.sqrt(np.diag(self.products) / self.count)
        norms = np.linalg.norm(self.weights, axis=0)
        return floored(sizes) ** np.float32(SMOOTHING) / floored(norms) ** np.float32(1 - SMOOTHING)

    @cached_property
    def inverse_root(self) -> np.ndarray:
        """Return the upper triangular root of the inverse of the products of the divided channels."""
        products = self.products.astype(float) / np.outer(self.divisors, self.divisors)
        products += DAMPING * np.diag(products).mean() * np.eye(len(products))
        return np.linalg.cholesky(np.linalg.inv(products)).T.astype(np.float32)


def floored(numbers: np.ndarray) -> np.ndarray:
    return np.maximum(numbers, max(numbers.max() / 1000, np.finfo(np.float32).tiny)).astype(np.float32)


@dataclass(frozen=True)
class Matrix:
    """The weights of a product in 8 bits."""

    numbers: np.ndarray  # [outputs, groups of channels, channels]
    scales: np.ndarray  # of each group
    divisors: np.ndarray  # of the channels of the input

    @classmethod
    def quantized(cls, weights: np.ndarray, channels: Channels) -> Matrix:
        """Quantize [outputs, channels], one channel after the other.

        The channels that follow make up for the error of each one, as far as the products of the channels tell. This is
        the algorithm of GPTQ (Frantar et al., 2022).
        """
        rest = np.ascontiguousarray((weights * channels.divisors).T)
        count, outputs = rest.shape
        width = GROUP if count % GROUP == 0 else count
        numbers = np.empty((count, outputs), np.int8)
        scales = np.empty((count // width, outputs), np.float32)
        root = channels.inverse_root
        for scale, start in zip(scales, range(0, count, width), strict=True):
            end = start + width
            largest = np.abs(rest[start:end]).max(axis=0)
            scale[:] = np.maximum(largest / LARGEST, np.finfo(np.float32).tiny)
            errors = np.empty((width, outputs), np.float32)
            for channel, error in zip(range(start, end), errors, strict=True):
                numbers[channel] = np.clip(np.rint(rest[channel] / scale), -LARGEST, LARGEST)
                error[:] = (rest[channel] - numbers[channel] * scale) / root[channel, channel]
                rest[channel:end] -= np.outer(root[channel, channel:end], error)
            rest[end:] -= root[start:end, end:].T @ errors
        return cls(numbers.T.reshape(outputs, -1, width), scales.T[..., None], channels.divisors)

    def replace(self, product: openvino.Node, scaled: dict[str, openvino.Node]) -> None:
        """Replace the product by one with this matrix. `scaled` has the inputs that were divided before."""
        from openvino import opset13 as ops

        name = input_name(product)
        if name not in scaled:
            scaled[name] = ops.multiply(product.input_value(0), ops.constant(1 / self.divisors))
        weights = ops.multiply(ops.convert(ops.constant(self.numbers), "f32"), ops.constant(self.scales))
        flat = ops.reshape(weights, np.array([len(self.numbers), -1]), False)
        product.output(0).replace(ops.matmul(scaled[name], flat, False, True).output(0))


@dataclass(frozen=True)
class Variant:
    """A quantized graph as it is served, with some of the matrices in fp32."""

    kept: frozenset[str]  # the names of these
    matrices: int
    quality: Quality
    speedup: float

    @property
    def is_fast(self) -> bool:
        return self.speedup >= MIN_SPEEDUP

    def __str__(self) -> str:
        matrices = f"{len(self.kept)} of {self.matrices} matrices in fp32"
        return f"{self.quality.label} at {self.speedup:.2f} times the speed of fp32 ({matrices})"


@dataclass
class Conversion:
    """The search for the fastest graph of an encoder within the bound of its quality."""

    model: TextModel
    feeds: list[Tensors]  # the tokens of the texts that it is measured on
    examples: list[Tensors]  # and of those that show what the activations are like
    pad: Callable[[list[Tensors]], Tensors]

    @property
    def original(self) -> Path:
        return self.model.version("encoder") / "model.onnx"

    @property
    def path(self) -> Path:
        from serving.engines.graphs import INT8

        return self.original.with_name(INT8)

    @cached_property
    def matrices(self) -> dict[str, Matrix]:
        """Return the matrices in 8 bits, by the names of their products."""
        import openvino

        graph = openvino.Core().read_model(self.original)
        by_input: dict[str, list[openvino.Node]] = {}
        for node in products(graph):
            by_input.setdefault(input_name(node), []).append(node)
        channels = self.channels(graph, list(by_input.values()))
        return {
            node.get_friendly_name(): Matrix.quantized(weights_of(node), own)
            for nodes, own in zip(by_input.values(), channels, strict=True)
            for node in nodes
        }

    def channels(self, graph: openvino.Model, by_input: list[list[openvino.Node]]) -> list[Channels]:
        """Return what each input of these products is like for the examples, without padding."""
        import openvino

        from serving.triton.parameters import usable_cpus

        channels = [Channels(np.concatenate([weights_of(node) for node in nodes])) for nodes in by_input]
        sources = [nodes[0].input_value(0) for nodes in by_input]
        inputs = openvino.Model(sources, graph.get_parameters(), "inputs")
        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": usable_cpus()}
        compiled = openvino.Core().compile_model(inputs, "CPU", settings)
        for run in self.runs(self.examples):
            feed = self.pad([self.examples[number] for number in run])
            mask = feed["attention_mask"].astype(bool)
            for own, rows in zip(channels, compiled(feed).values(), strict=True):
                own.add(rows[mask] if rows.shape[:2] == mask.shape else rows.reshape(-1, rows.shape[-1]))
        return channels

    def runs(self, feeds: list[Tensors]) -> list[list[int]]:
        """Return the numbers of the texts of each run: of similar length, or of equal length if padding matters."""
        lengths = [feed["input_ids"].shape[1] for feed in feeds]
        runs: list[list[int]] = [[]]
        for number in np.argsort(lengths, kind="stable").tolist():
            is_full = len(runs[-1]) == ROWS
            if is_full or (runs[-1] and not self.model.pads and lengths[runs[-1][-1]] != lengths[number]):
                runs.append([])
            runs[-1].append(number)
        return runs

    @cached_property
    def batches(self) -> list[list[int]]:
        return self.runs(self.feeds)

    @property
    def sample(self) -> list[list[int]]:
        return self.batches[:: math.ceil(len(self.batches) / SAMPLE)]

    @cached_property
    def expected(self) -> list[np.ndarray]:
        return self.answers(self.original, self.batches)

    def write(self, kept: Collection[str], quality: str = "") -> None:
        """Write the graph that is served, with all matrices but these in 8 bits."""
        import openvino

        from serving.engines.graphs import Int8

        graph = openvino.Core().read_model(self.original)
        scaled: dict[str, openvino.Node] = {}
        for product in products(graph):
            if product.get_friendly_name() not in kept:
                self.matrices[product.get_friendly_name()].replace(product, scaled)
        Int8(GROUP, quality).write(graph)
        # An engine may still read the file of the graph before: it keeps that one.
        self.path.with_suffix(".bin").unlink(missing_ok=True)
        openvino.save_model(graph, self.path)  # tables and other constants in 16 bits

    def engine(self, path: Path, threads: int) -> Any:
        from serving.engines.graphs import EngineError, OpenVinoGraph

        try:
            return OpenVinoGraph(path, list(self.model.task.outputs)).compile("f32", threads, 1)
        except EngineError as error:
            raise UserError(f"{self.model.job.system}: {error}. Set FORMAT=onnx-int8 instead") from error

    def answers(self, path: Path, runs: list[list[int]]) -> list[np.ndarray]:
        """Return what is compared of the answer to each text of these runs, in the order of the texts."""
        from serving.triton.parameters import usable_cpus

        engine = self.engine(path, usable_cpus())
        answers: dict[int, np.ndarray] = {}
        (name, *_) = self.model.task.outputs
        for run in runs:
            feed = self.pad([self.feeds[number] for number in run])
            (rows,) = engine.run([name], feed)
            answers |= zip(run, compared(self.model, rows, feed["attention_mask"]), strict=True)
        return [answers[number] for number in sorted(answers)]

    def variant(self, kept: Collection[str]) -> Variant:
        task, expected = self.model.job.task, self.expected
        activation = self.model.activation if task == "text-classification" else "softmax"
        self.write(kept)
        quality = measure_quality(task, activation, expected, self.answers(self.path, self.batches))
        if self.model.job.min_quality:
            quality = replace(quality, bound=self.model.job.min_quality)
        variant = Variant(frozenset(kept), len(self.matrices), quality, self.speedup())
        self.log(f"keeps {variant}; {quality.bound:.2%} are required")
        return variant

    def log(self, message: str) -> None:
        err.print(f"{self.model.job.system}: int8: {message}")

    def choose(self) -> Variant:
        """Return the first variant whose quality holds. Each has more of the costly matrices in fp32 than the last.

        The squares of the errors of matrices add up, and the loss of quality grows with the root of their sum.
        """
        err.step("rounding the weights to int8")
        tried = [self.variant([])]
        while not (last := tried[-1]).quality.holds and last.is_fast and len(last.kept) < len(self.order):
            rest = [sum(self.errors[name] for name in self.order[count:]) for count in range(len(self.order) + 1)]
            allowed = rest[len(last.kept)] * (MARGIN * last.quality.allowed_loss) ** 2
            enough = next(count for count, error in enumerate(rest) if error <= allowed)
            tried.append(self.variant(self.order[: max(enough, len(last.kept) + 1)]))
        if last.quality.holds and last.is_fast:
            return last
        fast = [variant.quality.share for variant in tried if variant.is_fast]
        less = f"MIN_QUALITY={math.floor(1000 * max(fast)) / 1000} to accept less, or " if fast else ""
        raise UserError(
            f"{self.model.job.system}: int8 costs this model too much accuracy for its speed. It keeps "
            f"{', or '.join(map(str, tried))}; {last.quality.bound:.2%} at {MIN_SPEEDUP} are required. "
            f"Set {less}FORMAT=onnx"
        )

    @cached_property
    def errors(self) -> dict[str, float]:
        """Return by how much each matrix changes the answers if it alone is in 8 bits, as a sum of squares."""
        self.log("measuring what each matrix costs")
        expected = np.concatenate(self.answers(self.original, self.sample))
        errors = {}
        for name in self.matrices:
            self.write(self.matrices.keys() - {name})
            errors[name] = float(np.square(np.concatenate(self.answers(self.path, self.sample)) - expected).sum())
        return errors

    @cached_property
    def order(self) -> list[str]:
        """Return the matrices, first those that for their size cause the largest errors."""
        return sorted(self.errors, key=lambda name: -self.errors[name] / self.matrices[name].numbers.size)

    def speedup(self) -> float:
        """Return how many times less CPU the written graph takes for the sample on one thread than that of fp32.

        Of each, the round counts that nothing else disturbed.
        """
        engines = [self.engine(path, 1) for path in (self.original, self.path)]
        names = list(self.model.task.outputs)
        feeds = [self.pad([self.feeds[number] for number in run]) for run in self.sample]
        best = [math.inf, math.inf]
        for _ in range(ROUNDS + 1):  # the first run of each shape takes longer
            for number, engine in enumerate(engines):
                start = time.process_time()
                for feed in feeds:
                    engine.run(names, feed)
                best[number] = min(best[number], time.process_time() - start)
        return best[0] / best[1]

    def outcome(self) -> Outcome:
        """Put the chosen graph in place of the original one."""
        chosen = self.choose()
        self.write(chosen.kept, chosen.quality.label)
        fp32_size, int8_size = (size_of(path) for path in (self.original, self.path))
        for file in self.original.parent.glob(f"{self.original.name}*"):
            file.unlink()
        return Outcome(
            f"int8: {int8_size / 1e6:.1f} MB instead of {fp32_size / 1e6:.1f}, keeps {chosen}{chosen.quality.details}",
            {
                "int8_bytes": int8_size,
                "fp32_bytes": fp32_size,
                "int8_speedup": chosen.speedup,
                "int8_matrices_in_fp32": len(chosen.kept),
                **chosen.quality.facts,
            },
        )


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.stem}.*"))


def compared(model: TextModel, rows: np.ndarray, mask: np.ndarray) -> Iterator[np.ndarray]:
    """Yield what is compared of each row: without padding the labels of tokens, or their mean vector."""
    per_token = next(iter(model.task.outputs.values()))[0] == "T"
    for row, tokens in zip(rows, mask.astype(bool), strict=True):
        own = row[tokens] if per_token else row[None]
        yield own.mean(axis=0, keepdims=True) if model.job.task == "feature-extraction" else own


def products(graph: openvino.Model) -> list[openvino.Node]:
    """Return the products of an activation with a matrix of weights."""
    return [
        node
        for node in graph.get_ordered_ops()
        if node.get_type_name() == "MatMul"
        and (weights := node.input_value(1).get_node()).get_type_name() == "Constant"
        and len(weights.shape) == 2
        and not node.get_attributes()["transpose_a"]
    ]


def input_name(product: openvino.Node) -> str:
    source = product.input_value(0)
    return f"{source.get_node().get_friendly_name()}:{source.get_index()}"


def weights_of(product: openvino.Node) -> np.ndarray:
    """Return the matrix as [outputs, inputs]."""
    weights: np.ndarray = product.input_value(1).get_node().data
    return weights if product.get_attributes()["transpose_b"] else weights.T
