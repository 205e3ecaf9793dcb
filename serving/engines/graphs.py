"""The engines that run an ONNX graph: ONNX Runtime, and OpenVINO on a CPU."""

from __future__ import annotations

import importlib.util
import queue
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import onnxruntime as ort

from serving.triton.parameters import UNPINNED
from serving.triton.types import Array, BadRequest, Tensors

if TYPE_CHECKING:
    import openvino

# OpenVINO computes 64-bit numbers in 32 bits, so only token ids and the like may be integers, and no output.
_INPUTS = {np.bool_, np.int8, np.uint8, np.int32, np.int64, np.float16, np.float32}
_OUTPUTS = {np.float16, np.float32}
# The file of a graph with matrices in 8 bits (export/recipes/text/int8.py), in place of model.onnx.
INT8 = "int8.xml"


class EngineError(Exception):
    """Raised when an engine cannot run a model; the message is the reason."""


@dataclass(frozen=True)
class OnnxRuntimeEngine:
    session: ort.InferenceSession
    options: ort.RunOptions | None
    open_alone: Callable[[], ort.InferenceSession] | None = None  # opens a session whose runs use all threads
    name: ClassVar[str] = "onnxruntime"
    precision: ClassVar[str] = "f32"
    skips_padding: ClassVar[bool] = False

    def run(self, outputs: list[str], feed: Tensors) -> list[Array]:
        """Return these outputs. Threads may call this at the same time."""
        arrays: list[Array] = self.session.run(outputs, feed, self.options)
        return arrays

    def alone(self) -> OnnxRuntimeEngine:
        return OnnxRuntimeEngine(self.open_alone(), self.options) if self.open_alone else self


def check_openvino(inputs: dict[str, type], outputs: dict[str, type]) -> None:
    """Raise EngineError if OpenVINO is missing or cannot compute these types."""
    if importlib.util.find_spec("openvino") is None:
        raise EngineError("the package openvino is not installed")
    for tensors, supported in ((inputs, _INPUTS), (outputs, _OUTPUTS)):
        for name, dtype in tensors.items():
            if dtype not in supported:
                raise EngineError(f"OpenVINO does not run models with '{name}' of type {np.dtype(dtype).name}")


@dataclass(frozen=True)
class Int8:
    """Facts about a graph with matrices in 8 bits, which the graph's file keeps."""

    group: int  # values of an activation that share a scale
    quality: str  # for people, such as "99.2% of neighbours"

    @classmethod
    def read(cls, graph: openvino.Model) -> Int8:
        return cls(int(graph.get_rt_info([INT8, "group"]).value), graph.get_rt_info([INT8, "quality"]).value)

    def write(self, graph: openvino.Model) -> None:
        for name, value in vars(self).items():
            graph.set_rt_info(str(value), [INT8, name])


