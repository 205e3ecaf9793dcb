"""Sets up ONNX Runtime as NVIDIA's C++ onnxruntime backend does: same files, same parameters, same auto-completion.

It knows nothing of Triton's requests, so tests run it without a server.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # ONNX Runtime 1.29 and later report by default

import onnxruntime as ort

from serving.engines.choice import Subject, choose_engine, engine_choices
from serving.engines.graphs import INT8, Engine, EngineError, OnnxRuntimeEngine, OpenVinoGraph, check_openvino
from serving.engines.measurements import Measured, model_and_machine
from serving.engines.sample_inputs import InputSpec, batch_samples, packed_samples
from serving.triton.parameters import (
    choice_parameter,
    flag_parameter,
    instance_count,
    int_parameter,
    mask_name,
    parameter,
    usable_cpus,
)
from serving.triton.types import BY_ONNX, ConfigError, ElementType, InstanceArgs, ModelConfig

if TYPE_CHECKING:
    import openvino

# The C++ backend sets this for a model that batches and has no max_batch_size.
DEFAULT_MAX_BATCH_SIZE = 4

_OPTIMIZATION_LEVELS = {
    -1: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    0: ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    1: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}


@dataclass(frozen=True)
class Port:
    """One input or output of the graph. A dynamic axis has the exporter's name for it, or None."""

    name: str
    type: ElementType
    shape: tuple[int | str | None, ...]

    @property
    def batches(self) -> bool:
        return bool(self.shape) and not isinstance(self.shape[0], int)

    def dims(self, batching: bool) -> list[int]:
        """Return the dims of a config.pbtxt: -1 for a dynamic axis, no batch axis, [1] for a scalar."""
        shape = self.shape[1:] if batching else self.shape
        return [axis if isinstance(axis, int) else -1 for axis in shape] or [1]


def ports(nodes: Sequence[ort.NodeArg]) -> dict[str, Port]:
    for node in nodes:
        if node.type not in BY_ONNX:
            raise ConfigError(f"'{node.name}' of the model has the type {node.type}, which Triton does not support")
    return {node.name: Port(node.name, BY_ONNX[node.type], tuple(node.shape)) for node in nodes}


def openvino_ports(names: Iterable[str], nodes: Iterable[openvino.Output]) -> dict[str, Port]:
    """Return the ports of a text encoder as OpenVINO has them, which keeps no names of axes."""
    axes = ("texts", "tokens", None)
    ports = {}
    for name, node in zip(names, nodes, strict=False):
        (element,) = (own for own in BY_ONNX.values() if own.numpy is node.element_type.to_dtype().type)
        sizes = zip(axes, node.partial_shape, strict=False)
        shape = tuple(axis if size.is_dynamic else size.get_length() for axis, size in sizes)
        ports[name] = Port(name, element, shape)
    return ports


def model_path(config: ModelConfig, version_folder: Path) -> Path:
    path = version_folder / (config.get("default_model_filename") or "model.onnx")
    if path.is_dir():  # models with external weights
        path /= "model.onnx"
    if not path.is_file():
        raise ConfigError(f"{path} is missing: put the model there, or run `make models`")
    return path


def session_options(config: ModelConfig, ragged: bool = False, threads: int = 0) -> ort.SessionOptions:
    options = ort.SessionOptions()
    level = int(config.get("optimization", {}).get("graph", {}).get("level", 0))
    # The C++ backend treats any other level as "all optimizations".
    options.graph_optimization_level = _OPTIMIZATION_LEVELS.get(level, _OPTIMIZATION_LEVELS[0])
    parallel = choice_parameter(config, "execution_mode", ("0", "1"), "0") == "1"
    options.execution_mode = ort.ExecutionMode.ORT_PARALLEL if parallel else ort.ExecutionMode.ORT_SEQUENTIAL
    options.intra_op_num_threads = threads or intra_op_threads(config)
    options.inter_op_num_threads = int_parameter(config, "inter_op_thread_count", 0)
    options.enable_cpu_mem_arena = flag_parameter(config, "enable_mem_arena", True)
    # ONNX Runtime plans the memory of each new shape, which pays only if shapes repeat. Packed shapes rarely do.
    options.enable_mem_pattern = flag_parameter(config, "enable_mem_pattern", not ragged)
    key = "session.use_device_allocator_for_initializers"
    options.add_session_config_entry(key, parameter(config, key, "0"))
    # Idle threads that spin take CPU from the server's own threads and from other instances.
    for pool in ("intra_op", "inter_op"):
        options.add_session_config_entry(f"session.{pool}.allow_spinning", "0")
    return options


