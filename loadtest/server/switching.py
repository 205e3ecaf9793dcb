"""Switch the running server between the modes, and restore the original configurations afterwards.

The switch is Triton's model control: each composing model is loaded with its own configuration, with or without
`dynamic_batching`, and in the mode `instances` with other instances. A model that generates text batches by itself: it
is loaded for one text at a time or as configured. A journal keeps the originals, so that the next comparison can undo
one that was killed.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from loadtest.server.generating import with_limit
from loadtest.server.machine import cpu_list
from triton_transformers.files import write_atomically
from triton_transformers.settings import Settings, UserError
from triton_transformers.triton import (
    Config,
    Triton,
    TritonError,
    generates,
    metrics_page,
    text_limit,
)
from triton_transformers.triton_messages import is_unreported

# The parameter for the threads of an instance: this project's backends and NVIDIA's for ONNX have the default.
THREADS = {"pytorch": "INTRA_OP_THREAD_COUNT", "openvino": "INFERENCE_NUM_THREADS"}
DEFAULT_THREADS = "intra_op_thread_count"
# How long a server that crashed may take to restart before its configurations are restored.
RESTART_S = 60.0
# How long a generating model may take to finish its texts before it is unloaded.
UNLOAD_S = 600.0
# How often to load the models until their configurations hold; more often if all that fails is that Python processes do
# not report in time.
ATTEMPTS, PATIENT_ATTEMPTS = 3, 8


class LoadRefused(UserError):
    """Triton refused a model's configuration, as it does if the model does not fit into memory."""


@dataclass(frozen=True)
class Switched:
    """One model of the system: its original configuration, and its configuration in each mode."""

    name: str
    original: Config
    modes: dict[str, Config]
    batches: bool  # False for the ensemble itself, and for models without batches, which only get more instances
    # The models that batch in its place in each mode, by their names in reports.
    stand_ins: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def generates(self) -> bool:
        return generates(self.original)


def composing(triton: Triton, system: str) -> dict[str, Config]:
    """Return the configurations of the system's models. Raise UserError if the server does not serve the system."""
    try:
        return triton.composing(system)
    except TritonError as error:
        if error.status is None:
            raise UserError(f"{error}: `make up` starts the stack") from None
        raise UserError(f"'{system}' is not served by {triton.url}: {error}") from None


def plan(configs: dict[str, Config], max_batch: int | None, modes: Sequence[str], instances: int = 1) -> list[Switched]:
    """Return each mode's configurations, the ensemble first: it may not batch more than its steps do."""
    switched = []
    for name, original in configs.items():
        if generates(original):
            together = with_limit(original, max_batch) if max_batch else original
            one_at_a_time = with_limit(original, 1)
            in_mode = {mode: one_at_a_time for mode in modes} | {"dynamic": together}
            switched.append(Switched(name, original, in_mode, batches=True))
            continue
        base = original
        if max_batch and base["max_batch_size"] > 0:
            if max_batch > base["max_batch_size"]:
                raise UserError(
                    f"MAX_BATCH={max_batch}: '{name}' takes {base['max_batch_size']}; raise that in its config.pbtxt"
                )
            base = base | {"max_batch_size": max_batch}
        can_batch = not {"ensemble_scheduling", "sequence_batching"} & base.keys() and base["max_batch_size"] > 0
        in_mode = {mode: base for mode in modes}
        if can_batch:
            in_mode = {mode: without_batching(base) for mode in modes} | {"dynamic": with_batching(base)}
        if "instances" in modes and "ensemble_scheduling" not in base:
            in_mode["instances"] = with_instances(in_mode["instances"], instances)
        if any(config != original for config in in_mode.values()):
            switched.append(Switched(name, original, in_mode, can_batch))
    if not any(model.batches and batch_limit(model.modes["dynamic"]) > 1 for model in switched):
        sizes = ", ".join(f"{name} {batch_limit(config)}" for name, config in configs.items())
        raise UserError(f"nothing here can batch: no model has a max_batch_size (or max_batch) above 1 ({sizes})")
    return switched


