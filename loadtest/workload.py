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
        workload = WORKLOADS[settings.choice("WORKLOAD", tuple(WORKLOADS))]
        overrides: dict[str, Any] = {}
        if settings["USERS"]:
            overrides["users"] = settings.integer("USERS", minimum=1)
        if settings["SPAWN_RATE"]:
            overrides["spawn_rate"] = settings.number("SPAWN_RATE", minimum=0.1)
        if settings["WAIT"]:
            overrides["wait"] = _think_time(settings["WAIT"])
        if settings["MAX_BATCH"]:
            overrides["max_batch"] = settings.integer("MAX_BATCH", minimum=1)
        return replace(workload, **overrides)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("mixed", MIXED, users=32),
        Workload("published", PUBLISHED, users=300, spawn_rate=3, wait=(0.1, 0.4), max_batch=8),
    )
}


def _think_time(text: str) -> tuple[float, float]:
    try:
        minimum, *rest = (float(part) for part in text.split(","))
        (maximum,) = rest or (minimum,)
    except ValueError:
        raise UserError(f"WAIT={text}: must be a number of seconds, or minimum and maximum as in 0.1,0.4") from None
    if not 0 <= minimum <= maximum < float("inf"):
        raise UserError(f"WAIT={text}: the minimum must be at least 0 and at most the maximum")
    return minimum, maximum
