"""ONNX Runtime as NVIDIA's C++ onnxruntime backend sets it up: same files, same parameters, same auto-completion.

Knows nothing of Triton's requests, so it is tested without a server.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # 1.29 and later report by default

import numpy as np
import onnxruntime as ort

from shared.dtypes import BY_ONNX, ElementType
from shared.errors import BadRequest, ConfigError
from shared.parameters import choice_parameter, instance_count, int_parameter, parameter, usable_cpus
from shared.types import InstanceArgs, ModelConfig

# What the C++ backend fills in where a batching model states no max_batch_size.
DEFAULT_MAX_BATCH_SIZE = 4

_OPTIMIZATION_LEVELS = {
    -1: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    0: ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    1: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}


@dataclass(frozen=True)
class Port:
    """One input or output of the graph. A dynamic axis keeps the name the exporter gave it, or None."""

    name: str
    type: ElementType
    shape: tuple[int | str | None, ...]

    @property
    def batches(self) -> bool:
        return bool(self.shape) and not isinstance(self.shape[0], int)

    def dims(self, batching: bool) -> list[int]:
        """The dims of a config.pbtxt: -1 for a dynamic axis, no batch axis, [1] for a scalar."""
        shape = self.shape[1:] if batching else self.shape
        return [axis if isinstance(axis, int) else -1 for axis in shape] or [1]


def ports(nodes: list[ort.NodeArg]) -> dict[str, Port]:
    for node in nodes:
        if node.type not in BY_ONNX:
            raise ConfigError(f"'{node.name}' is a {node.type}, which Triton has no type for")
    return {n.name: Port(n.name, BY_ONNX[n.type], tuple(n.shape)) for n in nodes}


def model_path(config: dict, version_folder: Path) -> Path:
    path = version_folder / (config.get("default_model_filename") or "model.onnx")
    if path.is_dir():  # models with external weights
        path /= "model.onnx"
    if not path.is_file():
        raise ConfigError(f"{path} is missing: put the model there, or run `make models`")
    return path


def session_options(config: dict, ragged: bool = False) -> ort.SessionOptions:
    options = ort.SessionOptions()
    level = int(config.get("optimization", {}).get("graph", {}).get("level", 0))
    # The C++ backend takes any other level for "everything".
    options.graph_optimization_level = _OPTIMIZATION_LEVELS.get(level, _OPTIMIZATION_LEVELS[0])
    parallel = choice_parameter(config, "execution_mode", ("0", "1"), "0") == "1"
    options.execution_mode = ort.ExecutionMode.ORT_PARALLEL if parallel else ort.ExecutionMode.ORT_SEQUENTIAL
    options.intra_op_num_threads = intra_op_threads(config)
    options.inter_op_num_threads = int_parameter(config, "inter_op_thread_count", 0)
    options.enable_cpu_mem_arena = _flag(config, "enable_mem_arena", True)
    # A plan of the memory is made for each new shape and pays where shapes come again; packed ones hardly do.
    options.enable_mem_pattern = _flag(config, "enable_mem_pattern", not ragged)
    key = "session.use_device_allocator_for_initializers"
    options.add_session_config_entry(key, parameter(config, key, "0"))
    # An idle pool that spins takes the CPU from the server's own threads and from the other instances.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def intra_op_threads(config: dict) -> int:
    """As configured; 0 means the CPUs this server may use, shared out among the model's instances.

    ONNX Runtime's own 0 is every core of the host, pinned: wrong under taskset, a container's quota, or two instances.
    """
    threads = int_parameter(config, "intra_op_thread_count", 0)
    return threads if threads > 0 else max(1, usable_cpus() // instance_count(config))


def run_options(config: dict) -> ort.RunOptions | None:
    devices = parameter(config, "memory.enable_memory_arena_shrinkage")
    if not devices:
        return None
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", devices)
    return options


def providers(kind: str, device_id: int) -> list:
    """Execution providers for an instance. KIND_AUTO never arrives here: Triton has made it CPU or GPU by then."""
    if kind != "GPU":
        return ["CPUExecutionProvider"]
    available = ort.get_available_providers()
    if "CUDAExecutionProvider" not in available:
        raise ConfigError(
            "the instance is to run on a GPU, but the installed onnxruntime has only "
            f"{', '.join(available)}: install onnxruntime-gpu, or say KIND_CPU in instance_group"
        )
    return [("CUDAExecutionProvider", {"device_id": device_id}), "CPUExecutionProvider"]


def open_session(config: dict, path: Path, kind: str, device_id: int, ragged: bool = False) -> ort.InferenceSession:
    options = session_options(config, ragged)
    try:
        session = ort.InferenceSession(str(path), options, providers=providers(kind, device_id))
    except ConfigError:
        raise
    except Exception as error:  # ONNX Runtime's exceptions share no base class
        raise ConfigError(f"{path} is not a model ONNX Runtime can run: {error}") from error
    if kind == "GPU" and session.get_providers()[0] != "CUDAExecutionProvider":
        raise ConfigError("ONNX Runtime could not start its CUDA provider; its log above says why")
    return session


@dataclass(frozen=True)
class OnnxModel:
    """A model as its config.pbtxt asks for it, checked against its graph."""

    config: dict
    session: ort.InferenceSession
    inputs: dict[str, Port]
    outputs: dict[str, Port]
    run_options: ort.RunOptions | None

    @classmethod
    def load(cls, config: ModelConfig, args: InstanceArgs, ragged: bool = False) -> OnnxModel:
        """From what Triton hands to a backend's initialize()."""
        path = model_path(config, Path(args["model_repository"]) / args["model_version"])
        kind, device_id = args["model_instance_kind"], int(args["model_instance_device_id"])
        session = open_session(config, path, kind, device_id, ragged)
        inputs, outputs = ports(session.get_inputs()), ports(session.get_outputs())
        check_config(config, inputs, outputs, ragged)
        return cls(config, session, inputs, outputs, run_options(config))

    @property
    def request_inputs(self) -> list[str]:
        """The inputs that requests bring."""
        return [tensor["name"] for tensor in self.config["input"]]

    def run(self, outputs: list[str] | None, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        return self.session.run(outputs, feed, self.run_options)


def complete_config(config: dict, inputs: dict[str, Port], outputs: dict[str, Port]) -> dict:
    """What the C++ backend's auto-complete would add to the config: only where inputs or outputs are left out."""
    if config.get("input") and config.get("output"):
        return {}
    completed: dict = {}
    stated = config.get("max_batch_size", 0)
    batching = all(port.batches for port in (*inputs.values(), *outputs.values()))
    if not batching and stated:
        raise ConfigError("max_batch_size is set, but not every input and output has a variable first dimension")
    if batching:
        completed["max_batch_size"] = stated or DEFAULT_MAX_BATCH_SIZE
        if completed["max_batch_size"] > 1 and not {"dynamic_batching", "sequence_batching"} & config.keys():
            completed["dynamic_batching"] = {}
    for side, graph in (("input", inputs), ("output", outputs)):
        if not config.get(side):
            completed[side] = [
                {"name": p.name, "data_type": p.type.config, "dims": p.dims(batching)} for p in graph.values()
            ]
    return completed


def check_config(config: dict, inputs: dict[str, Port], outputs: dict[str, Port], ragged: bool = False) -> None:
    """The graph serves what the config promises, or a sentence that names the tensor."""
    batching = config.get("max_batch_size", 0) > 0
    for side, graph in (("input", inputs), ("output", outputs)):
        for stated in config.get(side, []):
            port = graph.get(stated["name"])
            if port is None:
                raise ConfigError(f"the model has no {side} '{stated['name']}'; it has {', '.join(graph)}")
            if stated["data_type"] != port.type.config:
                raise ConfigError(f"{side} '{port.name}' is {port.type.config}, not {stated['data_type']}")
            if stated.get("allow_ragged_batch") and not ragged:
                raise ConfigError(f"{side} '{port.name}' asks for ragged batches: use backend 'packed_onnx'")
            if batching and not port.batches:
                raise ConfigError(f"max_batch_size is set, but {side} '{port.name}' has no variable first dimension")
            dims = [int(d) for d in stated.get("reshape", {}).get("shape", stated["dims"])]
            if not _compatible(port.dims(batching), dims):
                raise ConfigError(f"{side} '{port.name}' has dims {port.dims(batching)}, not {dims}")


def decode_strings(array: np.ndarray, name: str) -> np.ndarray:
    """Triton's bytes as the str that ONNX Runtime takes."""
    out = np.empty(array.size, np.object_)
    for i, value in enumerate(array.ravel()):
        try:
            out[i] = value.decode() if isinstance(value, bytes) else str(value)
        except UnicodeDecodeError as error:
            raise BadRequest(f"input '{name}': element {i} is not valid UTF-8 (byte {error.start})") from None
    return out.reshape(array.shape)


def encode_strings(array: np.ndarray) -> np.ndarray:
    return np.array([str(value).encode() for value in array.ravel()], np.object_).reshape(array.shape)


def _flag(config: dict, key: str, default: bool) -> bool:
    return choice_parameter(config, key, ("0", "1", "false", "true"), "1" if default else "0") in ("1", "true")


def _compatible(graph: list[int], stated: list[int]) -> bool:
    return len(graph) == len(stated) and all(g == s or -1 in (g, s) for g, s in zip(graph, stated, strict=True))
