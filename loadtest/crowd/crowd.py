"""The base class of crowds, which drives the users, and the meter that records their responses."""

from __future__ import annotations

import os
import re
import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, Self

import psutil
from locust.env import Environment
from locust.runners import Runner

from loadtest.sample import Sample
from loadtest.users import LATE_MS
from triton_transformers.settings import UserError


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
        self.samples.append(Sample(at, response_time, str(exception) if exception else "", context.get(LATE_MS, 0.0)))


class Crowd(ABC):
    """The users of a comparison. Leaving it as a context manager stops them and the processes started for them."""

    runner: Runner
    meter: Meter

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def running(self) -> int:
        """Return how many users have started."""
        return self.runner.user_count

    @property
    def samples(self) -> list[Sample]:
        """Return the responses since the window opened, as far as this process knows them yet."""
        return self.meter.samples

    @property
    @abstractmethod
    def cores(self) -> float:
        """Return the CPU seconds per second, since the window opened, of the busiest process."""

    @abstractmethod
    def start(self, users: int, rate: float) -> None:
        """Begin to start the users."""

    @abstractmethod
    def check(self) -> None:
        """Raise a UserError if a part of the crowd has stopped."""

    @abstractmethod
    def pause(self) -> None:
        """Hold the users before their next request, and wait until no request is in flight.

        In an open loop no more requests arrive, and those that have arrived are answered first.
        """

    @abstractmethod
    def resume(self) -> None:
        """Let the users go on. An open loop must be resumed once to begin."""

    @abstractmethod
    def set_rate(self, rate: float, pattern: int = 0) -> None:
        """Change the requests per second of an open loop, of all processes together, at once.

        With the same pattern the same texts arrive in the same order and rhythm, so that two measurements differ less.
        """

    @abstractmethod
    def open_window(self) -> None:
        """Drop all samples, and return once every process records new ones."""

    @abstractmethod
    def close_window(self) -> list[Sample]:
        """Return all samples of the window; `samples` and `cores` keep them until the next one opens."""

    @abstractmethod
    def stop(self) -> None:
        """Stop all users for good; a second call does nothing."""


def cpu_list(text: str) -> set[int]:
    """Return the CPUs of a list as `taskset -c` takes it: 0, 0-3, 0-6:2, 0,2."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, last, step = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part).groups()  # type: ignore[union-attr]
        cpus |= set(range(int(first), int(last or first) + 1, int(step or 1)))
    return cpus


def pin(cpus: str) -> None:
    """Restrict this process and its children to the CPUs of a `taskset -c` list; an empty list restricts nothing."""
    if not cpus:
        return
    try:
        os.sched_setaffinity(0, cpu_list(cpus))
    except (ValueError, OSError):
        raise UserError(f"LOADTEST_CPUS={cpus}: must list CPUs of this machine, as in 1 or 0-3,6") from None
