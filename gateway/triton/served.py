"""Find the systems that Triton serves, and the purpose of each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from tritonclient.grpc.model_config_pb2 import ModelConfig

from gateway.edge.config import Config
from gateway.edge.errors import RETRY, ApiError, from_triton, is_not_loaded, not_found, not_ready
from gateway.edge.routes import Routes
from gateway.triton.inference import Inference, retrieve_error
from triton_transformers.protocol import ADAPTERS, CANCEL, ENGINE, LOGITS, TOKENIZED, called_models
from triton_transformers.tasks import kinds
from triton_transformers.tasks.kinds import listed_names
from triton_transformers.tasks.table import TASKS, task_of_tensors
from triton_transformers.tasks.task import PIPELINE

CACHED_S = 2.0
# The same for a system that is not loaded: requests wait for it after a restart of Triton.
MISSING_CACHED_S = 0.2
# How long requests wait for a new reading before they take the last one: Triton answers no question about its models
# over gRPC while it loads one.
PATIENCE_S = 0.2


class System:
    """One system of the running server."""

    def __init__(self, name: str, configs: Mapping[str, ModelConfig | None], tool_parser: str = "") -> None:
        """Take its configuration and those of the models that it calls: None for one that Triton has not loaded."""
        self.name = name
        self.parts = {part: config for part, config in configs.items() if config}
        self.missing = [part for part, config in configs.items() if not config]
        self.config = config = self.parts[name]
        # The model with the output `tokenized`, itself or an ensemble's step: Triton asks a step for all outputs that
        # are mapped, and this one is made only alone.
        self.tokenizing_model = self._step_with(TOKENIZED)
        # The ensemble's step that makes `logits` of the same inputs.
        self.logits_model = self._step_with(LOGITS, *(tensor.name for tensor in config.input if not tensor.optional))
        self.tool_parser = tool_parser or self.parameter("tool_parser")  # the form of the model's calls of tools
        self.max_batch = int(config.max_batch_size)  # rows of a request; 0 if the model has no batch dimension
        self.streams = bool(config.model_transaction_policy.decoupled)
        # The model that generates for this one, if this one only forwards requests to it.
        self.engine = self.parameter(ENGINE)
        self.inputs = frozenset(tensor.name for tensor in config.input)
        self.cancellable = CANCEL in self.inputs  # another request can end one by its id
        shapes = {tensor.name: [int(size) for size in tensor.dims] for tensor in config.output}
        self.outputs = frozenset(shapes)
        self.embedding = kinds.embedding(shapes)  # the output that is the vector of a text, or nothing
        self.width = shapes[self.embedding][0] if self.embedding else -1  # -1: its configuration leaves it open
        self.token_vectors = kinds.token_vectors(shapes)  # the output that has a vector for each token, or nothing
        own = kinds.abilities(self.inputs, shapes, self.max_batch)
        self.kind = own[0] if own else "other"
        # The backend adds the input `messages` if the model has a chat template. The ability tokens: the model returns
        # the token ids of texts.
        others = {"chat": "messages" in self.inputs, "tokens": bool(self.tokenizing_model)}
        named = self.parameter("task") if self.is_pipeline else task_of_tensors(self.inputs, self.outputs)
        self.task_name, self.task = named, TASKS.get(named)
        # A pipeline that recognizes speech has whisper, whisper_without_timestamps, ctc or "".
        self.speech_model = self.parameter("speech_model")
        others |= {"translation": self.is_whisper}
        if self.task and self.task.ability:
            others[self.task.ability] = True
        self.abilities = frozenset([*own, *(name for name, is_there in others.items() if is_there)])

    def _step_with(self, output: str, *inputs: str) -> str:
        """Return the name of the first model that makes this output, and takes these inputs: itself, or a step."""
        names = [self.name, *(step.model_name for step in self.config.ensemble_scheduling.step)]
        models = ((name, self.parts[name]) for name in names if name in self.parts)
        return next((name for name, own in models if has(own.output, output) and has(own.input, *inputs)), "")

    def can(self, abilities: Collection[str]) -> bool:
        """Return whether the system has one of these abilities."""
        return not self.abilities.isdisjoint(abilities)

    @property
    def is_whisper(self) -> bool:
        return self.speech_model.startswith("whisper")

    @property
    def labels(self) -> list[str]:
        """Return the names of a classifier's labels, in the order of its scores; none if its configuration has none."""
        return list(json.loads(self.parameter("labels") or "[]"))

    @property
    def adapters(self) -> list[str]:
        """Return the names of the adapters that `make add ADAPTERS=...` gave to a language model."""
        return self.parameter(ADAPTERS).split()

    def sampling(self, adapter: str = "") -> dict[str, float]:
        """Return the options that the checkpoint of a language model asks for, where a request sets none."""
        options: dict[str, float] = json.loads(self.parameter("sampling") or "{}")
        if adapter:  # OpenVINO GenAI has no such penalty with one
            options.pop("repetition_penalty", None)
        return options

    @property
    def is_pipeline(self) -> bool:
        return bool(self.config.backend == PIPELINE)

    @property
    def pipeline_fields(self) -> dict[str, str]:
        """Return the kind of each field of a row."""
        return dict(field.split("=") for field in self.parameter("fields").split(","))

    @property
    def mask_token(self) -> str:
        """Return the token that each text must have once, if it is to be filled in."""
        return next(filter(None, (parameter_of(own, "exactly_one") for own in self.parts.values())), "")

    def parameter(self, name: str) -> str:
        """Return a parameter of the model's configuration, "" if it has none of this name."""
        return parameter_of(self.config, name)


