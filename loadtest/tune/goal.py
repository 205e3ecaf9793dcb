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
    """Either limits of the 95th percentile in milliseconds, or a rate in requests per second; what is not set is 0.

    `p95_ms` is that of the whole answer, `first_token_ms` that of the first token of a streamed text.
    """

    p95_ms: float = 0.0
    rate: float = 0.0
    first_token_ms: float = 0.0

    @classmethod
    def from_settings(cls, settings: Settings) -> Goal:
        p95, rate, first_token = settings.p95 or 0.0, settings.rate or 0.0, settings.p95_first_token or 0.0
        if bool(p95 or first_token) == bool(rate):
            raise UserError(
                "set either P95, in milliseconds, for the most requests per second within it (make tune P95=100), or "
                "RATE, in requests per second, for the lowest p95 at that rate (make tune RATE=200). P95 times a whole "
                "text, P95_FIRST_TOKEN its first token"
            )
        if first_token and settings.protocol != "openai":
            raise UserError("P95_FIRST_TOKEN times streams, which only PROTOCOL=openai has: set that too")
        if pace := [name for name in ("WAIT", "SPAWN_RATE") if settings[name]]:
            raise UserError(
                f"`make tune` lets requests arrive at a rate, whatever users do; clear {' and '.join(pace)}"
            )
        goal, minutes = cls(p95, rate, first_token), settings.minutes
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
        return not self.rate

    @property
    def target_ms(self) -> float:
        return self.p95_ms or self.first_token_ms

    def timed_ms(self, latency_ms: float, first_token_ms: float | None) -> float:
        """Return what the target is compared with. Of two targets, a request counts by the one that it misses most."""
        if not self.first_token_ms:
            return latency_ms
        first_ms = latency_ms if first_token_ms is None else first_token_ms
        return max(latency_ms, first_ms * self.p95_ms / self.first_token_ms) if self.p95_ms else first_ms


def try_s(rate: float, minimum: float = MINIMUM_TRY_S) -> float:
    """Return how many seconds a try at that rate lasts."""
    return min(max(minimum, TRY_REQUESTS / rate), MAXIMUM_TRY_S)