def plan_formats(original: Config, variants: Mapping[str, dict[str, Config]]) -> list[Switched]:
    """Return the switch between formats: the system passes its requests on to itself in another format.

    `variants` has the configurations of the system's models in each format, which are served beside it.
    """
    fronts, stand_ins = {}, {}
    for form, configs in variants.items():
        variant, *_ = configs.values()
        fronts[form] = passing_on(original, variant)
        # The models of formats have the same names in reports if they have the same task.
        stand_ins[form] = {
            name.removeprefix(f"{variant['name']}_"): name
            for name, config in configs.items()
            if config["max_batch_size"] and "ensemble_scheduling" not in config
        }
    return [Switched(original["name"], original, fronts, batches=False, stand_ins=stand_ins)]


def passing_on(original: Config, variant: Config) -> Config:
    """Return an ensemble that passes the system's requests on, with those of its outputs that the variant has."""
    outputs = {}
    for tensor in original["output"]:
        likely = [other["name"] for other in variant["output"] if other["name"] == tensor["name"]] or [
            other["name"]
            for other in variant["output"]
            if (other["data_type"], other["dims"]) == (tensor["data_type"], tensor["dims"])
        ]
        if len(likely) == 1:
            outputs[tensor["name"]] = likely[0]
    step = {
        "model_name": variant["name"],
        "model_version": -1,
        "input_map": {tensor["name"]: tensor["name"] for tensor in variant["input"]},
        "output_map": {theirs: ours for ours, theirs in outputs.items()},
        "model_namespace": "",
    }
    return {
        "name": original["name"],
        "platform": "ensemble",
        "max_batch_size": variant["max_batch_size"],
        "input": variant["input"],
        "output": [tensor for tensor in original["output"] if tensor["name"] in outputs],
        "parameters": original.get("parameters", {}),
        "ensemble_scheduling": {"step": [step]},
    }


def batch_limit(config: Config) -> int:
    """Return how many requests run together at most."""
    return text_limit(config) if generates(config) else config["max_batch_size"]


def with_batching(config: Config) -> Config:
    batcher = config.get("dynamic_batching", {})
    # Triton adds the original max_batch_size to the preferred sizes, and refuses one above the new max_batch_size.
    preferred = [size for size in batcher.get("preferred_batch_size", []) if size <= config["max_batch_size"]]
    return config | {"dynamic_batching": batcher | {"preferred_batch_size": preferred}}


def without_batching(config: Config) -> Config:
    return {key: value for key, value in config.items() if key != "dynamic_batching"}


def with_instances(config: Config, count: int, threads: str = "1") -> Config:
    """Return the configuration with this many instances on the CPU, of so many threads each; "": as many as before.

    Every model gets the parameter, and backends without threads ignore it. If only the instances differed, Triton would
    add some to those that run, which would keep their threads.
    """
    group = (config.get("instance_group") or [{"kind": "KIND_CPU"}])[0]
    changed = config | {"instance_group": [group | {"count": count}]}
    if threads:
        name = THREADS.get(config.get("backend", ""), DEFAULT_THREADS)
        changed["parameters"] = config.get("parameters", {}) | {name: {"string_value": threads}}
    return changed


class Switch:
    """The server's mode. Use as a context manager: its end restores the original configurations."""

    def __init__(
        self, triton: Triton, models: list[Switched], folder: Path, on_restore: Callable[[], None] = lambda: None
    ) -> None:
        self.triton = triton
        self.on_restore = on_restore
        self.models = models
        self.journal = _journal(triton, folder)
        self.mode: str | None = None

    def __enter__(self) -> Switch:
        self._write_journal()
        return self

    def add(self, mode: str, configs: Mapping[str, Config]) -> None:
        """Add a mode, with a configuration of each model."""
        for model in self.models:
            model.modes[mode] = configs[model.name]
        self._write_journal()

    def to(self, mode: str) -> None:
        """Switch to the mode. Return when it holds; raise UserError if it does not."""
        if mode == self.mode:
            return
        self.mode = None
        _load_until_held(self.triton, {model.name: model.modes[mode] for model in self.models})
        self.mode = mode

    def counted(self) -> dict[str, str]:
        """Return the models whose batches count in the present mode, by their names in reports."""
        batching = {model.name: model.name for model in self.models if model.batches}
        return batching | {
            name: own for model in self.models for name, own in model.stand_ins.get(self.mode or "", {}).items()
        }

    def in_force(self) -> bool:
        """Return whether the server is still in the mode it was switched to; a restart would have undone it."""
        return self.mode is not None and _held(
            self.triton, {model.name: model.modes[self.mode] for model in self.models}
        )

    def __exit__(self, *exception: object) -> None:
        self.on_restore()
        originals = {model.name: model.original for model in self.models}
        try:
            _load_until_held(self.triton, originals, time.monotonic() + RESTART_S)
        except (UserError, TritonError) as error:
            raise UserError(
                f"{error}. The server's configurations are not restored; the next `make loadtest` or `make tune` tries "
                "again"
            ) from None
        self.journal.unlink(missing_ok=True)

    def _write_journal(self) -> None:
        entries = [{"model": m.name, "original": m.original, "ours": list(m.modes.values())} for m in self.models]
        write_atomically(self.journal, json.dumps(entries))


