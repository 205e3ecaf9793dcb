"""An open loop: requests arrive at a rate, however slowly the server answers, and users send them.

The latency of a request counts from when it arrived, so a server that stalls delays every request of that time. A
closed loop would send fewer requests during the stall, and measure only those (coordinated omission).
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import gevent
from gevent.event import AsyncResult


class Sample(NamedTuple):
    """One request: when its response came, how long it took, and what went wrong.

    `at` counts seconds from when the window opened; in a finished window, from when the comparison began. In an open
    loop, `latency_ms` counts from when the request arrived, and a user sent it `late_ms` after that. `amount` counts
    what the request had of its unit, such as seconds of sound. A server that has enough to do refuses requests (429).
    Of a streamed text, `first_token_ms` counts until its first token, and `output_token_ms` is the mean of each later
    one.
    """

    at: float
    latency_ms: float
    error: str
    late_ms: float = 0.0
    amount: float = 1.0
    is_refused: bool = False
    first_token_ms: float | None = None
    output_token_ms: float | None = None

    @property
    def arrived(self) -> float:
        """Return when the request arrived in an open loop, or was sent in a closed one; on the same clock as `at`."""
        return self.at - self.latency_ms / 1000


# --- arrivals ---------------------------------------------------------------------------------------------------------

POISSON, CONSTANT = "poisson", "constant"
# How long a request waits for a free user. Without this limit the queue of an overloaded server would grow with the
# length of the window, and so would the time until it is empty.
PATIENCE_S = 5.0
GIVEN_UP = f"not sent: all users were waiting for responses for {PATIENCE_S:.0f} s"
# The share of a window's requests by which the unanswered ones must grow to show that the server is overloaded.
OVERLOADED_FROM = 0.05


class Arrivals:
    """The requests that arrive in one process, and the users that wait for them. It is closed at first.

    An arrival goes to the user that was free last, whose connection is warm, or waits in a queue until one is free.
    """

    def __init__(self, rate: float, kind: str, stream: random.Random, phase: float = 1.0) -> None:
        """Build arrivals at `rate` per second; the first constant one comes after `phase` gaps."""
        self.rate = rate
        self.kind = kind
        self.stream = stream
        self.phase = phase
        self.in_flight = 0  # requests that arrived and have no response yet
        self.queue: deque[float] = deque()  # times of arrival
        self.free: list[AsyncResult[float]] = []  # users
        self.clock: gevent.Greenlet | None = None
        self.next = 0.0  # when the next request arrives, while it is open

    def wait(self) -> float:
        """Wait for a request that the caller has to send, and return when it arrived."""
        if self.queue:
            return self.queue.popleft()
        user: AsyncResult[float] = AsyncResult()
        self.free.append(user)
        try:
            arrival: float = user.get()
            return arrival
        except BaseException:  # Locust stops this user
            if user in self.free:
                self.free.remove(user)
            else:
                self._assign(user.get())
            raise

    def done(self) -> None:
        """Count a request as answered."""
        self.in_flight -= 1

    def open(self) -> None:
        """Let requests arrive from now on."""
        self.close()
        self.next = time.perf_counter() + (self.phase - 1) / self.rate * (self.kind == CONSTANT) + self._gap()
        self.clock = gevent.spawn(self._run)

    def close(self) -> None:
        """Stop the arrivals. Requests that have arrived are still sent, also those for which the clock was late."""
        if self.clock:
            self.clock.kill()
            self.clock = None
            self._arrive()

    def set_rate(self, rate: float) -> None:
        self.rate = rate
        if self.clock:
            self.open()

    def _run(self) -> None:
        while True:
            gevent.sleep(max(0.0, self.next - time.perf_counter()))
            self._arrive()

    def _arrive(self) -> None:
        """Count and assign the arrivals that are due."""
        now = time.perf_counter()
        while self.next <= now:
            self.in_flight += 1
            self._assign(self.next)
            self.next += self._gap()

    def _gap(self) -> float:
        return self.stream.expovariate(self.rate) if self.kind == POISSON else 1 / self.rate

    def _assign(self, arrival: float) -> None:
        if self.free:
            self.free.pop().set(arrival)
        else:
            self.queue.append(arrival)


def arrived_within(samples: Sequence[Sample], seconds: float) -> list[Sample]:
    """Return the samples of the requests that arrived in a window of that length, whenever they were answered."""
    return [sample for sample in samples if 0 <= sample.arrived < seconds]


def unanswered(samples: Sequence[Sample], moment: float) -> int:
    """Return how many requests had arrived at that moment of a window and had no response yet."""
    return sum(sample.arrived < moment <= sample.at for sample in samples)


def is_overloaded(samples: Sequence[Sample], seconds: float) -> bool:
    """Return whether the server did not keep up with the rate in a window, from all samples until the users paused.

    Then ever more requests wait for their response. Even if the server keeps up, their numbers at two moments differ,
    by about the square root of the sum of both.
    """
    start, end = unanswered(samples, 0.0), unanswered(samples, seconds)
    noise = 3 * (start + end) ** 0.5
    return end - start > OVERLOADED_FROM * len(arrived_within(samples, seconds)) + noise or any(
        sample.error == GIVEN_UP for sample in samples
    )
