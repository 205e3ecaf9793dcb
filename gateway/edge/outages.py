"""Hold requests while Triton restarts after a crash, instead of failing them at once.

Triton's supervisor and the watchdog restart it within seconds. Until then the gateway holds a request and sends it
again. The limits of requests in flight and of their time hold meanwhile.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from gateway.edge.errors import ApiError

Result = TypeVar("Result")

# How long an outage may last. Then requests fail at once, until the next outage.
LIMIT_S = 15.0
# A failure begins another outage if there was none for this long.
QUIET_S = 2.0
# The time between two attempts, on average: so short that clients hardly notice it, and so long that 256 requests take
# a tenth of a core, which Triton needs for its start.
PAUSE_S = 0.5


class Outages:
    """The newest outage of each system: when its first and its last failure were."""

    def __init__(self) -> None:
        self._failures: dict[str, tuple[float, float]] = {}

    async def answer(self, send: Callable[[], Awaitable[Result]]) -> Result:
        """Return the result of `send`. Call it again as long as an outage is the reason of its ApiError."""
        give_up = time.monotonic() + LIMIT_S
        while True:
            try:
                return await send()
            except ApiError as failure:
                if failure.outage is None or time.monotonic() >= min(give_up, self._end(failure.outage)):
                    raise
            await asyncio.sleep(PAUSE_S * random.uniform(0.5, 1.5))

    def _end(self, system: str) -> float:
        """Record a failure of the system, and return when to give it up."""
        now = time.monotonic()
        first, last = self._failures.get(system, (now, -QUIET_S))
        if now >= last + QUIET_S:
            first = now
        self._failures[system] = first, now
        return first + LIMIT_S
