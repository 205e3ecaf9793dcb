"""Who runs the users: this process, or WORKERS others (master.py). The experiment drives both alike."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from typing import NamedTuple

import psutil
from locust.env import Environment
from locust.runners import Runner

from loadtest.users import Job, Traffic, user_class
from scripts.common.settings import UserError


class Sample(NamedTuple):
    """One request: when its answer came, how long it took, and what went wrong.

    `at` is in seconds: of a crowd, since the window opened; of a window that is over, since the run began.
    """

    at: float
    latency_ms: float
    error: str


class Meter:
    """What the users of a process were answered since a window opened, and the CPU time that this took."""

    def __init__(self, environment: Environment) -> None:
        self.process = psutil.Process()
        self.open()
        environment.events.request.add_listener(self._on_request)

    def open(self) -> None:
        self.samples: list[Sample] = []
        self.opened, self.cpu_before = time.perf_counter(), self._cpu()

    def take(self) -> list[Sample]:
        taken, self.samples = self.samples, []
        return taken

    def cores(self) -> float:
        return (self._cpu() - self.cpu_before) / (time.perf_counter() - self.opened)

    def _cpu(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system

    def _on_request(self, response_time: float, exception: Exception | None = None, **_) -> None:
        at = time.perf_counter() - self.opened
        self.samples.append(Sample(at, response_time, str(exception) if exception else ""))


class Crowd(ABC):
    """The users of a run. Use as a context: leaving it ends them, and whatever was started for them."""

    runner: Runner | None = None

    def __init__(self, job: Job) -> None:
        self.environment = Environment(user_classes=[user_class(job)])
        self.meter = Meter(self.environment)

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *exception) -> None:
        self.stop()

    @property
    def running(self) -> int:
        return self.runner.user_count

    @property
    def samples(self) -> list[Sample]:
        """Requests answered since the window opened, as far as is known."""
        return self.meter.samples

    @property
    @abstractmethod
    def cores(self) -> float:
        """The busiest process' CPU seconds a second since the window opened, as far as is known."""

    @abstractmethod
    def start(self, users: int, rate: float) -> None:
        """Begin to start the users; `running` says how many there are."""

    @abstractmethod
    def check(self) -> None:
        """A UserError if a part of the crowd is gone."""

    @abstractmethod
    def pause(self) -> None:
        """Hold the users before their next request. When this returns none is in flight."""

    @abstractmethod
    def resume(self) -> None: ...

    @abstractmethod
    def open_window(self) -> None:
        """Forget what was answered before. When this returns every process has begun to count."""

    @abstractmethod
    def close_window(self) -> list[Sample]:
        """What was answered since. `samples` and `cores` are complete, until the next window opens."""

    @abstractmethod
    def stop(self) -> None:
        """End all users, for good. Once more does no harm."""


class LocalCrowd(Crowd):
    """All users in this process."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.traffic = self.environment.traffic = Traffic(job)
        self.runner = self.environment.create_local_runner()

    def start(self, users: int, rate: float) -> None:
        self.runner.start(users, spawn_rate=rate)

    def check(self) -> None:
        pass

    def pause(self) -> None:
        self.traffic.pause()

    def resume(self) -> None:
        self.traffic.resume()

    def open_window(self) -> None:
        self.meter.open()

    @property
    def cores(self) -> float:
        return self.meter.cores()

    def close_window(self) -> list[Sample]:
        return self.meter.samples

    def stop(self) -> None:
        self.traffic.gate.clear()
        self.runner.quit()


def pin(cpus: str) -> None:
    """Keep this process, and those it starts, to the CPUs of a `taskset -c` list."""
    if not cpus:
        return
    try:
        wanted: set[int] = set()
        for part in cpus.split(","):
            first, _, last = part.partition("-")
            wanted |= set(range(int(first), int(last or first) + 1))
        os.sched_setaffinity(0, wanted)
    except (ValueError, OSError):
        raise UserError(f"LOADTEST_CPUS={cpus}: CPUs of this machine as in 1 or 0-3,6") from None
