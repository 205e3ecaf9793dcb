"""Measure candidates on the running server: switch to one, send requests in an open loop, read the latencies."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gevent
import numpy as np

from loadtest.load.arrivals import GIVEN_UP, Sample, arrived_within, is_overloaded
from loadtest.load.examples import ask
from loadtest.load.users import Users
from loadtest.measure.statistics import CLIENT_LIMIT
from loadtest.measure.windows import Counters
from loadtest.server.machine import OtherPrograms
from loadtest.server.switching import HEADROOM, RESTART_S, Capacity, LoadRefused, Switch
from loadtest.tune.goal import MAXIMUM_TRY_S, MINIMUM_TRY_S, WARM_UP_S, Goal, try_s
from loadtest.tune.knobs import Candidate, Knob
from loadtest.tune.search import Budget, CandidateFailed, Measured
from triton_transformers.answers import LIMITS, difference, smallest_cosine
from triton_transformers.settings import UserError
from triton_transformers.tensors import Tensor
from triton_transformers.triton import Config, Triton, TritonError

# How long the best rate is held at the end.
LONG_TRY_S = 10.0
# Seconds before the first try after a load that are not measured: a new process is slow at first.
FIRST_WARM_UP_S = 1.5
# Below this share of the expected rate, a candidate has lost: do not look for its exact rate.
WORTH_KNOWING = 0.65
# With workers, samples arrive this much later.
SAMPLES_DELAY_S = 0.3
# A try at the goal's rate ends early if responses take this many times as long as expected.
HOPELESS = 10.0
LATE_SHARE = 0.05
# The first step away from the start, and the largest: each further step is the square of the one before. A start that
# is only guessed begins with a larger one, because the tries of low rates take long.
FIRST_STEP, GUESSED_STEP, LARGEST_STEP = 1.12, 2.0, 4.0
# The rates on both sides of the result differ by at most this factor.
RESOLUTION = 1.06
# No server is tuned for fewer requests per second.
LOWEST = 0.2


@dataclass
class RunningServer:
    """The server under test. `configure` returns the configurations of a candidate."""

    goal: Goal
    users: Users
    switch: Switch
    triton: Triton
    system: str
    configure: Callable[[Candidate], Mapping[str, Config]]
    capacity: Callable[[], Capacity]
    answers: Answers
    random: random.Random
    budget: Budget
    others: OtherPrograms
    client_cores: float = 0.0  # maximum that Locust's busiest process used

    def __post_init__(self) -> None:
        self.pattern = 0  # of the arrivals
        self.present: Candidate | None = None  # the candidate that the server runs
        self.other_cores: list[float | None] = []  # of other programs, in each try
        self.kept_up: dict[Candidate | None, list[bool]] = {}  # with the rate, in each try

    @property
    def client_bound(self) -> bool:
        return self.client_cores >= CLIENT_LIMIT

    def measure(self, candidate: Candidate, expected: float | None, pattern: int, in_full: bool = True) -> Measured:
        self.pattern = pattern
        warm_up = WARM_UP_S
        if candidate != self.present:
            self.load(candidate)
            warm_up = FIRST_WARM_UP_S
        tries: list[tuple[float, float | None]] = []
        needed = 0.0 if in_full or not expected else expected * WORTH_KNOWING

        def p95(rate: float, limit_ms: float) -> float:
            nonlocal warm_up
            result = self.try_rate(rate, limit_ms, warm_up)
            warm_up = WARM_UP_S
            tries.append((rate, result if result < math.inf else None))
            return result

        try:
            if self.goal.rate:
                value = p95(self.goal.rate, HOPELESS * (expected or MAXIMUM_TRY_S / HOPELESS * 1000))
            else:
                limit = self.goal.target_ms
                # The server answers at least as much as one request after the other.
                start = expected or 1 / self.answers.seconds
                # Without this, repeated measurements would try the same rates, and often find exactly the same.
                start *= RESOLUTION ** self.random.uniform(-1, 1)
                step = FIRST_STEP if expected else GUESSED_STEP
                value = highest_rate(lambda rate: p95(rate, limit) <= limit, start, needed or LOWEST, step)
            if not self.switch.in_force():
                raise CandidateFailed("the server crashed, or another client loaded a model, while this was measured")
        except (CandidateFailed, TritonError) as error:
            self.present = None
            self.wait_for_server()
            raise CandidateFailed(str(error)) from None
        if not self.goal.rate and value <= LOWEST and not candidate.changes:
            p95_ms = tries[-1][1]
            shown = f"its p95 is {p95_ms:.0f} ms" if p95_ms else "requests pile up"
            raise UserError(
                f"P95={self.goal.target_ms:g}: your configuration is slower at any rate; even at {LOWEST:g} requests "
                f"per second, {shown}. Set a higher P95, or RATE instead, to find the lowest latency at a rate"
            )
        return Measured(value, tries, not self.goal.rate and value == needed)

    def is_overloaded(self, candidate: Candidate) -> bool:
        """Return whether the server did not keep up in at least half of the candidate's tries."""
        tries = self.kept_up.get(candidate, [])
        return bool(tries) and 2 * sum(tries) <= len(tries)

    def heaviest_first(self, knobs: list[Knob]) -> list[Knob]:
        """Sort the knobs by how much their model has computed so far."""
        computed = {}
        for name, statistics in self.triton.statistics().items():
            computed[name] = Counters.from_statistics(statistics).compute_ns
        return sorted(knobs, key=lambda knob: computed.get(knob.model, 0), reverse=True)

    def p95_for_long(self, candidate: Candidate, rate: float) -> float:
        """Return the 95th percentile over more time than a try has; infinity if requests pile up."""
        if candidate != self.present:
            self.load(candidate)
        return self.try_rate(rate, MAXIMUM_TRY_S * 1000, FIRST_WARM_UP_S, LONG_TRY_S)

    def load(self, candidate: Candidate) -> None:
        """Switch to the candidate; raise CandidateFailed if the server cannot run it or then answers differently."""
        self.budget.check()
        self.present = None
        began = time.monotonic()
        configs = self.configure(candidate)
        self.check_memory(configs)
        self.users.pause()
        self.switch.add(candidate.label, configs)
        try:
            self.switch.to(candidate.label)
        except LoadRefused as error:
            raise CandidateFailed(str(error)) from None
        except (UserError, TritonError) as error:
            if not candidate.changes:
                raise
            self.wait_for_server()
            raise CandidateFailed(f"the server stopped answering while it loaded this: {error}") from None
        if candidate.changes and (difference := self.answers.difference()):
            raise CandidateFailed(difference)
        self.present = candidate
        self.budget.loaded(time.monotonic() - began)

    def check_memory(self, configs: Mapping[str, Config]) -> None:
        """Raise CandidateFailed if the processes of the changed models do not fit beside those that still run."""
        capacity = self.capacity()
        needed = 0.0
        for name, config in configs.items():
            groups = config.get("instance_group") or [{}]
            if any(group.get("kind") == "KIND_GPU" for group in groups):
                continue
            if config != self.triton.config(name):
                count = sum(int(group.get("count", 1)) for group in groups)
                needed += count * capacity.process_bytes.get(name, 0) * HEADROOM
        if needed > capacity.free_bytes:
            raise CandidateFailed(
                f"it needs about {needed / 1e9:.1f} GB of memory, and {capacity.free_bytes / 1e9:.1f} GB are free "
                "where Triton runs"
            )

    def wait_for_server(self) -> None:
        """Wait until a server that crashed serves the system again."""
        deadline = time.monotonic() + RESTART_S
        while True:
            try:
                self.triton.config(self.system)
                return
            except TritonError as error:
                if time.monotonic() > deadline:
                    raise UserError(f"{error}: see `make status` and `make logs`") from None
            gevent.sleep(0.5)

    def try_rate(self, rate: float, limit_ms: float, warm_up: float, minimum_s: float = MINIMUM_TRY_S) -> float:
        """Return the 95th percentile in milliseconds at this rate; infinity if it is clearly above the limit."""
        self.budget.check()
        seconds = try_s(rate, minimum_s)
        self.users.set_rate(rate, self.pattern)
        self.users.resume()
        gevent.sleep(warm_up)
        self.users.open_window()
        self.others.open()
        began = time.perf_counter()
        hopeless = False
        while (elapsed := time.perf_counter() - began) < seconds and not hopeless:
            gevent.sleep(0.02)
            self.users.check()
            hopeless = self.is_hopeless(rate, limit_ms / 1000, elapsed, seconds)
        self.other_cores.append(self.others.cores())
        self.client_cores = max(self.client_cores, self.users.cores)
        self.users.pause()
        recorded = self.users.close_window()
        self.kept_up.setdefault(self.present, []).append(not is_overloaded(recorded, elapsed))
        samples = arrived_within(recorded, elapsed)
        if failed := [sample.error for sample in samples if sample.error not in ("", GIVEN_UP)]:
            raise CandidateFailed(f"{len(failed)} of {len(samples)} requests failed, the first with: {failed[0][:200]}")
        if not samples:
            raise CandidateFailed(f"no request was answered in {elapsed:.0f} s at {rate:g} requests/s")
        if not self.goal.rate and (hopeless or any(sample.error for sample in samples)):
            return math.inf
        return float(np.percentile([self.timed_ms(sample) for sample in samples], 95))

    def timed_ms(self, sample: Sample) -> float:
        return self.goal.timed_ms(sample.latency_ms, sample.first_token_ms)

    def is_hopeless(self, rate: float, limit_s: float, elapsed: float, seconds: float) -> bool:
        """Return whether a request failed, or already more are late than 5 % of all that the try will have."""
        due = elapsed - limit_s - SAMPLES_DELAY_S
        in_time = 0
        for sample in self.users.samples:
            if sample.error:  # a failure, or no user was free for too long
                return True
            in_time += 0 <= sample.arrived < due and self.timed_ms(sample) <= limit_s * 1000
        # Arrivals are random: allow three standard deviations fewer than expected.
        expected = rate * max(0.0, due)
        return expected - 3 * math.sqrt(expected) - in_time > LATE_SHARE * rate * seconds


