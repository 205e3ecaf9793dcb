"""Decide how a checkpoint is served: its task and its format, or a refusal in one sentence."""

from __future__ import annotations

from pathlib import Path

from export.catalogue import RECIPES, Job, System
from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.tasks import needs_pipeline
from export.checkpoint.unsupported import check
from export.drafts import check_draft
from export.neuron.target import Target
from export.sources.source import Weights
from triton_transformers.cli import out
from triton_transformers.settings import Settings, UserError
from triton_transformers.tasks.task import PIPELINE

SHOWN_KEYS = 8


def decide(system: System, weights: Weights, folder: Path, settings: Settings) -> Job:
    """Return the order to the recipe of the system's task."""
    checkpoint = Checkpoint(weights.name, weights.folder, settings.trust_remote_code)
    task, ignored = check(checkpoint, system.task)
    if ignored:
        more = f" and {len(ignored) - SHOWN_KEYS} more" if len(ignored) > SHOWN_KEYS else ""
        out.print(f"{system.name}: not read by transformers: {', '.join(ignored[:SHOWN_KEYS])}{more}", markup=False)
    recipe = RECIPES[task]
    target = Target.from_settings(settings) if recipe.neuron else None
    if target and settings.format:
        raise UserError(f"PROFILE=neuron compiles {system.name} ({task}) for Neuron: leave FORMAT empty")
    if system.format:
        check_format(system.name, task, system.format)
    form = "neuron" if target else system.format or recipe.default_format(settings.profile)
    if not system.format and needs_pipeline(task, checkpoint):
        form = PIPELINE
    if form == PIPELINE and settings.profile == "neuron":
        raise UserError(
            f"{system.name} ({task}) runs as a pipeline of PyTorch, which AWS Neuron has no compiler for: "
            "set PROFILE=cpu or cuda"
        )
    if system.min_quality and form != "int8":
        raise UserError(f"MIN_QUALITY: {system.name} is {task} ({form}), and only FORMAT=int8 measures what it keeps")
    if system.draft:
        check_draft(system.name, task, form)
    return Job(
        system=system.name,
        task=task,
        format=form,
        weights=weights.folder,
        movable=weights.movable,
        folder=folder,
        trust_remote_code=settings.trust_remote_code,
        neuron=target,
        profile=settings.profile,
        min_quality=system.min_quality,
    )


def check_format(system: str, task: str, form: str) -> None:
    """Raise UserError if no system of the task has the format."""
    if form not in (formats := RECIPES[task].formats):
        raise UserError(f"FORMAT={form} is not available for {system} ({task}): set FORMAT to {' or '.join(formats)}")
