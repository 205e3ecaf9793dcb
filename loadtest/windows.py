"""The rounds: the same users, the same server, dynamic batching off and on in turn, and what each window saw."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import gevent

from loadtest.crowd.base import Crowd, Sample
from loadtest.switching import MODES, Switch
from loadtest.telemetry import Metrics
from scripts.common.settings import UserError
from scripts.common.triton import Triton

# A window that is not given in seconds lasts until it holds this many requests, and this long at least.
WINDOW_REQUESTS = 1000
LEAST_WINDOW_S = 5.0
LONGEST_WINDOW_S = 600.0


@dataclass(frozen=True)
class Plan:
    system: str
    rounds: int
    window_s: float | None
    warmup_s: float
    users: int
    spawn_rate: float | None

    def schedule(self) -> list[tuple[int, str]]:
        """(round, mode) of each window: A B, B A, A B ... so that a steady drift of the machine cancels."""
        return [(n + 1, mode) for n in range(self.rounds) for mode in (MODES if n % 2 == 0 else MODES[::-1])]


@dataclass
class Counters:
    """Triton's counters of one model, or the difference of two readings of them."""

    requests: int
    rows: int
    executions: int
    queue_ns: int
    compute_ns: int
    batches: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, statistics: dict) -> Counters:
        timing = statistics["inference_stats"]
        return cls(
            requests=timing["success"]["count"],
            rows=statistics["inference_count"],
            executions=statistics["execution_count"],
            queue_ns=timing["queue"]["ns"],
            compute_ns=sum(timing[part]["ns"] for part in ("compute_input", "compute_infer", "compute_output")),
            batches={b["batch_size"]: b["compute_infer"]["count"] for b in statistics["batch_stats"]},
        )

    def since(self, before: Counters) -> Counters:
        if self.executions < before.executions:
            raise UserError("the model was reloaded or the server restarted in the middle of a window")
        return Counters(
            self.requests - before.requests,
            self.rows - before.rows,
            self.executions - before.executions,
            self.queue_ns - before.queue_ns,
            self.compute_ns - before.compute_ns,
            {
                size: count - before.batches.get(size, 0)
                for size, count in self.batches.items()
                if count > before.batches.get(size, 0)
            },
        )


@dataclass
class Window:
    round: int
    mode: str
    start: float
    end: float
    samples: list[Sample]
    counters: dict[str, Counters]
    client_cpu: float  # CPU seconds a second of Locust's busiest process; 1.0 is all that one can use
    began_at: float  # wall clock, for whoever looks it up in Prometheus


class Experiment:
    """Drives the crowd and the switch; hands over each window as it ends, so that an interrupt keeps what there is."""

    def __init__(
        self,
        plan: Plan,
        crowd: Crowd,
        triton: Triton,
        switch: Switch,
        metrics: Metrics,
        progress: Callable[[str, float], None],
    ) -> None:
        self.plan = plan
        self.crowd = crowd
        self.triton = triton
        self.switch = switch
        self.metrics = metrics
        self.progress = progress
        self.began = time.perf_counter()

    def run(self, on_window: Callable[[Window], None]) -> None:
        try:
            for number, mode in self.plan.schedule():
                on_window(self._window(number, mode))
        finally:
            self.crowd.stop()

    def _window(self, number: int, mode: str) -> Window:
        label = f"round {number} of {self.plan.rounds}, {mode}"
        self.crowd.pause()
        self.progress(f"{label}: switching", 0)
        self.switch.to(mode)
        self.metrics.mode(mode)
        self.crowd.resume()
        self._spawn(label)
        self._warm_up(label)
        before = self._counters()
        self.crowd.open_window()
        began_at, start = time.time(), self._now()
        with self.metrics.window(mode, number) as measured:
            self._measure(label, start, measured)
            end = self._now()
            # A worker opened its window a moment before `start`: all of them count for as long as this one lasted.
            answered = [sample for sample in self.crowd.close_window() if sample.at < end - start]
            measured(answered, end - start)
        client_cpu = self.crowd.cores
        samples = sorted(sample._replace(at=start + sample.at) for sample in answered)
        after = self._counters()
        counters = {name: after[name].since(before[name]) for name in after}
        if not self.switch.in_force():
            raise UserError("a model was reloaded by somebody else in the middle of a window")
        if not samples:
            raise UserError("not one request was answered in a whole window: `make status` and `make logs` say more")
        return Window(number, mode, start, end, samples, counters, client_cpu, began_at)

    def _spawn(self, label: str) -> None:
        if self.crowd.running == self.plan.users:
            return
        self.crowd.start(self.plan.users, self.plan.spawn_rate or self.plan.users)
        while self.crowd.running < self.plan.users:
            self.progress(f"{label}: {self.crowd.running} of {self.plan.users} users", 0)
            self.metrics.users(self.crowd.running)
            self.crowd.check()
            gevent.sleep(0.1)
        self.metrics.users(self.crowd.running)

    def _warm_up(self, label: str) -> None:
        self.progress(f"{label}: warming up", 0)
        end = self._now() + self.plan.warmup_s
        while (left := end - self._now()) > 0:
            self.crowd.check()
            gevent.sleep(min(left, 0.1))

    def _measure(self, label: str, start: float, measured: Callable[[list[Sample], float], None]) -> None:
        """Until the window holds what it should."""
        wanted = self.plan.window_s
        while True:
            gevent.sleep(0.05)
            self.crowd.check()
            elapsed = self._now() - start
            measured(self.crowd.samples, elapsed)
            self.metrics.cores(self.crowd.cores)
            part = (
                min(elapsed / LEAST_WINDOW_S, len(self.crowd.samples) / WINDOW_REQUESTS)
                if wanted is None
                else elapsed / wanted
            )
            self.progress(f"{label}: measuring", min(part, 1.0))
            if part >= 1 or elapsed > LONGEST_WINDOW_S:
                return

    def _counters(self) -> dict[str, Counters]:
        statistics = self.triton.statistics()
        names = [model.name for model in self.switch.models if model.batches]
        if gone := [name for name in names if name not in statistics]:
            raise UserError(f"{', '.join(gone)} is no longer served: `make status` and `make logs` say more")
        return {name: Counters.of(statistics[name]) for name in names}

    def _now(self) -> float:
        return time.perf_counter() - self.began
