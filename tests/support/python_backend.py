"""Stands in for triton_python_backend_utils, which exists only inside Triton's Python processes."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import numpy as np
import pytest

from export.check import served
from export.check.served import ResponseSender, Tensor, TritonError


class InferenceRequest(served.InferenceRequest):
    context: str | None = None  # of a traced request
    id = ""

    def __init__(self, outputs: list[str], request_parameters: dict | None = None, **inputs: object) -> None:
        super().__init__({name: np.array(value) for name, value in inputs.items()}, outputs)
        self.request_parameters = request_parameters or {}

    def trace(self) -> InferenceRequest:
        return self

    def get_context(self) -> str | None:
        return self.context

    def request_id(self) -> str:
        return self.id

    def parameters(self) -> str:
        return json.dumps(self.request_parameters)


class InferenceResponse(served.InferenceResponse):
    """Has its outputs as lists, and its error as a status and a message."""

    def __init__(self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None) -> None:
        super().__init__(output_tensors, error and (error.code, str(error)))
        self.outputs = {name: array.tolist() for name, array in self.tensors.items()}


class Held(ResponseSender):
    """Holds the engine after the first piece until `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.holds, self.go = threading.Event(), threading.Event()

    def send(self, response: served.InferenceResponse, flags: int = 0) -> None:
        super().send(response, flags)
        self.holds.set()
        self.go.wait(60)


class Logger:
    errors: ClassVar[list[str]] = []

    @staticmethod
    def log_info(message: str) -> None: ...

    @classmethod
    def log_error(cls, message: str) -> None:
        cls.errors.append(message)

    @staticmethod
    def log_warn(message: str) -> None:
        raise AssertionError(message)


class Metric:
    def __init__(self, name: str, values: dict[str, float]) -> None:
        self.name, self.values = name, values

    def increment(self, value: float) -> None:
        self.values[self.name] = self.values.get(self.name, 0) + value

    def set(self, value: float) -> None:
        self.values[self.name] = value


def parameters(**values: object) -> dict[str, dict]:
    """Return the parameters of a configuration."""
    return {"parameters": {name: {"string_value": str(value)} for name, value in values.items()}}


def instance_args(folder: Path | str, config: dict | None = None, name: str = "m", **changes: str) -> dict[str, str]:
    """Return what Triton passes to an instance of the model in this folder."""
    return {
        "model_config": json.dumps(config or {}),
        "model_name": name,
        "model_version": "1",
        "model_repository": str(folder),
        "model_instance_name": f"{name}_0",
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
    } | changes


class MetricFamily:
    COUNTER = GAUGE = 0

    def __init__(self, name: str, description: str, kind: int) -> None:
        self.name = name

    def Metric(self, labels: dict[str, str]) -> Metric:
        return Metric(self.name, STAND_IN.metrics)


STAND_IN = ModuleType("triton_python_backend_utils")
STAND_IN.__dict__.update(
    vars(served.STAND_IN),
    InferenceRequest=InferenceRequest,
    InferenceResponse=InferenceResponse,
    InferenceResponseSender=ResponseSender,
    Logger=Logger,
    MetricFamily=MetricFamily,
    metrics={},
)
sys.modules[STAND_IN.__name__] = STAND_IN  # also for served.python_backend()


def serve(patch: pytest.MonkeyPatch, request: Callable, is_model_ready: Callable, load_model: Callable) -> None:
    """Let backends send requests to other models of the server, and load them."""
    names = {"InferenceRequest": request, "is_model_ready": is_model_ready, "load_model": load_model}
    for name, value in (names | {"PreferredMemory": lambda *_: None, "TRITONSERVER_MEMORY_CPU": 0}).items():
        patch.setattr(STAND_IN, name, value, raising=False)
