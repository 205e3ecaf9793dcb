"""The table of all tasks, joined from those of the families."""

from __future__ import annotations

from triton_transformers.tasks import generation, images, sound, texts, vectors

TASKS = images.TASKS | texts.TASKS | vectors.TASKS | sound.TASKS | generation.TASKS
PIPELINE_TASKS = {name: task for name, task in TASKS.items() if task.fields}
ENCODERS = {name: task.encoder for name, task in TASKS.items() if task.encoder}


def task_of_tensors(inputs: frozenset[str], outputs: frozenset[str]) -> str:
    """Return the first task whose systems have these tensors, or ""."""
    return next((name for name, task in TASKS.items() if task.fits(inputs, outputs)), "")
