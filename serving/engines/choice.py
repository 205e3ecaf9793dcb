"""Chooses the engine of a model: the fastest on this machine whose answers agree with ONNX Runtime's."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime as ort

from serving.engines import measurements
from serving.engines.graphs import Engine, EngineError, OnnxRuntimeEngine, OpenVinoGraph, check_openvino
from serving.triton import parameters
from serving.triton.parameters import choice_parameter
from serving.triton.types import Array, ConfigError, ModelConfig, Tensors
from triton_transformers.answers import LIMITS, Limits, difference, smallest_cosine
from triton_transformers.engines import BF16, ENCODER_CHOICES, F32, GRAPH_CHOICES, ONNX_RUNTIME, TORCH_CHOICES

# Another engine replaces ONNX Runtime if its answers agree and it takes at most this share of the time.
WORTHWHILE = 0.9
ROUNDS = 5
MEASURING_S = 2.0
# Increase it when a new version of this project may decide otherwise.
VERSION = 3


@dataclass(frozen=True)
class Candidate:
    """The measurements of one engine, or the reason why it cannot run the model."""

    seconds: float = math.inf
    cosine: float = 1.0  # the smallest with ONNX Runtime's answer to the same row
    difference: float = 0.0  # the largest from ONNX Runtime's answer, as a share of the tensor's largest value
    error: str = ""
    limits: Limits = LIMITS["engine", "graph"]

    @classmethod
    def compared(cls, expected: list[list[Array]], actual: list[list[Array]], form: str = "graph") -> Candidate:
        pairs = [pair for answers in zip(expected, actual, strict=True) for pair in zip(*answers, strict=True)]
        if any(a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()) for a, b in pairs):
            return cls(error="answers with numbers that are not finite, or in another shape")
        return cls(
            cosine=min(smallest_cosine(a, b) for a, b in pairs),
            difference=max(difference(a, b) for a, b in pairs),
            limits=LIMITS["engine", form],
        )

    @property
    def agrees(self) -> bool:
        return not self.error and self.limits.allow(self.cosine, self.difference)

    @property
    def likeness(self) -> str:
        return f"cosine {self.cosine:.5f}, largest difference {self.difference:.1%}"

    def __str__(self) -> str:
        if self.error:
            return self.error
        if not self.agrees:
            return f"answers differently, {self.likeness}"
        return f"{self.seconds * 1e3:.1f} ms" + (f", cosine {self.cosine:.5f}" if self.cosine < 1 else "")


@dataclass(frozen=True)
class Subject:
    """A model whose engine is to be chosen."""

    name: str  # for people, and for the file that keeps the decision
    path: Path
    reference: OnnxRuntimeEngine
    inputs: dict[str, type]
    outputs: dict[str, type]
    threads: int
    parallel_runs: int
    # Yields groups of inputs. The model is measured on the first group of which it accepts any.
    samples: Callable[[dict[str, int]], Iterable[list[Tensors]]]

    def open_graph(self) -> OpenVinoGraph:
        return OpenVinoGraph(self.path, list(self.outputs))

    def compile(self, graph: OpenVinoGraph, engine: str) -> Engine:
        return graph.compile(engine.removeprefix("openvino-"), self.threads, self.parallel_runs)


def engine_choices(config: ModelConfig) -> tuple[str, ...]:
    """Return the engines from which this model may choose, by its config.pbtxt or else by the server's setting."""
    setting = engine_setting()
    if setting in TORCH_CHOICES:
        setting = "auto"
    choice = choice_parameter(config, "engine", tuple(GRAPH_CHOICES), _accelerator(config) or setting)
    # A model whose next run depends on this one's answer, such as GPT-2, keeps to f32: rounded logits that nearly tie
    # would continue the same text differently alone and in a batch.
    if choice_parameter(config, "precision", ("auto", "f32"), "auto") == "f32":
        return tuple(name for name in GRAPH_CHOICES[choice] if name != BF16) or (F32,)
    if choice == BF16:
        parameters.check_bf16(f"engine '{BF16}'", f"another of {', '.join(GRAPH_CHOICES)}")
    return tuple(name for name in GRAPH_CHOICES[choice] if name != BF16 or parameters.has_bf16())


def engine_setting() -> str:
    """Return the engine of all models that choose none themselves. It may name an engine of another kind of model."""
    setting = os.environ.get("TRITON_ENGINE") or "auto"
    if setting not in ENCODER_CHOICES:
        raise ConfigError(f"TRITON_ENGINE must be one of {', '.join(ENCODER_CHOICES)}, not '{setting}'")
    return setting


def _accelerator(config: ModelConfig) -> str:
    """Return the engine that `optimization { execution_accelerators }` asks for, in the words of NVIDIA's backend."""
    accelerators = config.get("optimization", {}).get("execution_accelerators", {})
    for accelerator in accelerators.get("cpu_execution_accelerator", []):
        if accelerator["name"] != "openvino":
            raise ConfigError(f"cpu_execution_accelerator must be 'openvino', not '{accelerator['name']}'")
        precision = accelerator.get("parameters", {}).get("precision", "").lower().replace("fp", "f")
        if precision not in ("", "f32", "bf16"):
            raise ConfigError(f"parameter 'precision' of openvino must be f32 or bf16, not '{precision}'")
        return f"openvino-{precision}" if precision else "openvino"
    return ""


