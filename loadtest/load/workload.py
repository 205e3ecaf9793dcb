"""The named workloads: their texts, how many users send them, and at what pace."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from triton_transformers.corpus import MIXED, PUBLISHED, Corpus
from triton_transformers.settings import Settings, UserError

# Users of an open loop: the requests that can be at the server at once. Those that are idle cost nothing.
POOL = 256
POOL_SPAWN_RATE = 100.0  # per second; above it, Locust warns


@dataclass(frozen=True)
class Workload:
    """A load: the texts, the number of users and their pace. Settings override the fields of a named workload."""

    name: str
    corpus: Corpus
    users: int
    generating_users: int | None = None  # of systems that generate text, if fewer
    spawn_rate: float | None = None  # users started per second; None: all at once
    wait: tuple[float, float] = (0.0, 0.0)  # minimum and maximum think time, in seconds
    max_batch: int | None = None
    rate: float = 0.0  # requests that arrive per second (an open loop); 0: users send them at their pace

    @classmethod
    def from_settings(cls, settings: Settings, generates: bool = False) -> Workload:
        """Return the workload of the settings, for a system that generates text or for any other."""
        if settings.protocol == "openai" and settings.api_keys and not settings.plain_api_key():
            raise UserError(
                "PROTOCOL=openai: API_KEYS has only digests, from which no key can be computed: add a key in plain text"
            )
        workload = WORKLOADS[settings.workload]
        overrides: dict[str, Any] = {}
        if rate := settings.rate:
            if chosen := [name for name in ("WAIT", "SPAWN_RATE") if settings[name]]:
                raise UserError(
                    f"RATE={settings['RATE']}: requests arrive at this rate, whatever users do; clear "
                    f"{' and '.join(chosen)}"
                )
            overrides |= {"rate": rate, "users": POOL, "spawn_rate": POOL_SPAWN_RATE, "wait": (0.0, 0.0)}
        elif generates and workload.generating_users:
            overrides["users"] = workload.generating_users
        for name in ("users", "spawn_rate", "wait", "max_batch"):
            if (value := getattr(settings, name)) is not None:
                overrides[name] = value
        return replace(workload, **overrides)


WORKLOADS = {
    workload.name: workload
    for workload in (
        # One at a time, a text waits for those of all other users: 32 would wait for a minute.
        Workload("mixed", MIXED, users=32, generating_users=8),
        Workload("published", PUBLISHED, users=300, spawn_rate=3, wait=(0.1, 0.4), max_batch=8),
    )
}


def worker_count(settings: Settings, workload: Workload) -> int:
    """Return how many worker processes run the users; with 0 the comparison's own process does."""
    workers = settings.workers or 0
    if workers > workload.users:
        raise UserError(f"WORKERS={workers}: must be at most USERS, which is {workload.users}")
    return workers
