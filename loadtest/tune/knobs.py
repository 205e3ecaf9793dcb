"""The knobs of `make tune`: the choices in each model of a system, and the configurations that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from loadtest.server.generating import with_limit
from loadtest.server.switching import DEFAULT_THREADS, DEVICES, THREADS, with_batching, with_instances, without_batching
from triton_transformers.engines import GRAPH_CHOICES
from triton_transformers.protocol import FIRST_CORE
from triton_transformers.triton import Config, called, generates, is_front, text_limit

Value = int | str
# model -> knob -> value
Changes = dict[str, dict[str, Value]]

BATCH_SIZES = (1, 4, 8, 16, 32, 64, 128)
# A knob has at most this many other batch sizes: the next ones around the present.
NEIGHBOURS = 4
# Larger batches than this seldom gain much.
USUAL_BATCH_SIZE = 32
DELAYS_US = (0, 500, 2000, 8000)
ENGINES = GRAPH_CHOICES["auto"]
# Backends that compute with several threads.
THREADED = ("onnxruntime", "openvino", "packed_onnx", "pytorch", "transformers")
ON, OFF = "on", "off"


@dataclass(frozen=True)
class Knob:
    """One choice in one model: its values, the present one first, and the one that is right for most models."""

    model: str
    name: str
    values: tuple[Value, ...]
    apply: Callable[[Config, Value], Config]
    usual: Value | None = None


@dataclass(frozen=True)
class Candidate:
    """A configuration of the system, as its differences from the original."""

    changes: tuple[tuple[str, str, Value], ...] = ()  # model, knob, value

    def value(self, knob: Knob) -> Value:
        return next((v for model, name, v in self.changes if (model, name) == (knob.model, knob.name)), knob.values[0])

    def with_value(self, knob: Knob, value: Value) -> Candidate:
        others = [c for c in self.changes if c[:2] != (knob.model, knob.name)]
        own = [(knob.model, knob.name, value)] if value != knob.values[0] else []
        return Candidate(tuple(sorted([*others, *own], key=lambda change: change[:2])))

    def as_changes(self) -> Changes:
        changes: Changes = {}
        for model, name, value in self.changes:
            changes.setdefault(model, {})[name] = value
        return changes

    @property
    def label(self) -> str:
        parts = [label(model, name, value) for model, name, value in self.changes]
        return ", ".join(parts) or "as configured"


def label(model: str, knob: str, value: Value) -> str:
    return f"{model}: {knob} {value}"


def all_knobs(configs: Mapping[str, Config], cores: int, engines: Mapping[str, str]) -> list[Knob]:
    """Return the knobs of each model in turn; `engines` is what triton_transformers.triton.engines() returns."""
    knobs: list[Knob] = []
    for model, config in configs.items():
        if "ensemble_scheduling" in config or "sequence_batching" in config or is_front(config):
            continue
        if generates(config):
            texts = around(text_limit(config))
            knobs.append(Knob(model, "max_batch", texts, lambda config, value: with_limit(config, int(value))))
            continue
        kinds = {group["kind"] for group in config.get("instance_group", [])}
        compiled = FIRST_CORE in config.get("parameters", {})
        if not compiled and not kinds - {"KIND_CPU", "KIND_GPU", "KIND_AUTO"}:
            knobs.append(instances_knob(model, config, cores, bool(kinds & DEVICES.keys())))
        if config.get("max_batch_size", 0) > 0:
            if not compiled:
                present = config["max_batch_size"]
                usual = max(present, USUAL_BATCH_SIZE)
                knobs.append(Knob(model, "max_batch_size", around(present), set_max_batch_size, usual))
            knobs.append(batching_knob(model, config))
            knobs.append(delay_knob(model, config))
        if engine := engine_knob(model, config, engines.get(model, "")):
            knobs.append(engine)
    return [knob for knob in knobs if len(knob.values) > 1]


def configure(configs: Mapping[str, Config], knobs: list[Knob], candidate: Candidate) -> dict[str, Config]:
    """Return the configuration of each model; it may not batch more than those that it calls."""
    configured = dict(configs)
    for knob in knobs:
        value = candidate.value(knob)
        if value != knob.values[0]:
            configured[knob.model] = knob.apply(configured[knob.model], value)
    # Models come after those that call them, so an ensemble in an ensemble is limited first.
    for name in reversed(configured):
        config = configured[name]
        steps = called(config)
        if steps and config.get("max_batch_size"):
            batched = min(configured[step]["max_batch_size"] for step in steps)
            configured[name] = config | {"max_batch_size": min(config["max_batch_size"], batched)}
    return configured


def around(present: int) -> tuple[int, ...]:
    """Return the present batch size, and those around it."""
    others = sorted(set(BATCH_SIZES) - {present})
    below = sum(size < present for size in others)
    first = max(0, min(below - NEIGHBOURS // 2, len(others) - NEIGHBOURS))
    return (present, *others[first : first + NEIGHBOURS])


def set_max_batch_size(config: Config, size: Value) -> Config:
    changed = config | {"max_batch_size": int(size)}
    batcher = config.get("dynamic_batching")
    if batcher is None:
        return changed
    # Triton prefers the max_batch_size if the file prefers nothing. Under a larger one, it would end batches there.
    if batcher.get("preferred_batch_size") == [config["max_batch_size"]]:
        changed["dynamic_batching"] = batcher | {"preferred_batch_size": []}
    return with_batching(changed)


def batching_knob(model: str, config: Config) -> Knob:
    values = (ON, OFF) if "dynamic_batching" in config else (OFF, ON)

    def apply(config: Config, value: Value) -> Config:
        return with_batching(config) if value == ON else without_batching(config)

    return Knob(model, "dynamic_batching", values, apply, usual=ON)


def delay_knob(model: str, config: Config) -> Knob:
    present = int(config.get("dynamic_batching", {}).get("max_queue_delay_microseconds", 0))

    def apply(config: Config, value: Value) -> Config:
        if "dynamic_batching" not in config:
            return config
        batcher = config["dynamic_batching"] | {"max_queue_delay_microseconds": int(value)}
        return config | {"dynamic_batching": batcher}

    others = [delay for delay in DELAYS_US if delay != present]
    return Knob(model, "max_queue_delay_microseconds", (present, *others), apply, usual=0)


def instances_knob(model: str, config: Config, cores: int, on_device: bool) -> Knob:
    """Return the knob for the number of instances, and of the threads of each on a CPU."""
    groups = config.get("instance_group") or [{"kind": "KIND_CPU", "count": 1}]
    count = sum(int(group.get("count", 1)) for group in groups)
    parameter = THREADS.get(config.get("backend", ""), DEFAULT_THREADS)
    if on_device or config.get("backend") not in THREADED:
        counts = [n for n in (1, 2, 4 if on_device else cores) if n != count]
        values = (count, *dict.fromkeys(counts))
        return Knob(model, "instances", values, lambda config, value: with_instances(config, int(value), ""), usual=1)
    threads = int(config.get("parameters", {}).get(parameter, {}).get("string_value", 0))
    # Without a number, the instances share all cores equally.
    present = times(count, threads or max(1, cores // count))
    halves = max(1, cores // 2)
    choices = [(1, cores), (2, halves), (cores, 1), (2, cores), (1, halves)]
    others = [value for n, t in choices if (value := times(n, t)) != present]

    def apply(config: Config, value: Value) -> Config:
        instances, threads = str(value).split(" x ")
        return with_instances(config, int(instances), threads.removesuffix(" threads"))

    return Knob(model, "instances", (present, *dict.fromkeys(others)), apply, usual=times(1, cores))


def times(instances: int, threads: int) -> str:
    return f"{instances} x {threads} threads"


def engine_knob(model: str, config: Config, engine: str) -> Knob | None:
    """Return the knob for the engine of an ONNX model, if its backend chooses one on a CPU."""
    present = engine.replace(" ", "-").replace("onnxruntime-f32", "onnxruntime")
    if present not in ENGINES or "execution_accelerators" in config.get("optimization", {}):
        return None
    only_f32 = config.get("parameters", {}).get("precision", {}).get("string_value") == "f32"
    others = [name for name in ENGINES if name != present and not (only_f32 and name.endswith("bf16"))]

    def apply(config: Config, value: Value) -> Config:
        return config | {"parameters": config.get("parameters", {}) | {"engine": {"string_value": str(value)}}}

    return Knob(model, "engine", (present, *others), apply)


def changed_fields(original: Config, changed: Config) -> dict[str, Any]:
    """Return the fields that differ, None for one that is gone, and of the parameters only those that differ."""
    fields = {key: changed.get(key) for key in {**original, **changed} if original.get(key) != changed.get(key)}
    if "parameters" in fields:
        before = original.get("parameters", {})
        fields["parameters"] = {k: v for k, v in changed["parameters"].items() if before.get(k) != v}
    return fields
