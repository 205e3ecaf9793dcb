"""The rounds of a comparison: the same users on the same server, in each mode in turn."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import gevent

from loadtest.load.arrivals import Sample, arrived_within, is_overloaded, unanswered
from loadtest.load.telemetry import Metrics
from loadtest.load.users import Users
from loadtest.server.generating import Generated, Reader
from loadtest.server.machine import OtherPrograms
from loadtest.server.switching import LoadRefused, Switch
from triton_transformers.settings import UserError
from triton_transformers.triton import Triton

# Without WINDOW a window lasts until it holds enough requests, within these limits.
WINDOW_REQUESTS = 1000
MINIMUM_WINDOW_S = 4.0
MAXIMUM_WINDOW_S = 600.0
# A window of a closed loop goes on for this long without a response: a busy machine may stand still for seconds.
MAXIMUM_EMPTY_S = 30.0
# The rate of an open loop sets the length of a window, so every mode gets the same number of requests.
MAXIMUM_OPEN_WINDOW_S = 60.0
# The same for systems whose requests take seconds. The tokens of generated text show the throughput more finely.
SLOW_MINIMUM_WINDOW_S = 10.0
SLOW_REQUESTS_PER_USER, GENERATING_REQUESTS_PER_USER = 8, 2


@dataclass(frozen=True)
class Plan:
    system: str
    rounds: int
    window_s: float | None
    warmup_s: float
    users: int
    spawn_rate: float | None
    generates: bool = False
    rate: float = 0.0  # requests per second that arrive; 0: a closed loop
    may_be_slow: bool = False  # a request may take seconds

    @property
    def length_s(self) -> float | None:
        """Return how long a window lasts, or None if it lasts until it has enough requests."""
        if self.window_s is not None or not self.rate:
            return self.window_s
        return max(self.minimum_window_s, min(WINDOW_REQUESTS / self.rate, MAXIMUM_OPEN_WINDOW_S))

    @property
    def window_requests(self) -> int:
        """Return how many requests a window holds at least, without WINDOW."""
        if self.generates:
            return GENERATING_REQUESTS_PER_USER * self.users
        return SLOW_REQUESTS_PER_USER * self.users if self.may_be_slow else WINDOW_REQUESTS

    @property
    def minimum_window_s(self) -> float:
        return SLOW_MINIMUM_WINDOW_S if self.generates or self.may_be_slow else MINIMUM_WINDOW_S

    @property
    def warmup_requests(self) -> int:
        """Return how many requests must be answered before a window.

        The first texts of all users start at once, and only the later ones wait as long as they do ever after.
        """
        return self.users if self.generates and not self.rate else 0

    def announcement(self, modes: Sequence[str]) -> str:
        """Return what the comparison will measure, for people who wait for it."""
        length = f"{round(self.length_s, 1):g} s" if self.length_s else f"at least {self.minimum_window_s:g} s"
        warmup = f"{'at least ' if self.warmup_requests else ''}{self.warmup_s:g} s"
        return (
            f"measuring {', '.join(modes)} in {self.rounds} rounds: {len(modes) * self.rounds} windows of {length}, "
            f"each after {warmup} of warm-up"
        )


def schedule(modes: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Return (round, mode) of each window: A B C, C B A, A C B, B C A ..., so that a steady drift cancels.

    The second round of each pair mirrors the first. Neighbouring rounds meet in one mode, which saves a switch.
    """
    for number in range(rounds):
        pair = number // 2 % (len(modes) - 1)
        order = [modes[0], *modes[1 + pair :], *modes[1 : 1 + pair]]
        yield from ((number + 1, mode) for mode in (order if number % 2 == 0 else reversed(order)))


@dataclass
class Counters:
    """Triton's counters of one model, or the difference of two readings of them."""

    requests: int
    rows: int
    executions: int
    queue_ns: int
    compute_ns: int
    batches: dict[int, int] = field(default_factory=dict)  # executions by batch size

    @classmethod
    def from_statistics(cls, statistics: dict[str, Any]) -> Counters:
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
            raise UserError("a model was reloaded or the server restarted during a window: see `make logs`")
        return Counters(
            self.requests - before.requests,
            self.rows - before.rows,
            self.executions - before.executions,
            self.queue_ns - before.queue_ns,
            self.compute_ns - before.compute_ns,
            dict(Counter(self.batches) - Counter(before.batches)),
        )


@dataclass(frozen=True)
class OpenLoop:
    """The numbers of a window of an open loop, besides the samples of the requests that arrived in it."""

    answered: int  # successful responses within the window
    unanswered_at_start: int  # requests that had arrived and had no response yet
    unanswered_at_end: int
    overloaded: bool  # whether the server did not keep up with the rate

    @classmethod
    def from_samples(cls, samples: Sequence[Sample], seconds: float) -> OpenLoop:
        """Return the numbers of a window of this length, from all samples until the users paused."""
        return cls(
            sum(sample.at < seconds and not sample.error for sample in samples),
            unanswered(samples, 0.0),
            unanswered(samples, seconds),
            is_overloaded(samples, seconds),
        )


@dataclass
class Window:
    """The measurements of one window; times are in seconds since the comparison began.

    In an open loop, `samples` are the requests that arrived in the window, whenever they were answered.
    """

    round: int
    mode: str
    start: float
    end: float
    samples: list[Sample]
    counters: dict[str, Counters]  # by model
    client_cpu: float  # CPU seconds per second of Locust's busiest process, which can use at most 1.0
    began_at: float  # wall clock, to find the window in Prometheus
    counted_s: float  # between the two readings of the counters, which begin before the window and end after it
    generated: Generated | None = None  # by a system that generates text
    open_loop: OpenLoop | None = None
    other_cores: float | None = None  # CPU seconds per second of programs that are no part of the measurement


