"""Chooses how a text encoder runs on PyTorch: without padding or with it, and in which precision."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from serving.engines import measurements
from serving.engines.choice import WORTHWHILE, Candidate, engine_setting
from serving.engines.flat.row import likeness
from serving.engines.lean_transformers import transformers
from serving.engines.measurements import Measured
from serving.engines.pretrained import Plan
from serving.triton.parameters import choice_parameter, parameter
from serving.triton.types import Array, ModelConfig
from triton_transformers.engines import ENCODER_CHOICES, FLAT, PADDED, TORCH_CHOICES, TORCH_PRECISIONS

PRECISIONS = dict(zip(TORCH_PRECISIONS, (torch.float32, torch.bfloat16, torch.float16), strict=True))
# Increase it when a new version of this project may decide otherwise.
VERSION = 1


class Trial(NamedTuple):
    """How a model runs in one precision."""

    engine: str
    answers: list[Array]
    seconds: float


def choices(config: ModelConfig, planned: Plan) -> tuple[bool, tuple[str, ...]]:
    """Return whether to leave out padding, and the precisions to choose from; the first is the checkpoint's."""
    engine = choice_parameter(config, "engine", ENCODER_CHOICES, engine_setting())
    on_cuda = planned.device.type == "cuda"
    # On a CPU, flat runs are faster too, but timing them takes seconds of each load.
    flat = engine.startswith(FLAT) or (on_cuda and not engine.startswith(PADDED))
    stored = next(name for name, dtype in PRECISIONS.items() if dtype is planned.dtype)
    if parameter(config, "dtype", "auto") != "auto":
        return flat, (stored,)
    if engine in TORCH_CHOICES and (forced := engine.rpartition("-")[2]) in PRECISIONS:
        return flat, (forced,)
    return flat, (*PRECISIONS,) if on_cuda and stored == "f32" else (stored,)


def choose(name: str, planned: Plan, config: ModelConfig, attempt: Callable[[str], Trial]) -> tuple[str, str]:
    """Return the precision to run in, and the figures of all if they were measured."""
    flat, precisions = choices(config, planned)
    if len(precisions) == 1:
        return precisions[0], ""

    def key() -> Measured:
        return depends_on(planned, config) | {"measuring": VERSION, "choices": [flat, *precisions]}

    try:
        decision = measurements.recall_or_measure(
            f"{name}-precision", key, lambda: measure(precisions, attempt), lambda kept: kept["precision"] in precisions
        )
    except Exception as error:  # if requests would fail too, the load raises it again
        return precisions[0], f"not measured: {' '.join(str(error).split())}"
    return decision["precision"], decision["reason"]


def depends_on(planned: Plan, config: ModelConfig) -> Measured:
    """Return what each measurement of a model on PyTorch depends on."""
    device = torch.cuda.get_device_name(planned.device) if planned.device.type == "cuda" else measurements.cpu()
    return {
        "weights": measurements.files(planned.folder),
        "device": device,
        "threads": torch.get_num_threads(),
        "versions": [torch.__version__, transformers.__version__],
        "parameters": config.get("parameters", {}),
    }


def measure(precisions: tuple[str, ...], attempt: Callable[[str], Trial]) -> Measured:
    """Return the precision whose answers are best among those that take about as long as the fastest."""
    expected: list[Array] = []
    candidates: dict[str, Candidate] = {}
    figures = []
    for precision in precisions:
        try:
            trial = attempt(precision)
        except Exception as error:  # such as too little memory, or an operation that lacks this precision
            if precision == precisions[0]:
                raise
            candidates[precision] = Candidate(error=" ".join(str(error).split()))
            figures.append(f"{precision}: {candidates[precision]}")
            continue
        expected = expected or trial.answers
        candidates[precision] = replace(likeness(expected, trial.answers), seconds=trial.seconds)
        figures.append(f"{trial.engine}-{precision} {candidates[precision]}")
    if not candidates[precisions[0]].agrees:
        raise ValueError("its answers to random tokens are not finite")
    agreeing = {precision: candidate for precision, candidate in candidates.items() if candidate.agrees}
    fastest = min(candidate.seconds for candidate in agreeing.values())
    fast = [precision for precision, candidate in agreeing.items() if WORTHWHILE * candidate.seconds <= fastest]
    return {"precision": max(fast, key=lambda precision: agreeing[precision].cosine), "reason": "; ".join(figures)}


def free_cuda() -> None:
    """Return the memory of models that nothing refers to any more, so that the check of the next one sees it."""
    gc.collect()
    torch.cuda.empty_cache()
