"""Base classes of the classes that Triton loads from each backend's model.py."""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import locale
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import triton_python_backend_utils as pb_utils

from serving.triton import responses, tracing
from serving.triton.metrics import Metrics
from serving.triton.parameters import choice_parameter
from serving.triton.stub_memory import StubMemory, UnknownLayoutError, stub_arguments
from serving.triton.types import InstanceArgs, ModelConfig, Tensors

Job = TypeVar("Job")
# Python searches for unused cycles after this many new objects, by default 700. Imports make hundreds of thousands of
# objects and hardly a cycle, and the searches take an eighth of the time of a load.
SERVING_THRESHOLDS, LOADING_THRESHOLDS = gc.get_threshold(), (50_000,)


def exit_now() -> None:
    """End this process without Python's teardown: TRITON-FAULTS.md#teardown-of-a-process."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


# Before a model imports torch and other libraries, so that Python still runs their exit functions first.
if stub_arguments("self"):  # not in a test, whose exit code would be lost
    atexit.register(exit_now)
    gc.set_threshold(*LOADING_THRESHOLDS)


def guarded(
    execute: Callable[[Sequence[pb_utils.InferenceRequest]], Any], model: str
) -> Callable[[Sequence[pb_utils.InferenceRequest]], Any]:
    """Return `execute` with a check before and after each batch, which may end this process.

    See TRITON-FAULTS.md#stalled-processes.
    """
    try:
        memory = StubMemory(stub_arguments("self"))
    except (UnknownLayoutError, OSError):  # the watchdog logs it
        return execute

    def execute_guarded(requests: Sequence[pb_utils.InferenceRequest]) -> Any:
        check(memory, model)
        try:
            return execute(requests)
        finally:
            check(memory, model)

    return execute_guarded


def check(memory: StubMemory, model: str) -> None:
    """End the process if Triton has given up on its batch; else make Triton wait for at least another second.

    The order matters: after report_alive(), Triton cannot give up in the moment before the responses leave.
    """
    memory.report_alive()
    if memory.is_given_up():
        os.write(2, f"{model}: Triton gave up on this process while it stood still; ending it\n".encode())
        os._exit(1)


class Backend(ABC):
    """One instance of a model, with the methods that Triton calls."""

    counters: ClassVar[tuple[str, ...]] = ()  # names in serving.triton.metrics.COUNTERS
    gauges: ClassVar[tuple[str, ...]] = ()  # names in serving.triton.metrics.GAUGES
    engine_labels: dict[str, str] | None = None  # of the metric `engine`; set_up sets them if the model has engines

    @staticmethod
    def auto_complete_config(auto_complete_model_config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        return auto_complete_model_config

    def initialize(self, args: InstanceArgs) -> None:
        self.set_up(json.loads(args["model_config"]), args)
        tracing.start(args["model_name"])
        self.metrics = Metrics(args, *self.counters, gauges=self.gauges, engine_labels=self.engine_labels)
        self.execute = guarded(self.execute, args["model_name"])  # type: ignore[assignment, method-assign]
        gc.set_threshold(*SERVING_THRESHOLDS)

    @abstractmethod
    def set_up(self, config: ModelConfig, args: InstanceArgs) -> None:
        """Read the parameters and load the model. Raise ConfigError if the config cannot be served."""

    @abstractmethod
    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse | None] | None:
        """Answer the requests. Return None for those whose response senders were kept."""

    def finalize(self) -> None:
        self.metrics.close()
        if tracing.sender:
            tracing.sender.close()
        atexit.register(gc.disable)  # so that no library's exit function frees a response sender


class BatchBackend(Backend, Generic[Job]):
    """A backend that runs all requests of an execution as one batch."""

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse | None]:
        return responses.serve(requests, self.prepare, self.run_batch, self.respond)

    @abstractmethod
    def prepare(self, request: pb_utils.InferenceRequest) -> Job:
        """Read and check one request. Raise BadRequest if it is wrong."""

    @abstractmethod
    def run_batch(self, jobs: list[Job]) -> Sequence[Tensors | Exception | responses.Later]:
        """Return the outputs of each job, the error that its request gets, or what answers it later."""

    def respond(self, request: pb_utils.InferenceRequest, result: Any) -> pb_utils.InferenceResponse | None:
        """Return the response, or None if it is sent later."""
        if isinstance(result, responses.Later):
            result.begin(responses.Response(request))
            return None
        return responses.tensors_response(result, request.requested_output_names())


class DelegatingBackend(ABC):
    """A backend that leaves everything to another one, which it chooses when Triton loads the model."""

    auto_complete_config = staticmethod(Backend.auto_complete_config)

    def initialize(self, args: InstanceArgs) -> None:
        # PyTorch's own files, which ModernBERT needs, are not ASCII: TRITON-FAULTS.md#locale-and-pythonpath
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
        os.environ["HF_HUB_OFFLINE"] = "1"  # every file that is served is in the model repository
        self.backend = self.chosen_backend(json.loads(args["model_config"]), args)
        self.backend.initialize(args)

    @abstractmethod
    def chosen_backend(self, config: ModelConfig, args: InstanceArgs) -> Backend: ...

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse | None] | None:
        return self.backend.execute(requests)

    def finalize(self) -> None:
        self.backend.finalize()


def new_backend(module: str, name: str) -> Backend:
    """Return an object of this class. Import its module only now, because torch takes seconds to import."""
    backend: Backend = getattr(importlib.import_module(module), name)()
    return backend


class TaskBackend(DelegatingBackend):
    """A backend whose parameter `task` chooses the class that serves the model."""

    tasks: ClassVar[dict[str, tuple[str, str]]]  # task -> (module, class)
    default_task: ClassVar[str]

    def chosen_backend(self, config: ModelConfig, args: InstanceArgs) -> Backend:
        return new_backend(*self.tasks[choice_parameter(config, "task", tuple(self.tasks), self.default_task)])