def highest_rate(
    meets: Callable[[float], bool], start: float, give_up_below: float = LOWEST, step: float = FIRST_STEP
) -> float:
    """Return the highest rate that meets the target, by growing steps from the start and then by bisection.

    Below `give_up_below` the caller does not need to know how low it is: return that.
    """
    met, missed = 0.0, math.inf
    rate = max(start, LOWEST)
    while missed / met > RESOLUTION if met else missed > give_up_below:
        if meets(rate):
            met = rate
        else:
            missed = rate
        if met and missed < math.inf:
            rate = math.sqrt(met * missed)
        else:
            rate = rate * step if met else max(rate / step, give_up_below)
            step = min(step * step, LARGEST_STEP)
    return math.sqrt(met * missed) if met else give_up_below


# --- whether a candidate answers as the original configuration does ---------------------------------------------------

REQUESTS = 12


@dataclass
class Answers:
    """The answers of the original configuration, which is loaded when this is created, and how long each takes.

    Those of a model that generates are timed alone: it may sample its texts.
    """

    url: str
    model: str
    requests: list[list[Tensor]]
    generates: bool = False
    expected: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = math.inf  # of the fastest

    def __post_init__(self) -> None:
        requests = 2 if self.generates else REQUESTS
        step = max(1, len(self.requests) // requests)
        self.requests = self.requests[::step][:requests]
        try:
            for request in self.requests:
                began = time.perf_counter()
                self.expected.append(self.ask(request))
                self.seconds = min(self.seconds, time.perf_counter() - began)
        except (OSError, ValueError) as error:
            raise UserError(f"'{self.model}' refuses an example request: {error}. See `make logs`") from None

    def difference(self) -> str:
        """Return how the answers now differ from those of the original configuration, or nothing."""
        if self.generates:
            return ""
        for request, expected in zip(self.requests, self.expected, strict=True):
            try:
                actual = self.ask(request)
            except (OSError, ValueError) as error:
                return f"a request failed: {error}"
            for name, array in expected.items():
                if reason := differs(actual.get(name), array):
                    return f"the answers differ from those of your configuration: output '{name}' {reason}"
        return ""

    def ask(self, tensors: list[Tensor]) -> dict[str, Any]:
        return ask(self.url, self.model, tensors)


def differs(actual: Any, expected: Any) -> str:
    """Return how an output differs, or nothing."""
    if actual is None or actual.shape != expected.shape:
        return "has another shape"
    if expected.dtype.kind != "f":
        return "" if (actual == expected).all() else "has another value"
    cosine, distance = smallest_cosine(expected, actual), difference(expected, actual)
    if LIMITS["tune", ""].allow(cosine, distance):
        return ""
    return f"has a cosine of {cosine:.5f}, and differs by {distance:.1%} of its largest number"
