"""The named workloads: their texts, how many users send them, and at what pace."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from scripts.common.corpus import MIXED, PUBLISHED, Corpus
from scripts.common.settings import Settings, UserError


@dataclass(frozen=True)
class Workload:
    """A load: the texts, the number of users and their pace. Settings override the fields of a named workload."""

    name: str
    corpus: Corpus
    users: int
    spawn_rate: float | None = None  # users started per second; None: all at once
    wait: tuple[float, float] = (0.0, 0.0)  # minimum and maximum think time, in seconds
    max_batch: int | None = None

    @classmethod
    def from_settings(cls, settings: Settings) -> Workload:
        workload = WORKLOADS[settings.choice("WORKLOAD")]
        overrides: dict[str, Any] = {}
        if settings["USERS"]:
            overrides["users"] = settings.integer("USERS")
        if settings["SPAWN_RATE"]:
            overrides["spawn_rate"] = settings.number("SPAWN_RATE")
        if settings["WAIT"]:
            overrides["wait"] = settings.interval("WAIT")
        if settings["MAX_BATCH"]:
            overrides["max_batch"] = settings.integer("MAX_BATCH")
        return replace(workload, **overrides)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("mixed", MIXED, users=32),
        Workload("published", PUBLISHED, users=300, spawn_rate=3, wait=(0.1, 0.4), max_batch=8),
    )
}


def worker_count(settings: Settings, workload: Workload) -> int:
    """Return how many worker processes run the users; with 0 the comparison's own process does."""
    workers = settings.integer("WORKERS") if settings["WORKERS"] else 0
    if workers > workload.users:
        raise UserError(f"WORKERS={workers}: must be at most USERS, which is {workload.users}")
    return workers