@dataclass
class Experiment:
    """Drives the users and the switch, and hands over each window as it ends, so that an interrupt loses only one.

    If Triton refuses to load the models for the mode `instances`, the mode goes into `left_out` with the reason.
    """

    plan: Plan
    modes: Sequence[str]
    left_out: dict[str, str]
    users: Users
    triton: Triton
    switch: Switch
    metrics: Metrics
    others: OtherPrograms
    progress: Callable[[str, float], None]
    reader: Reader | None = None
    began: float = field(default_factory=time.perf_counter)

    def run(self, on_window: Callable[[Window], None]) -> None:
        measured = set()
        try:
            for number, mode in schedule(self.modes, self.plan.rounds):
                if mode in self.left_out:
                    continue
                try:
                    window = self.window(number, mode)
                except LoadRefused as reason:
                    if mode != "instances" or mode in measured or len(self.modes) < 3:
                        raise
                    self.left_out[mode] = str(reason)
                    continue
                measured.add(mode)
                on_window(window)
        finally:
            self.users.stop()

    def window(self, number: int, mode: str) -> Window:
        label = f"round {number} of {self.plan.rounds}, {mode}"
        self.users.pause()
        self.progress(f"{label}: switching", 0)
        self.switch.to(mode)
        self.metrics.mode(mode)
        if self.plan.rate:
            self._spawn(label)  # before requests arrive, which would wait for users
            self.users.resume()
        else:
            self.users.resume()
            self._spawn(label)
        self.warm_up(label)
        generated_before = self.reader.read_when_sent() if self.reader else None
        counted_from = self.now()
        before = self._counters()
        self.others.open()  # before the window, because a busy machine takes long to list its processes
        self.users.open_window()
        began_at, start = time.time(), self.now()
        with self.metrics.window(mode, number) as update:
            self.wait_for_window(label, start, update)
            seconds = self.now() - start
            client_cpu, other_cores = self.users.cores, self.others.cores()
            if self.plan.rate:
                self.progress(f"{label}: waiting for the last responses", 1)
                self.users.pause()
            recorded = self.users.close_window()
            # A worker opened its window a moment before `start`; only the first seconds of it count.
            samples = [sample for sample in recorded if sample.at < seconds]
            update(recorded, seconds)
        open_loop = None
        if self.plan.rate:
            open_loop = OpenLoop.from_samples(recorded, seconds)
            samples = arrived_within(recorded, seconds)
        after = self._counters()
        counted_s = self.now() - counted_from
        generated = None
        if self.reader and generated_before:
            generated = self.reader.read_when_sent().since(generated_before)
        counters = {name: after[name].since(before[name]) for name in after}
        if not self.switch.in_force():
            raise UserError("something else reloaded a model during a window: leave the server alone until the end")
        if not samples:
            raise UserError(
                f"no request {'arrived' if self.plan.rate else 'was answered'} in a window of {seconds:.0f} s: set a "
                f"longer WINDOW or {'a higher RATE' if self.plan.rate else 'fewer USERS'}, if `make status` and "
                "`make logs` show that the server is well"
            )
        samples = sorted(sample._replace(at=start + sample.at) for sample in samples)
        return Window(
            round=number,
            mode=mode,
            start=start,
            end=start + seconds,
            samples=samples,
            counters=counters,
            client_cpu=client_cpu,
            began_at=began_at,
            counted_s=counted_s,
            generated=generated,
            open_loop=open_loop,
            other_cores=other_cores,
        )

    def _spawn(self, label: str) -> None:
        if self.users.running == self.plan.users:
            return
        self.users.start(self.plan.users, self.plan.spawn_rate or self.plan.users)
        while self.users.running < self.plan.users:
            self.progress(f"{label}: {self.users.running} of {self.plan.users} users", 0)
            self.metrics.users(self.users.running)
            self.users.check()
            gevent.sleep(0.1)
        self.metrics.users(self.users.running)

    def warm_up(self, label: str) -> None:
        self.progress(f"{label}: warming up", 0)
        self.users.open_window()
        start = self.now()
        while (elapsed := self.now() - start) < MAXIMUM_WINDOW_S:
            if elapsed >= self.plan.warmup_s and len(self.users.samples) >= self.plan.warmup_requests:
                break
            self.users.check()
            gevent.sleep(0.05)
        self.users.close_window()

    def wait_for_window(self, label: str, start: float, update: Callable[[list[Sample], float], None]) -> None:
        """Wait until the window is long enough."""
        while True:
            gevent.sleep(0.05)
            self.users.check()
            elapsed = self.now() - start
            update(self.users.samples, elapsed)
            self.metrics.cores(self.users.cores)
            if self.plan.length_s is None:
                answered = len(self.users.samples) / self.plan.window_requests
                part = min(elapsed / self.plan.minimum_window_s, answered)
            else:
                part = elapsed / self.plan.length_s
            self.progress(f"{label}: measuring", min(part, 1.0))
            has_response = any(sample.at < elapsed for sample in self.users.samples)
            is_empty = not self.plan.rate and not has_response and elapsed < MAXIMUM_EMPTY_S
            if (part >= 1 and not is_empty) or elapsed > MAXIMUM_WINDOW_S:
                return

    def _counters(self) -> dict[str, Counters]:
        statistics = self.triton.statistics()
        names = self.switch.counted()
        if missing := [name for name in names.values() if name not in statistics]:
            raise UserError(
                f"Triton no longer serves {', '.join(missing)}. Either it crashed and restarts, or another client "
                "unloaded a model: see `make status` and `make logs`"
            )
        return {name: Counters.from_statistics(statistics[model]) for name, model in names.items()}

    def now(self) -> float:
        return time.perf_counter() - self.began
