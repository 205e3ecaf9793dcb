"""The goal of a search, from the settings. It imports no Locust: `make tune` reads it outside the container too."""

from __future__ import annotations

import math
from dataclasses import dataclass

from triton_transformers.settings import Settings, UserError

# A try lasts until it has enough requests to show a 95th percentile, within these limits.
TRY_REQUESTS = 100
MINIMUM_TRY_S, MAXIMUM_TRY_S = 3.0, 30.0
# The highest rate that meets a target takes at least this many tries.
MINIMUM_TRIES = 3
# Measurements of the original configuration before the first race, which show the machine's noise.
FIRST_MEASUREMENTS = 3
# Pairs of the confirmation at the end.
MINIMUM_PAIRS, MAXIMUM_PAIRS = 4, 8
# Measurements of the shortest search: one candidate races for two rounds, and is confirmed.
MINIMUM_MEASUREMENTS = FIRST_MEASUREMENTS + 2 * 2 + 2 * MINIMUM_PAIRS
# Seconds for the report, besides the load that restores the configuration.
REPORT_S = 15.0
# Seconds before each try that are not measured.
WARM_UP_S = 0.5
# The link in REPORTS to the newest result.
LATEST = "latest-tune"
# The folder of a result with the winner's files, as they belong into the model repository.
WINNER = "winner"


@dataclass(frozen=True)
class Goal:
    """Either a limit of the 95th percentile in milliseconds, or a rate in requests per second; the other one is 0."""

    p95_ms: float = 0.0
    rate: float = 0.0

    @classmethod
    def from_settings(cls, settings: Settings) -> Goal:
        p95, rate = settings.p95 or 0.0, settings.rate or 0.0
        if bool(p95) == bool(rate):
            raise UserError(
                "set either P95, in milliseconds, for the most requests per second within it (make tune P95=100), or "
                "RATE, in requests per second, for the lowest p95 at that rate (make tune RATE=200)"
            )
        if pace := [name for name in ("WAIT", "SPAWN_RATE") if settings[name]]:
            raise UserError(
                f"`make tune` lets requests arrive at a rate, whatever users do; clear {' and '.join(pace)}"
            )
        goal, minutes = cls(p95, rate), settings.minutes
        if minutes < (smallest := goal.minutes(math.inf)):
            raise UserError(
                f"MINUTES={minutes:g}: even on a fast machine this search takes {smallest} minutes, because every "
                f"number in its verdict is measured at least twice: set MINUTES={smallest} or more"
            )
        return goal

    def minutes(self, rate: float, load_s: float = 0.0) -> int:
        """Return the smallest MINUTES for a verdict about a server that answers `rate` requests per second.

        `load_s` is how long it takes to load a configuration, which about every second measurement needs.
        """
        tries = 1 if self.rate else MINIMUM_TRIES
        measurement_s = tries * (WARM_UP_S + try_s(self.rate or rate)) + load_s / 2
        return math.ceil((MINIMUM_MEASUREMENTS * measurement_s + load_s + REPORT_S) / 60)

    @property
    def larger_is_better(self) -> bool:
        """Return whether a measurement is a rate, not a latency."""
        return bool(self.p95_ms)


def try_s(rate: float, minimum: float = MINIMUM_TRY_S) -> float:
    """Return how many seconds a try at that rate lasts."""
    return min(max(minimum, TRY_REQUESTS / rate), MAXIMUM_TRY_S)