@dataclass(frozen=True)
class Reading:
    """A question to Triton about a system. Requests that arrive before the answer wait for the same one."""

    began: float
    task: asyncio.Task[System | None]
    last: System | None  # what the reading before it returned

    @property
    def is_old(self) -> bool:
        if not self.task.done():
            return False
        return time.monotonic() >= self.began + (CACHED_S if self.task.result() else min(CACHED_S, MISSING_CACHED_S))


class Served:
    """The systems of the running server, as Triton reported them at most two seconds ago, or before it began a load."""

    def __init__(self, config: Config, inference: Inference, routes: Routes) -> None:
        self._config = config
        self._routes = routes
        self._inference = inference
        self._names: tuple[float, list[str] | None] = (-CACHED_S, None)
        self._systems: dict[str, Reading] = {}

    def names(self) -> list[str]:
        """Return the names of the systems that `make up` has loaded or was asked to load.

        Raise ApiError if the list is missing or damaged; but if it was readable before, its last names stay.
        """
        file = self._config.systems_file
        if file is None:
            return list(self._config.systems)
        read_at, names = self._names
        if time.monotonic() >= read_at + CACHED_S:
            with contextlib.suppress(OSError):  # such as too many open files
                listed = listed_names(file)
                names = names if listed is None else listed
            self._names = time.monotonic(), names
        if names is None:
            message = "The list of the served systems is missing or damaged: `make up` writes it again."
            raise ApiError(503, message, headers=RETRY)
        return names

    def companions(self) -> list[str]:
        """Return the names of the other models that clients may send requests to, if they are loaded."""
        return [
            companion
            for name in self.names()
            for companion in (f"{name}_stream", f"{name.removesuffix('_ensemble')}_generate")
        ]

    async def systems(self) -> list[System]:
        """Return the systems, and their companions that do not stream, that Triton has loaded."""
        names = list(dict.fromkeys([*self.names(), *self.companions()]))
        systems = [system for system in await asyncio.gather(*map(self.lookup, names)) if system]
        return [system for system in systems if system.name in self.names() or not system.streams]

    async def find(self, name: str, *abilities: str, param: str = "model") -> System:
        """Return the system. Raise ApiError if it is not served, or has none of the abilities.

        Its name may end with one of its adapters, as in mychat:tone.
        """
        own_name, has_adapter, adapter = name.partition(":")
        if own_name not in self.names() and own_name not in self.companions():
            raise not_found(name, param)
        system = await self.lookup(own_name)
        if system is None:
            raise not_ready(own_name) if own_name in self.names() else not_found(name, param)
        if has_adapter and adapter not in system.adapters:
            raise not_found(name, param)
        if abilities and not system.can(abilities):
            endpoints = ", ".join(self.routes_of(system)) or f"/try/{name}"
            message = f"The model '{name}' does not support this endpoint. It answers {endpoints}."
            raise ApiError(400, message, param, "model_not_supported")
        return system

    async def only(self, path: str, *abilities: str) -> System:
        """Return the only system that has one of the abilities, for requests to a path that name none.

        Raise ApiError if there is none, or several.
        """
        names = self.names()
        loaded = await asyncio.gather(*map(self.lookup, names))
        able = [system for system in loaded if system and system.can(abilities)]
        if len(able) == 1:
            return able[0]
        if missing := [name for name, system in zip(names, loaded, strict=True) if system is None]:
            raise not_ready(missing[0])
        if not able:
            raise ApiError(404, f"No served system answers {path}: the page at / lists them.", code="model_not_found")
        every = ", ".join(system.name for system in able)
        message = (
            f"{path} is answered by {every}. Name one in the address, such as /models/{able[0].name}{path.rstrip('/')}."
        )
        raise ApiError(400, message, "model", "missing_required_parameter")

    def routes_of(self, system: System) -> list[str]:
        """Return the paths of the APIs that answer requests to the system."""
        paths = (route.path for route in self._routes.shown if route.answers_for(system))
        return [path.replace("{model}", system.name) for path in paths]

    async def stream_of(self, system: System) -> System | None:
        """Return the companion that streams the system's responses, None if there is none.

        Raise ApiError if it is not loaded yet.
        """
        if system.streams:
            return system
        name = system.engine or f"{system.name}_stream"
        companion = await self.lookup(name)
        if companion is None and (system.engine or name in self.names()):
            raise not_ready(name)
        return companion

    async def lookup(self, name: str) -> System | None:
        """Return the system if Triton has loaded it. Pass no name that a client made up: this keeps every name."""
        reading = self._systems.get(name)
        if reading is None or reading.is_old:
            task = asyncio.create_task(self._read(name))
            task.add_done_callback(retrieve_error)  # all requests that wait for it may be cancelled
            reading = self._systems[name] = Reading(time.monotonic(), task, reading.task.result() if reading else None)
        task = reading.task
        if reading.last and not task.done():
            await asyncio.wait([task], timeout=max(0.0, reading.began + PATIENCE_S - time.monotonic()))
            if not task.done():
                return reading.last
        # The request that began the reading may be cancelled.
        return task.result() if task.done() else await asyncio.shield(task)

    def forget(self, name: str) -> None:
        """Ask Triton again for the next request."""
        self._systems.pop(name, None)

    async def _read(self, name: str) -> System | None:
        names = [name]
        configs: dict[str, ModelConfig | None] = {}
        try:
            for one in names:  # grows: a step may be an ensemble, too
                if one not in configs:
                    configs[one] = config = await self._model_config(one)
                    names += called_by(config) if config else []
        except grpc.RpcError as error:
            self.forget(name)
            raise from_triton(error, name) from None
        return System(name, configs, self._config.tool_parser) if configs[name] else None

    async def _model_config(self, name: str) -> ModelConfig | None:
        """Return the configuration of a model, or None if Triton has not loaded it."""
        try:
            return await self._inference.config(name)
        except grpc.RpcError as error:
            if is_not_loaded(error):
                return None
            raise


def called_by(config: ModelConfig) -> list[str]:
    """Return the models that a model calls."""
    steps = (step.model_name for step in config.ensemble_scheduling.step)
    return called_models(steps, {name: value.string_value for name, value in config.parameters.items()})


def parameter_of(config: ModelConfig, name: str) -> str:
    return str(config.parameters[name].string_value) if name in config.parameters else ""


def has(tensors: Iterable[Any], *names: str) -> bool:
    """Return whether the inputs or outputs of a configuration have all these names."""
    return {*names} <= {tensor.name for tensor in tensors}