def restore_after_kill(triton: Triton, folder: Path) -> list[str]:
    """Undo what a killed comparison left on this server; return the names of the restored models.

    A model whose configuration is no longer the one that the comparison loaded was reloaded since, and stays as it is.
    """
    journal = _journal(triton, folder)
    if not journal.exists():
        return []
    originals = {}
    for entry in json.loads(journal.read_text()):
        try:
            current = triton.config(entry["model"])
        except TritonError as error:
            if error.status is None:
                raise
            continue  # no longer served
        if any(_same(current, ours) for ours in entry["ours"]) and not _same(current, entry["original"]):
            originals[entry["model"]] = entry["original"]
    _load_until_held(triton, originals)
    journal.unlink()
    return list(originals)


def _load_until_held(triton: Triton, configs: dict[str, Config], deadline: float = 0) -> None:
    """Load all models, more than once if needed, until their configurations hold.

    A load of the same model by the watchdog or another client may wait in Triton behind ours and undo it. Triton runs
    the loads of a model one after the other, so a second load of ours waits for that one. Where nothing changed in
    between, it does nothing.
    """
    _make_room(triton, configs)
    configs = _in_order(triton, configs)
    errors: dict[str, TritonError] = {}
    for attempt in range(1, PATIENT_ATTEMPTS + 1):
        errors = _load_all(triton, configs, deadline) or _load_all(triton, configs, deadline)
        if not errors and _held(triton, configs):
            return
        is_slow = errors and all(is_unreported(str(error)) for error in errors.values())
        if attempt >= ATTEMPTS and not is_slow:
            break
    if not errors:
        raise UserError(
            f"another client keeps loading {', '.join(configs)} with another configuration: stop it and try again"
        )
    kind = LoadRefused if all(error.status for error in errors.values()) else UserError
    raise kind("; ".join(f"switching '{name}' failed: {error}" for name, error in errors.items()))


def _in_order(triton: Triton, configs: dict[str, Config]) -> dict[str, Config]:
    """Return the configurations, an ensemble before its steps, in the order in which to load them.

    Triton stops serving an ensemble that may batch more than one of its steps. So what shrinks is loaded first, an
    ensemble before its steps, and then what grows, after its steps.
    """
    shrinking = {}
    for name, config in configs.items():
        with contextlib.suppress(TritonError):  # it is not loaded, or the server is gone
            if config.get("max_batch_size", 0) < triton.config(name).get("max_batch_size", 0):
                shrinking[name] = config
    growing = {name: config for name, config in reversed(configs.items()) if name not in shrinking}
    return shrinking | growing


def _make_room(triton: Triton, configs: dict[str, Config]) -> None:
    """Unload each generating model that is to change: the old and the new one may not fit into memory together."""
    for name, config in configs.items():
        # An error means that the model is not loaded, or that the server is gone.
        with contextlib.suppress(TritonError):
            if generates(config) and not _held(triton, {name: config}):
                triton.unload(name, UNLOAD_S)


def _load_all(triton: Triton, configs: dict[str, Config], deadline: float) -> dict[str, TritonError]:
    """Load each model, whether or not another one fails; return the errors by model."""
    errors = {}
    for name, config in configs.items():
        try:
            _load(triton, name, config, deadline)
        except TritonError as error:
            if error.status == 403:
                raise UserError(
                    "Triton refuses model control: TRITON_ADMIN_KEY is not the one the server was started with"
                ) from None
            errors[name] = error
    return errors


