"""The users of a comparison in this process, and the meter of their responses; worker_users.py has those elsewhere."""

from __future__ import annotations

import time
from typing import Any, Self

import psutil
from locust.env import Environment

from loadtest.load.arrivals import Sample
from loadtest.load.locust_users import (
    AMOUNT,
    FIRST_TOKEN_MS,
    LATE_MS,
    OUTPUT_TOKEN_MS,
    Job,
    TooManyRequestsError,
    Traffic,
    user_class,
)


class Meter:
    """Records the responses that a process' users got since a window opened, and the CPU time that they took."""

    def __init__(self, environment: Environment) -> None:
        self.process = psutil.Process()
        self.open()
        environment.events.request.add_listener(self._on_request)

    def open(self) -> None:
        self.samples: list[Sample] = []
        self.opened, self.cpu_before = time.perf_counter(), self._cpu()

    def take(self) -> list[Sample]:
        """Return the samples recorded since the last call."""
        samples, self.samples = self.samples, []
        return samples

    def cores(self) -> float:
        """Return CPU seconds used per second."""
        return (self._cpu() - self.cpu_before) / (time.perf_counter() - self.opened)

    def _cpu(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def _on_request(
        self, response_time: float, context: dict[str, float], exception: Exception | None = None, **_: Any
    ) -> None:
        at = time.perf_counter() - self.opened
        text = str(exception) if exception else ""
        late_ms, amount = context.get(LATE_MS, 0.0), context.get(AMOUNT, 1.0)
        is_refused = isinstance(exception, TooManyRequestsError)
        times = context.get(FIRST_TOKEN_MS), context.get(OUTPUT_TOKEN_MS)
        self.samples.append(Sample(at, response_time, text, late_ms, amount, is_refused, *times))


class Users:
    """The users of a comparison. Leaving it as a context manager stops them and the processes started for them."""

    def __init__(self, job: Job) -> None:
        self.traffic = Traffic(job)
        self.environment = Environment(user_classes=[user_class(self.traffic)])
        self.meter = Meter(self.environment)
        self.runner: Any = self.create_runner()

    def create_runner(self) -> Any:
        return self.environment.create_local_runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def running(self) -> int:
        """Return how many users have started."""
        count: int = self.runner.user_count
        return count

    @property
    def samples(self) -> list[Sample]:
        """Return the responses since the window opened, as far as this process knows them yet."""
        return self.meter.samples

    @property
    def cores(self) -> float:
        """Return the CPU seconds per second, since the window opened, of the busiest process."""
        return self.meter.cores()

    def start(self, users: int, rate: float) -> None:
        """Begin to start the users."""
        self.runner.start(users, spawn_rate=rate)

    def check(self) -> None:
        """Raise a UserError if some of the users have stopped, which users in this process cannot."""

    def pause(self) -> None:
        """Hold the users before their next request, and wait until no request is in flight.

        In an open loop no more requests arrive, and those that have arrived are answered first.
        """
        self.traffic.pause()

    def resume(self) -> None:
        """Let the users go on. An open loop must be resumed once to begin."""
        self.traffic.gate.open()

    def set_rate(self, rate: float, pattern: int = 0) -> None:
        """Change the requests per second of an open loop, of all processes together, at once.

        With the same pattern the same texts arrive in the same order and rhythm, so that two measurements differ less.
        """
        self.traffic.set_rate(rate, pattern)

    def open_window(self) -> None:
        """Drop all samples, and return once every process records new ones."""
        self.meter.open()

    def close_window(self) -> list[Sample]:
        """Return all samples of the window; `samples` and `cores` keep them until the next one opens."""
        return self.meter.samples

    def stop(self) -> None:
        """Stop all users for good; a second call does nothing."""
        self.traffic.gate.close()
        self.runner.quit()