def choose_engine(subject: Subject, choices: tuple[str, ...]) -> tuple[Engine, str]:
    """Return the engine to run the model on, and the reason.

    Raise ConfigError if ONNX Runtime is not among the choices and no other engine can run the model.
    """
    engine: Engine = subject.reference
    reason = "configured"
    try:
        if choices != (ONNX_RUNTIME,):
            check_openvino(subject.inputs, subject.outputs)
            if len(choices) == 1:
                engine = subject.compile(subject.open_graph(), choices[0])
            else:
                engine, reason = _remembered_or_measured(subject, choices)
    except EngineError as error:
        if ONNX_RUNTIME not in choices:
            raise ConfigError(f"{error}: choose another engine for {subject.path}, such as auto") from error
        reason = str(error)
    return engine, reason


def _remembered_or_measured(subject: Subject, choices: tuple[str, ...]) -> tuple[Engine, str]:
    engine: Engine | None = None

    def measure() -> measurements.Measured:
        nonlocal engine
        engine, reason = _measure(subject, choices)
        choice = engine.name if engine is subject.reference else f"{engine.name}-{engine.precision}"
        return {"engine": choice, "reason": reason}

    def key() -> measurements.Measured:
        # Threads are left out, so that all modes of a comparison use one engine.
        own = {"measuring": VERSION, "outputs": list(subject.outputs), "choices": list(choices)}
        return measurements.model_and_machine(subject.path) | own

    decision = measurements.recall_or_measure(
        subject.name, key, measure, lambda kept: kept["engine"] in GRAPH_CHOICES and bool(kept["reason"])
    )
    choice, reason = decision["engine"], decision["reason"]
    if engine:
        return engine, reason
    reason = f"measured before: {reason}"
    return (subject.reference if choice == ONNX_RUNTIME else subject.compile(subject.open_graph(), choice)), reason


def _measure(subject: Subject, choices: tuple[str, ...]) -> tuple[Engine, str]:
    """Return the fastest engine that agrees with ONNX Runtime, and the figures of all."""
    graph = subject.open_graph()
    engines: dict[str, Engine] = {ONNX_RUNTIME: subject.reference}
    candidates = {ONNX_RUNTIME: Candidate()}
    feeds, expected = _accepted_samples(subject, graph.limits)
    for name in choices:
        if name == ONNX_RUNTIME:
            continue
        try:
            engines[name] = subject.compile(graph, name)
            actual = [engines[name].run(list(subject.outputs), feed) for feed in feeds]
        except Exception as error:  # whatever an engine raises, another can serve the model
            candidates[name] = Candidate(error=str(error))
        else:
            candidates[name] = Candidate.compared(expected, actual)
    running = {name: engine for name, engine in engines.items() if candidates[name].agrees}
    for name, seconds in fastest_runs(subject, running, feeds).items():
        candidates[name] = replace(candidates[name], seconds=seconds)
    figures = "; ".join(f"{name} {candidate}" for name, candidate in candidates.items())
    best = min((name for name in running if name in choices), key=lambda name: candidates[name].seconds, default="")
    if not best:
        raise EngineError(f"no engine gives the answers of ONNX Runtime: {figures}")
    if ONNX_RUNTIME in choices and candidates[best].seconds > WORTHWHILE * candidates[ONNX_RUNTIME].seconds:
        best = ONNX_RUNTIME
    return engines[best], figures


def _accepted_samples(subject: Subject, limits: dict[str, int]) -> tuple[list[Tensors], list[list[Array]]]:
    """Return the first samples that ONNX Runtime accepts, and its answers."""
    refusal = ""
    quiet = ort.RunOptions()
    quiet.log_severity_level = 4  # a refused sample is no error of the server
    reference = replace(subject.reference, options=quiet)
    for group in subject.samples(limits):
        accepted = []
        for feed in group:
            try:
                accepted.append((feed, reference.run(list(subject.outputs), feed)))
            except Exception as error:
                refusal = " ".join(str(error).split())
        if accepted:
            return [feed for feed, _ in accepted], [answer for _, answer in accepted]
    raise EngineError(f"not measured, because the model refuses the sample inputs: {refusal}")


def fastest_runs(subject: Subject, engines: dict[str, Engine], feeds: list[Tensors]) -> dict[str, float]:
    """Return the seconds in which each engine runs all feeds, in the round that nothing else disturbed."""
    feeds = feeds * subject.parallel_runs
    best = dict.fromkeys(engines, math.inf)
    start = time.monotonic()
    with ThreadPoolExecutor(subject.parallel_runs) as workers:
        for number in range(ROUNDS):
            if number > 1 and time.monotonic() - start > MEASURING_S:
                break
            for name, engine in engines.items():
                begin = time.perf_counter()
                list(workers.map(partial(engine.run, list(subject.outputs)), feeds))
                best[name] = min(best[name], time.perf_counter() - begin)
    return best
