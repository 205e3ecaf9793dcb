"""The goal of a search, from the settings. It imports no Locust: `make tune` reads it outside the container too."""

from __future__ import annotations

from dataclasses import dataclass

from scripts.common.settings import Settings, UserError

# The link in REPORTS to the newest result.
LATEST = "latest-tune"


@dataclass(frozen=True)
class Goal:
    """Either a limit of the 95th percentile in milliseconds, or a rate in requests per second; the other one is 0."""

    p95_ms: float = 0.0
    rate: float = 0.0

    @classmethod
    def from_settings(cls, settings: Settings) -> Goal:
        p95, rate = (settings.number(name) if settings[name] else 0.0 for name in ("P95", "RATE"))
        if bool(p95) == bool(rate):
            raise UserError(
                "set either P95, in milliseconds, for the most requests per second within it (make tune P95=100), or "
                "RATE, in requests per second, for the lowest p95 at that rate (make tune RATE=200)"
            )
        if pace := [name for name in ("WAIT", "SPAWN_RATE") if settings[name]]:
            raise UserError(
                f"`make tune` lets requests arrive at a rate, whatever users do; clear {' and '.join(pace)}"
            )
        return cls(p95, rate)

    @property
    def larger_is_better(self) -> bool:
        """Return whether a measurement is a rate, not a latency."""
        return bool(self.p95_ms)
