"""Run the Triton models of a job in this process, with the backends that serve them.

Parity is checked on this: what is compared with the original is then what clients get, tokenizing, packing and the
last step included.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from google.protobuf import text_format
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.encoders.plan import Plan
from triton_transformers.model_config import find_config
from triton_transformers.settings import UserError

Tensors = dict[str, np.ndarray]  # by the names of config.pbtxt


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class ResponseSender:
    """Keeps the responses to a request that is answered after its execution; `finished` is set with the last one."""

    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self.finished = threading.Event()

    def send(self, response: InferenceResponse, flags: int = 0) -> None:
        self.responses.append(response)
        if flags:
            self.finished.set()

    def response(self) -> InferenceResponse:
        self.finished.wait()
        return self.responses[-1]

    def is_cancelled(self) -> bool:
        return False


class InferenceRequest:
    def __init__(self, inputs: Tensors, outputs: list[str]) -> None:
        self._inputs = [Tensor(name, array) for name, array in inputs.items()]
        self.outputs = outputs
        self.sender = ResponseSender()

    def get_response_sender(self) -> ResponseSender:
        return self.sender

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def parameters(self) -> str:
        return ""

    def requested_output_names(self) -> list[str]:
        return self.outputs


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor] | None = None, error: Any = None) -> None:
        self.tensors = {tensor.name(): tensor.as_numpy() for tensor in output_tensors or ()}
        self.error = error


class TritonError(Exception):
    CANCELLED, INTERNAL, INVALID_ARG, UNAVAILABLE = "CANCELLED", "INTERNAL", "INVALID_ARG", "UNAVAILABLE"

    def __init__(self, message: str, code: str = INTERNAL) -> None:
        super().__init__(message)
        self.code = code


class MetricFamily:
    COUNTER, GAUGE = range(2)

    def __init__(self, **_: object) -> None: ...

    def Metric(self, **_: object) -> MetricFamily:
        return self

    def increment(self, value: float) -> None: ...

    def set(self, value: float) -> None: ...


def input_tensor(request: InferenceRequest, name: str) -> Tensor | None:
    return next((tensor for tensor in request.inputs() if tensor.name() == name), None)


def numpy_type(data_type: str) -> type:
    names = {"TYPE_STRING": np.object_, "TYPE_FP16": np.float16, "TYPE_FP32": np.float32, "TYPE_FP64": np.float64}
    return names.get(data_type) or getattr(np, data_type.removeprefix("TYPE_").lower())


def one_run(*_: object) -> Callable[..., np.ndarray]:
    """Return costs by which all rows of an execution share one run."""
    return lambda rows, *_: np.ones(len(rows))


STAND_IN = ModuleType("triton_python_backend_utils")
STAND_IN.__dict__.update(
    Tensor=Tensor,
    InferenceRequest=InferenceRequest,
    InferenceResponse=InferenceResponse,
    TritonError=TritonError,
    MetricFamily=MetricFamily,
    ModelConfig=object,
    Logger=SimpleNamespace(**dict.fromkeys(("log_info", "log_warn", "log_error"), lambda _: None)),
    get_input_tensor_by_name=input_tensor,
    triton_string_to_numpy=numpy_type,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
)


@contextlib.contextmanager
def python_backend(measures_costs: bool = False) -> Iterator[None]:
    """Let the backends import triton_python_backend_utils, which exists only in Triton's own processes.

    Unless encoders measure the cost of their runs, all rows of an execution share one, with as much padding as can
    occur. At the end, restore the environment that was there before: `image_processor` sets USE_TORCH=0.
    """
    sys.modules.setdefault(STAND_IN.__name__, STAND_IN)
    costs = contextlib.nullcontext() if measures_costs else patch.object(Plan, "measured_cost", one_run)
    with patch.dict(os.environ), costs:
        yield


def backend_config(path: Path) -> dict[str, Any]:
    """Return the configuration in a file, as a backend gets it."""
    message = text_format.Parse(path.read_text(), ModelConfig())
    config = MessageToDict(message, preserving_proto_field_name=True)
    return {"input": [], "output": [], "max_batch_size": 0} | config


def instance_args(folder: Path, config: dict[str, Any], kind: str = "CPU") -> dict[str, str]:
    """Return what Triton passes to an instance of the model in this folder."""
    return {
        "model_config": json.dumps(config),
        "model_name": folder.name,
        "model_version": "1",
        "model_repository": str(folder),
        "model_instance_name": folder.name,
        "model_instance_kind": kind,
        "model_instance_device_id": "0",
    }


def answers(backend: Any, requests: Sequence[InferenceRequest]) -> list[InferenceResponse]:
    """Return the response to each request of an execution; the backend may send some of them later."""
    answered = backend.execute(requests)
    return [answer or request.sender.response() for answer, request in zip(answered, requests, strict=True)]


class ServedSystem:
    """A system whose folders hold everything that Triton would load: call it as a client would."""

    def __init__(self, system: str, folder: Path, engine: str = "onnxruntime") -> None:
        self.folder = folder
        self.engine = engine
        self.config = self.read(system)
        self.steps = self.config.get("ensemble_scheduling", {}).get("step", [])
        names = [step["model_name"] for step in self.steps] or [system]
        self.configs = {name: self.read(name) for name in names}
        self.outputs: Collection[str] = ()  # to ask for beside those of the configuration, if the system is one model
        self.models = {name: self.load(name, config) for name, config in self.configs.items()}

    @property
    def dtype(self) -> str:
        """Return the type that the PyTorch model computes in; ONNX and image processors have float32."""
        networks = (getattr(getattr(model, "backend", model), "model", None) for model in self.models.values())
        dtypes = [str(dtype) for network in networks if (dtype := getattr(network, "dtype", None))]
        return dtypes[0].removeprefix("torch.") if dtypes else "float32"

    def read(self, model: str) -> dict[str, Any]:
        path = find_config(model, self.folder)
        return backend_config(path) if path else self.completed(model)

    def completed(self, model: str) -> dict[str, Any]:
        """Return the configuration that Triton completes for a model without one, such as `vit`."""
        from serving.engines import onnx_model

        session = onnx_model.open_session({}, self.folder / model / "1/model.onnx", "CPU", 0)
        graph = [onnx_model.ports(nodes) for nodes in (session.get_inputs(), session.get_outputs())]
        return {"max_batch_size": 0} | onnx_model.complete_config({}, *graph)

    def load(self, model: str, config: dict[str, Any]) -> Any:
        module = importlib.import_module(f"serving.backends.{config.get('backend') or 'onnxruntime'}")
        backend = module.TritonPythonModel()
        # Parity checks the graph in fp32. At load, the server checks its other engines against this one.
        parameters = config.get("parameters", {}) | {"engine": {"string_value": self.engine}}
        backend.initialize(instance_args(self.folder / model, config | {"parameters": parameters}))
        return backend

    def close(self) -> None:
        for model in self.models.values():
            model.finalize()

    def together(self, requests: list[Tensors]) -> list[Tensors]:
        """Return all tensors of each request, those between the steps too, for requests that arrive at once."""
        if not self.steps:
            (name,) = self.models
            return self.run(name, requests)
        pools = [dict(request) for request in requests]
        for step in self.steps:
            inputs = [
                {name: pool[tensor] for name, tensor in step["input_map"].items() if tensor in pool} for pool in pools
            ]
            for pool, outputs in zip(pools, self.run(step["model_name"], inputs), strict=True):
                pool |= outputs
                pool |= {step["output_map"].get(name, name): array for name, array in outputs.items()}
        return pools

    def alone(self, requests: list[Tensors]) -> list[Tensors]:
        return [self.together([request])[0] for request in requests]

    def run(self, model: str, inputs: list[Tensors]) -> list[Tensors]:
        outputs = [tensor["name"] for tensor in self.configs[model]["output"]]
        outputs += [name for name in self.outputs if name not in outputs and not self.steps]
        requests = [InferenceRequest(request, outputs) for request in inputs]
        responses = answers(self.models[model], requests)
        for response in responses:
            if response.error:
                raise UserError(f"{model} fails on an example: {response.error}")
        return [response.tensors for response in responses]


@contextlib.contextmanager
def served_system(system: str, folder: Path, engine: str = "onnxruntime") -> Iterator[ServedSystem]:
    """Load a system for calls in this process, its ONNX models on this engine."""
    with python_backend():
        served = ServedSystem(system, folder, engine)
        try:
            yield served
        finally:
            served.close()


def served_tokens(model: Path, route: str, names: list[str], requests: list[Tensors]) -> list[Tensors]:
    """Return the tokens that the model in this folder makes of each request, without loading its weights."""
    path = find_config(model.name, model.parent)
    assert path
    with python_backend():
        from serving.encoders.packed import text_model
        from serving.encoders.routed import of_route

        config, args = backend_config(path), {"model_repository": str(model), "model_version": "1"}
        if route:
            config, args = of_route(route, config, args)
        tokenization, _ = text_model(config, args, dict.fromkeys(names, np.int64))
        rows: list[Any] = [InferenceRequest(request, []) for request in requests]
        return [tokenization.run([tokenization.prepare(row)])[0].tensors for row in rows]