def _load(triton: Triton, model: str, config: Config, deadline: float) -> None:
    while True:
        try:
            return triton.load(model, config)
        except TritonError as error:
            # Without a status the server is gone, and a supervisor may be restarting it.
            if error.status or time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _held(triton: Triton, configs: dict[str, Config]) -> bool:
    return all(_same(triton.config(name), config) for name, config in configs.items())


def _journal(triton: Triton, folder: Path) -> Path:
    return folder / f".restore-{triton.name}.json"


def _same(current: Config, loaded: Config) -> bool:
    """Compare two configurations, but for what Triton fills in and for the watchdog's count of reloads."""
    current, loaded = _without_count(current), _without_count(loaded)
    ours = {key: value for key, value in loaded.items() if key != "dynamic_batching"}
    return all(current.get(key) == value for key, value in ours.items()) and _delay(current) == _delay(loaded)


def _delay(config: Config) -> int | None:
    """Return how long the dynamic batcher waits for more requests; None without it."""
    batcher = config.get("dynamic_batching")
    return None if batcher is None else int(batcher.get("max_queue_delay_microseconds", 0))


def _without_count(config: Config) -> Config:
    return config | {"parameters": {k: v for k, v in config.get("parameters", {}).items() if k != "watchdog_reloads"}}


# --- whether the server can run one instance for each core ------------------------------------------------------------

# A new process needs this many times the memory that a running one uses.
HEADROOM = 1.1
# Kind of an instance group that does not use the server's cores -> where its instances run.
DEVICES = {"KIND_GPU": "on a GPU", "KIND_MODEL": "where its backend puts them, as on NeuronCores"}


@dataclass(frozen=True)
class Capacity:
    """The server's cores and memory, as the backends report them from where Triton runs."""

    cores: int
    free_bytes: float = float("inf")
    process_bytes: dict[str, float] = field(default_factory=dict)  # of one instance of each model

    @classmethod
    def from_server(cls, settings: Settings) -> Capacity:
        text = metrics_page(settings.url("TRITON_METRICS_PORT"))
        return cls.from_metrics(text, settings.triton_cpus, settings.triton_shm_bytes)

    @classmethod
    def from_metrics(cls, text: str, cpus: str, shared_memory: int) -> Capacity:
        """Read Triton's metrics. A server without backends of this project reports neither cores nor memory."""
        values: dict[str, dict[str, float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                # The gauges of unloaded models are 0.
                if sample.name.startswith("transformers_") and sample.value:
                    values.setdefault(sample.name, {})[sample.labels["model"]] = sample.value
        cores = max(values.get("transformers_cpus", {}).values(), default=0)
        if not cores:
            return cls(len(cpu_list(cpus)) or psutil.cpu_count() or 1)
        used, limit = (max(values[f"transformers_memory_{name}_bytes"].values()) for name in ("used", "limit"))
        # Triton gives each process its shared memory at once, whether or not the process uses it.
        own = values["transformers_process_memory_bytes"]
        return cls(int(cores), limit - used, {model: size + shared_memory for model, size in own.items()})

    def obstacle(self, configs: dict[str, Config]) -> str:
        """Return why the server cannot run these models as one instance for each core, or nothing."""
        if self.cores == 1:
            return "the server has one core, so this would be the mode none again"
        for name, config in configs.items():
            if generates(config):
                return f"each instance of '{name}' would hold the model's weights again"
            if "sequence_batching" in config:
                return f"'{name}' keeps the state of its sequences between requests"
            for group in config.get("instance_group", []):
                if group["kind"] in DEVICES:
                    return f"the instances of '{name}' do not run on the server's cores, but {DEVICES[group['kind']]}"
        needed = self.cores * sum(self.process_bytes.get(name, 0) for name in configs) * HEADROOM
        if needed > self.free_bytes:
            return (
                f"{self.cores} instances of each model need about {needed / 1e9:.1f} GB of memory, and "
                f"{self.free_bytes / 1e9:.1f} GB are free where Triton runs"
            )
        return ""
