"""The places of GATEWAY_IN_FLIGHT: each request holds one, until nothing of it runs, in the gateway or in Triton."""

from __future__ import annotations

from contextvars import ContextVar

from gateway.counters import Counters


class Place:
    """The place of one request. Parts of it that Triton still runs after the client has left hold the place, too."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._holders = 0

    def hold(self) -> None:
        self._holders += 1
        self._counters.running += self._holders == 1

    def release(self) -> None:
        self._holders -= 1
        self._counters.running -= self._holders == 0


# The place of the request that this task answers. Tasks that it starts inherit it.
PLACE: ContextVar[Place] = ContextVar("place")