def intra_op_threads(config: ModelConfig) -> int:
    """Return the parameter, or for 0 the CPUs that this server may use, divided among the model's instances.

    ONNX Runtime's own 0 pins a thread to every core of the host. That is wrong under taskset, in a container with a
    quota, and with two instances.
    """
    threads = int_parameter(config, "intra_op_thread_count", 0)
    return threads if threads > 0 else max(1, usable_cpus() // instance_count(config))


def run_options(config: ModelConfig) -> ort.RunOptions | None:
    devices = parameter(config, "memory.enable_memory_arena_shrinkage")
    if not devices:
        return None
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", devices)
    return options


def providers(kind: str, device_id: int) -> list[str | tuple[str, dict[str, int]]]:
    """Return an instance's execution providers. Triton has replaced KIND_AUTO by CPU or GPU before."""
    if kind != "GPU":
        return ["CPUExecutionProvider"]
    available = ort.get_available_providers()
    if "CUDAExecutionProvider" not in available:
        raise ConfigError(
            "the instance must run on a GPU, but the installed onnxruntime has only "
            f"{', '.join(available)}: install onnxruntime-gpu, or set KIND_CPU in instance_group"
        )
    return [("CUDAExecutionProvider", {"device_id": device_id}), "CPUExecutionProvider"]


def open_session(
    config: ModelConfig, path: Path, kind: str, device_id: int, ragged: bool = False, threads: int = 0
) -> ort.InferenceSession:
    options = session_options(config, ragged, threads)
    try:
        session = ort.InferenceSession(str(path), options, providers=providers(kind, device_id))
    except ConfigError:
        raise
    except Exception as error:  # ONNX Runtime's exceptions have no common base class
        raise ConfigError(f"ONNX Runtime cannot run {path}: {error}") from error
    if kind == "GPU" and session.get_providers()[0] != "CUDAExecutionProvider":
        raise ConfigError("ONNX Runtime could not start its CUDA provider: read the reason in its log above")
    return session


@dataclass(frozen=True)
class OnnxModel:
    """A model set up by its config.pbtxt, which is checked against the graph."""

    config: ModelConfig
    inputs: dict[str, Port]
    outputs: dict[str, Port]
    engine: Engine
    precision: str  # f32, bf16, or int8 for a quantized graph
    path: Path

    @classmethod
    def load(
        cls, config: ModelConfig, args: InstanceArgs, log: Callable[[str], None], ragged: bool = False
    ) -> OnnxModel:
        folder = Path(args["model_repository"]) / args["model_version"]
        if (int8 := folder / INT8).is_file():
            return cls.load_int8(config, args, int8, log)
        path = model_path(config, folder)
        kind, device_id = args["model_instance_kind"], int(args["model_instance_device_id"])
        threads = intra_op_threads(config)
        # Runs side by side have one thread each: shared threads would wait for each other in every matrix product.
        side_by_side = ragged and kind != "GPU" and threads > 1
        open_with = partial(open_session, config, path, kind, device_id, ragged)
        session = open_with(threads=1) if side_by_side else open_with()
        inputs, outputs = ports(session.get_inputs()), ports(session.get_outputs())
        check_config(config, inputs, outputs, ragged)
        reference = OnnxRuntimeEngine(session, run_options(config), open_with if side_by_side else None)
        engine: Engine
        engine, reason = reference, "the only one on a GPU"
        if kind != "GPU":
            subject = Subject(
                f"{args['model_name']}-{args['model_version']}",
                path,
                reference,
                {name: port.type.numpy for name, port in inputs.items()},
                {tensor["name"]: outputs[tensor["name"]].type.numpy for tensor in config["output"]},
                threads,
                threads if ragged else 1,
                partial(packed_samples if ragged else batch_samples, config, input_specs(config, inputs)),
            )
            engine, reason = choose_engine(subject, engine_choices(config))
        model = cls(config, inputs, outputs, engine, "int8" if is_quantized(path) else engine.precision, path)
        log(f"{args['model_instance_name']}: runs on {engine.name} in {model.precision} ({reason})")
        return model

    @classmethod
    def load_int8(cls, config: ModelConfig, args: InstanceArgs, path: Path, log: Callable[[str], None]) -> OnnxModel:
        """Load the graph that FORMAT=int8 makes of a text encoder. Only OpenVINO runs it, without ONNX Runtime."""
        if args["model_instance_kind"] == "GPU":
            raise ConfigError("FORMAT=int8 runs on a CPU: set KIND_CPU in instance_group, or assemble FORMAT=onnx")
        threads = intra_op_threads(config)
        try:
            check_openvino({}, {})
            pads = parameter(config, "padding", "longest") == "longest"
            graph = OpenVinoGraph(
                path, [tensor["name"] for tensor in config["output"]], mask_name(config) if pads else ""
            )
            nodes = graph.graph.inputs
            inputs = openvino_ports([node.get_any_name() for node in nodes], nodes)
            outputs = openvino_ports(graph.outputs, graph.graph.outputs)
            check_config(config, inputs, outputs, ragged=True)
            engine = graph.compile("f32", threads, threads)
        except EngineError as error:
            raise ConfigError(f"{path}: {error}") from error
        log(f"{args['model_instance_name']}: runs on {engine.name} in {engine.precision} (FORMAT=int8)")
        return cls(config, inputs, outputs, engine, engine.precision, path)

    @property
    def labels(self) -> dict[str, str]:
        """Return the labels of the metric `engine`."""
        return {"engine": self.engine.name, "precision": self.precision}

    def cost_depends_on(self) -> Measured:
        """Return what the cost of a run depends on."""
        settings = {name: self.config.get(name, {}) for name in ("input", "output", "parameters", "optimization")}
        threads = {"threads": intra_op_threads(self.config), "cpus": usable_cpus()}
        return model_and_machine(self.path) | self.labels | settings | threads

    @property
    def request_inputs(self) -> list[str]:
        """Return the inputs that each request has: the client's, and those that Triton adds in a sequence."""
        controls = self.config.get("sequence_batching", {}).get("control_input", [])
        return [tensor["name"] for tensor in (*self.config["input"], *controls)]


def graph_dims(tensor: dict[str, Any]) -> list[int]:
    """Return the dims of an input or output of the config as the graph has them, after a reshape."""
    return [int(dim) for dim in tensor.get("reshape", {}).get("shape", tensor["dims"])]


def input_specs(config: ModelConfig, inputs: dict[str, Port]) -> dict[str, InputSpec]:
    """Return the graph's inputs, with the sizes that the config gives to its free axes."""
    configured = {tensor["name"]: graph_dims(tensor) for tensor in config["input"]}
    specs = {}
    for name, port in inputs.items():
        dims = port.dims(config["max_batch_size"] > 0) if port.shape else []
        sizes = zip(dims, configured.get(name, dims), strict=False)
        specs[name] = InputSpec(port.type.numpy, tuple(max(pair) for pair in sizes))
    return specs


def is_quantized(path: Path) -> bool:
    """Return whether the graph has one of QuantizeLinear, DequantizeLinear and DynamicQuantizeLinear."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(b"uantizeLinear") >= 0


def complete_config(config: ModelConfig, inputs: dict[str, Port], outputs: dict[str, Port]) -> dict[str, Any]:
    """Return what the C++ backend adds to a config that has no inputs or no outputs."""
    if config.get("input") and config.get("output"):
        return {}
    completed: dict[str, Any] = {}
    max_batch_size = config.get("max_batch_size", 0)
    batching = all(port.batches for port in (*inputs.values(), *outputs.values()))
    if not batching and max_batch_size:
        raise ConfigError(
            "max_batch_size is set, but not every input and output of the model has a variable first dimension: set "
            "max_batch_size to 0"
        )
    if batching:
        completed["max_batch_size"] = max_batch_size or DEFAULT_MAX_BATCH_SIZE
        if completed["max_batch_size"] > 1 and not {"dynamic_batching", "sequence_batching"} & config.keys():
            completed["dynamic_batching"] = {}
    for side, graph in (("input", inputs), ("output", outputs)):
        if not config.get(side):
            completed[side] = [
                {"name": port.name, "data_type": port.type.config, "dims": port.dims(batching)}
                for port in graph.values()
            ]
    return completed


def check_config(config: ModelConfig, inputs: dict[str, Port], outputs: dict[str, Port], ragged: bool = False) -> None:
    """Raise ConfigError if the graph cannot serve the config's inputs and outputs."""
    batching = config.get("max_batch_size", 0) > 0
    for side, graph in (("input", inputs), ("output", outputs)):
        for tensor in config.get(side, []):
            port = graph.get(tensor["name"])
            if port is None:
                raise ConfigError(f"the model has no {side} '{tensor['name']}'; it has {', '.join(graph)}")
            if tensor["data_type"] != port.type.config:
                raise ConfigError(
                    f"{side} '{port.name}' is {port.type.config}, not {tensor['data_type']}: correct config.pbtxt"
                )
            if tensor.get("allow_ragged_batch") and not ragged:
                raise ConfigError(f"{side} '{port.name}' sets allow_ragged_batch: use the backend 'packed_onnx'")
            if batching and not port.batches:
                raise ConfigError(
                    f"max_batch_size is set, but {side} '{port.name}' of the model has no variable first dimension: "
                    "set max_batch_size to 0"
                )
            dims = graph_dims(tensor)
            if not _compatible(port.dims(batching), dims):
                raise ConfigError(
                    f"{side} '{port.name}' has dims {port.dims(batching)}, not {dims}: correct config.pbtxt"
                )


def _compatible(graph: list[int], config: list[int]) -> bool:
    return len(graph) == len(config) and all(g == c or -1 in (g, c) for g, c in zip(graph, config, strict=True))