class OpenVinoGraph:
    """A graph as OpenVINO reads it, reduced to the outputs that are served.

    Where a Gather gets an index outside its table, OpenVINO answers with zeros, and ONNX Runtime with an error. So the
    engine checks the inputs that are such indices (token ids), and adds an output with the largest of each other index
    that depends on an input (the positions of RoBERTa).
    """

    def __init__(self, path: Path, outputs: list[str], mask: str = "") -> None:
        """Read a graph. If `mask` names its input with 0 for padding, only attention computes the padding."""
        import openvino  # 0.2 s that other models need not pay

        self.outputs, self.skips_padding = outputs, bool(mask)
        self.limits: dict[str, int] = {}  # input -> rows of the table that it indexes
        self.tables: list[int] = []  # the rows of the other tables, in the order of their added outputs
        try:
            self.core = openvino.Core()
            graph = self.core.read_model(path)
            results = {name: result for result in graph.get_results() for name in result.output(0).get_names()}
            self.graph = openvino.Model([results[name] for name in outputs], graph.get_parameters(), "served")
            self.int8 = Int8.read(graph) if path.name == INT8 else None
            self._find_tables()
            self._transpose_in_matmul()
            if mask:
                from serving.engines.unpadded import without_padding  # needs the package openvino

                self.graph = without_padding(self.graph, mask)
        except Exception as error:  # OpenVINO's exceptions are RuntimeErrors of many lines
            raise EngineError(f"OpenVINO cannot read the model: {_one_line(error)}") from error

    def compile(self, precision: str, threads: int, parallel_runs: int) -> OpenVinoEngine:
        """Return an engine that computes in f32 or bf16, with this many runs at a time on `threads` threads in all."""
        settings = {
            "INFERENCE_PRECISION_HINT": precision,
            "PERFORMANCE_HINT": "THROUGHPUT" if parallel_runs > 1 else "LATENCY",
            "NUM_STREAMS": parallel_runs,
            "INFERENCE_NUM_THREADS": threads,
            **UNPINNED,
        }
        if precision == "bf16":
            # Without OpenVINO's single kernel for attention: with AMX it takes twice as long as its parts for texts of
            # 24 tokens, and as long for texts of 128.
            settings["SNIPPETS_MODE"] = "DISABLE"
        if self.int8:
            settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = self.int8.group
        try:
            compiled = self.core.compile_model(self.graph, "CPU", settings)
        except Exception as error:
            raise EngineError(f"OpenVINO cannot compile the model: {_one_line(error)}") from error
        alone = partial(self.compile, precision, threads, 1) if parallel_runs > 1 else None
        label = f"int8 ({self.int8.quality})" if self.int8 else precision
        return OpenVinoEngine(self, compiled, label, alone)

    def _find_tables(self) -> None:
        from openvino import opset13 as ops

        dependent: set[str] = set()  # nodes whose values, not only shapes, depend on those of an input
        for node in self.graph.get_ordered_ops():
            kind, sources = node.get_type_name(), [value.get_node() for value in node.input_values()]
            if kind == "Parameter" or (kind != "ShapeOf" and any(s.get_name() in dependent for s in sources)):
                dependent.add(node.get_name())
            if kind != "Gather" or not _is_table(sources[0]) or sources[1].get_name() not in dependent:
                continue
            rows = sources[0].get_output_partial_shape(0)[int(sources[2].get_data())].get_length()
            source = sources[1]
            while source.get_type_name() == "Convert":
                source = source.input_value(0).get_node()
            if source.get_type_name() == "Parameter":
                name = source.output(0).get_any_name()
                self.limits[name] = min(rows, self.limits.get(name, rows))
            else:
                # Valid are -rows to rows - 1. Of i and -1 - i, the larger one is then from 0 to rows - 1.
                indices = node.input_value(1)
                minus_one = ops.constant(np.array(-1, indices.get_element_type().to_dtype()))
                larger = ops.maximum(indices, ops.subtract(minus_one, indices))
                flat = ops.reshape(larger, np.array([-1]), False)
                self.graph.add_outputs(ops.reduce_max(flat, np.array([0])).output(0))
                self.tables.append(rows)

    def _transpose_in_matmul(self) -> None:
        """Let MatMul transpose the keys of attention: a separate Transpose takes longer."""
        from openvino import opset13 as ops

        for product in self.graph.get_ordered_ops():
            if product.get_type_name() != "MatMul" or product.get_attributes()["transpose_b"]:
                continue
            columns = product.input_value(1).get_node()
            if columns.get_type_name() != "Transpose":
                continue
            order = columns.input_value(1).get_node()
            if order.get_type_name() == "Constant" and order.data.tolist() == [0, 2, 3, 1]:
                rows = ops.transpose(columns.input_value(0), np.array([0, 2, 1, 3]))
                transpose_a = product.get_attributes()["transpose_a"]
                replacement = ops.matmul(product.input_value(0), rows, transpose_a, True)
                product.output(0).replace(replacement.output(0))


def _is_table(node: openvino.Node) -> bool:
    """Return whether the node is a constant, or one that is stored in 16 bits."""
    if node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    return str(node.get_type_name()) == "Constant"


class OpenVinoEngine:
    """A graph that OpenVINO compiled, with an InferRequest for each run that goes on at the same time."""

    name = "openvino"

    def __init__(
        self,
        graph: OpenVinoGraph,
        compiled: openvino.CompiledModel,
        precision: str,
        alone: Callable[[], OpenVinoEngine] | None,
    ) -> None:
        """Keep no reference to the graph, which holds the weights once more."""
        self.compiled, self.precision, self.limits = compiled, precision, graph.limits
        self.positions = {name: i for i, name in enumerate(graph.outputs)}
        self.tables = dict(enumerate(graph.tables, len(graph.outputs)))
        self.idle: queue.LifoQueue[Any] = queue.LifoQueue()
        self.compile_alone, self.skips_padding = alone, graph.skips_padding

    def alone(self) -> OpenVinoEngine:
        """Compile the graph once more: a stream of several has one thread, and would leave the others idle."""
        compile_alone, self.compile_alone = self.compile_alone, None  # it holds the graph's weights
        return compile_alone() if compile_alone else self

    def run(self, outputs: list[str], feed: Tensors) -> list[Array]:
        for name, rows in self.limits.items():
            values = feed[name]
            if values.size and (values.max() >= rows or values.min() < -rows):
                raise BadRequest(
                    f"the model refused the values of the inputs: '{name}' must be from {-rows} to {rows - 1}"
                )
        try:
            request = self.idle.get_nowait()
        except queue.Empty:
            request = self.compiled.create_infer_request()
        try:
            # Shared arrays save two copies. The next run overwrites the outputs, so these are copied once.
            request.infer(feed, share_inputs=True, share_outputs=True)
            for position, rows in self.tables.items():
                if request.get_output_tensor(position).data >= rows:
                    raise BadRequest(
                        "the model refused the values of the inputs: they lead to an index outside a table of "
                        f"{rows} rows"
                    )
            return [request.get_output_tensor(self.positions[name]).data.copy() for name in outputs]
        except RuntimeError as error:
            raise RuntimeError(_one_line(error)) from None
        finally:
            self.idle.put(request)


Engine = OnnxRuntimeEngine | OpenVinoEngine


def _one_line(error: Exception) -> str:
    """Return OpenVINO's message without line breaks and the places in its source."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith("Exception from ")) or type(error).__name__
