"""Refuse what a release of transformers cannot do here: TRANSFORMERS may name one that the exporters do not support."""

from __future__ import annotations

import re

from scripts.common.settings import UserError

NEWEST = 5  # that the exporters support
# The formats that only copy a model, and the tasks that sentence-transformers reads in every format.
COPIES = ("python", "vllm")
SENTENCE_TASKS = ("sentence-similarity", "sparse-embedding", "text-ranking")


def release_of(requirement: str) -> int:
    """Return the major release that a requirement of pip sets at least, or 0 if it sets none."""
    bounds = re.findall(r"(?:==|>=|~=|>)\s*(\d+)", requirement)
    return max(map(int, bounds), default=0)


def check_release(release: int, system: str, task: str, form: str) -> None:
    """Raise if the exporters do not support this release for the task and the format. An empty task is unknown yet."""
    if release <= NEWEST or (form in COPIES and task not in SENTENCE_TASKS):
        return
    instead = (
        f"TASK={task} needs transformers {NEWEST} in every format: leave TRANSFORMERS unset"
        if task in SENTENCE_TASKS
        else "set FORMAT=python, which exports nothing, or leave TRANSFORMERS unset"
    )
    raise UserError(
        f"{system} cannot be exported with transformers {release}, which TRANSFORMERS installs: {instead}, until a "
        "release of this project supports it"
    )
