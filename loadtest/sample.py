"""The measurements of one request."""

from __future__ import annotations

from typing import NamedTuple


class Sample(NamedTuple):
    """One request: when its response came, how long it took, and what went wrong.

    `at` counts seconds from when the window opened; in a finished window, from when the comparison began. In an open
    loop, `latency_ms` counts from when the request arrived, and a user sent it `late_ms` after that.
    """

    at: float
    latency_ms: float
    error: str
    late_ms: float = 0.0

    @property
    def arrived(self) -> float:
        """Return when the request arrived in an open loop, or was sent in a closed one; on the same clock as `at`."""
        return self.at - self.latency_ms / 1000
