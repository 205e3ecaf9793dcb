"""The search for the best configuration: candidates race against the best one so far, one knob after the other.

The first race is that of the usual values of all knobs: from a configuration that is far off in several of them, no
single knob leads out.

A race has rounds. Each round measures the best configuration so far and all candidates that are still in the race, and
every second round runs in reverse order, so that a steady drift of the machine cancels. A candidate leaves the race as
soon as its interval excludes a win. The winner of all races was chosen because it looked best, partly by chance. So it
is measured again, against the user's own configuration, and only these measurements count.

If repeated measurements of one configuration disagree, the machine was too busy to tell which one is better. If the
time does not suffice, there is no verdict, and the next search can go on from the same measurements (Log).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import stdev
from typing import Any, NamedTuple

from loadtest.measure.statistics import half_width, t95
from loadtest.tune.goal import FIRST_MEASUREMENTS, MAXIMUM_PAIRS, MINIMUM_MEASUREMENTS, MINIMUM_PAIRS, REPORT_S
from loadtest.tune.knobs import Candidate, Knob, Value, label
from triton_transformers.files import write_atomically
from triton_transformers.settings import UserError

BETTER, LIKELY, NOT_BETTER, NOT_PROVEN, FAILED = "better", "likely better", "not better", "not proven", "failed"
NOTHING_BETTER, NOT_CONFIRMED = "nothing better", "not confirmed"
TOO_BUSY, NOT_COMPARED = "too busy", "not compared"
# The search repeats the first measurement until the last ones agree, at most this many times.
MAXIMUM_FIRST = 6
# The standard deviation of logarithms from which on repeated measurements disagree: two differ by a factor of 1.4.
DISAGREE_FROM = 0.25
RACE_ROUNDS = 3
# From this share of the 95 % interval's half width on, a candidate that is better on average wins its race. The
# measurements of the winner at the end catch those that won by chance.
LIKELY_FROM = 0.5
# After each round at most this share of the candidates, the best of them, stays in the race.
SURVIVORS = 0.5
# A measurement that takes fewer seconds is a replay of a search that was stopped (Log).
REPLAYED_S = 0.5


class CandidateFailed(Exception):
    """Raised by a measurement if the candidate does not load, or does not answer as it should."""


class BudgetSpent(Exception):
    """Raised instead of a measurement for which no time is left."""


class Measured(NamedTuple):
    """A measurement of one configuration: requests per second or milliseconds, and (rate, p95) of each try."""

    value: float
    probes: list[tuple[float, float | None]]
    is_bound: bool = False  # the value was not reached, and what was reached is unknown


# Measure a candidate. The second argument is the value to expect, if one is known. The third one numbers the pattern in
# which requests arrive: measurements that are compared have the same. With False as the fourth one, a measurement far
# below the expected value may end early, with a bound.
Measure = Callable[[Candidate, float | None, int, bool], Measured]


@dataclass
class Arm:
    """A candidate in a race, with what was measured of it and of the best configuration in the same rounds."""

    candidate: Candidate
    label: str = ""
    base: Candidate = field(default_factory=Candidate)
    values: list[float] = field(default_factory=list)
    base_values: list[float] = field(default_factory=list)
    probes: list[tuple[float, float | None]] = field(default_factory=list)
    ratio: float | None = None
    ci95: tuple[float, float] | None = None
    outcome: str = NOT_PROVEN
    reason: str = ""
    is_bound: bool = False  # whether one of the values is a bound

    def add(self, measured: Measured) -> None:
        self.values.append(measured.value)
        self.is_bound |= measured.is_bound
        self.probes += measured.probes


def disagree(values: Sequence[float]) -> bool:
    """Return whether repeated measurements of one configuration differ more than those of a quiet machine."""
    return len(values) > 1 and stdev([math.log(value) for value in values]) > DISAGREE_FROM


class Budget:
    """The time of the command, from its start to its report, and how much of it a measurement takes."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.began = now()
        self.seconds = seconds
        self.spent: list[float] = []  # by each measurement
        self.longest_load = 0.0

    def spend(self, seconds: float) -> None:
        if seconds > REPLAYED_S:
            self.spent.append(seconds)

    @property
    def elapsed(self) -> float:
        return self.now() - self.began

    def loaded(self, seconds: float) -> None:
        self.longest_load = max(self.longest_load, seconds)

    def check(self) -> None:
        """Raise BudgetSpent if only the time for the end is left."""
        if self.left <= 0:
            raise BudgetSpent

    @property
    def left(self) -> float:
        """Return the seconds that are left for measurements: not those to restore the configuration and to report."""
        return self.seconds - self.elapsed - self.longest_load - REPORT_S

    def has(self, measurements: int) -> bool:
        """Return whether this many measurements of average length still fit."""
        return self.left >= measurements * self.mean

    @property
    def mean(self) -> float:
        """Return the mean time of a measurement; the first one takes longer, because it knows no rate to expect."""
        later = self.spent[1:] or self.spent
        return sum(later) / len(later) if later else 0.0

    def needed(self, measured: int) -> float:
        """Return the seconds until a verdict, if the original configuration was measured so often."""
        # These measurements need no load, about every second one later does.
        return (MINIMUM_MEASUREMENTS - measured) * (self.mean + self.longest_load / 2)


class Noise:
    """The standard deviation of the difference between two measurements, pooled over all candidates."""

    def __init__(self) -> None:
        self.squares = 0.0
        self.degrees = 0

    def add(self, values: Sequence[float]) -> None:
        """Add repeated measurements of one configuration."""
        mean = sum(values) / len(values)
        # The difference of two measurements has twice the variance of one.
        self.squares += sum((value - mean) ** 2 for value in values) * 2
        self.degrees += len(values) - 1

    def add_newest(self, differences: Sequence[float]) -> None:
        """Add the last one of a candidate's differences; the others were added before."""
        *earlier, newest = differences
        mean = sum(earlier) / len(earlier)
        self.squares += (newest - mean) ** 2 * len(earlier) / len(differences)
        self.degrees += 1

    @property
    def deviation(self) -> float:
        return math.sqrt(self.squares / self.degrees)

    def half_width(self, pairs: int) -> float:
        """Return half the width of the 95 % interval of a mean difference over this many pairs."""
        return t95(self.degrees) * self.deviation / math.sqrt(pairs)


@dataclass
class Search:
    """Finds the best candidate. `arms`, `original` and the rest are filled as the search goes on."""

    knobs: list[Knob]
    measure: Measure
    larger_is_better: bool
    budget: Budget
    order: Callable[[list[Knob]], list[Knob]] = lambda knobs: knobs  # after the original was measured
    same: Callable[[Candidate, Candidate], bool] = lambda one, other: one == other
    show: Callable[[str], None] = lambda label: None
    log: Callable[[Arm], None] = lambda arm: None
    measured: Callable[[Candidate, Measured], None] = lambda candidate, measured: None

    def __post_init__(self) -> None:
        self.original = Arm(Candidate(), "as configured")
        self.best = self.original
        self.arms: list[Arm] = []
        self.noise = Noise()
        self.confirmed: Arm | None = None  # the winner in fresh measurements; its base is the original
        self.expected: float | None = None  # the last value of the best configuration
        self.repeats: dict[Candidate, list[float]] = {}  # the values of each, but for bounds
        self.disturbed: list[float] = []  # the first measurements, if later ones disagree with them
        self.measurements: list[tuple[Candidate, Measured]] = []  # all, in their order
        self.compared_with = 0  # measurements of the best configuration so far that others were compared with
        self.is_out_of_time = False

    @property
    def outcome(self) -> str:
        if self.disagreement:
            return TOO_BUSY
        if self.best is self.original:
            compared = any(len(arm.values) > 1 or arm.outcome == FAILED for arm in self.arms)
            return NOTHING_BETTER if compared or not self.is_out_of_time else NOT_COMPARED
        return BETTER if self.is_confirmed else NOT_CONFIRMED

    @property
    def is_confirmed(self) -> bool:
        return bool(self.confirmed and self.confirmed.outcome == BETTER)

    @property
    def disagreement(self) -> tuple[Candidate, list[float]] | None:
        """Return a configuration whose repeated measurements disagree, with all of them.

        The verdict about a winner that was confirmed comes from the fresh measurements alone.
        """
        seen = [(Candidate(), self.repeats.get(Candidate(), []))]
        if self.confirmed:
            fresh = [(Candidate(), self.confirmed.base_values), (self.confirmed.candidate, self.confirmed.values)]
            seen = fresh if self.is_confirmed else seen + fresh[1:]
        return next(((candidate, values) for candidate, values in seen if disagree(values)), None)

    @property
    def uncounted(self) -> int:
        """Return how many measurements no number has: their round was not finished, or they were disturbed."""
        counted = len(self.original.values) + self.compared_with + sum(len(arm.values) for arm in self.arms)
        again = 2 * len(self.confirmed.values) if self.confirmed else 0
        return len(self.measurements) - counted - again

    def run(self) -> None:
        """Search until there is nothing more to try, or the time is over."""
        try:
            self.measure_original()
            if self.disagreement:
                return
            if self.budget.left < self.budget.needed(len(self.original.values)):
                raise BudgetSpent
            self.race([self.usual()])
            for knob in self.open_knobs():
                self.race([self.arm(knob, value) for value in knob.values])
        except BudgetSpent:
            self.is_out_of_time = True
        if self.best is not self.original:
            self.confirm()

    def measure_original(self) -> None:
        """Measure until the last measurements agree: something may have disturbed the first ones."""
        self.show("as configured")
        values = self.original.values
        while len(values) < FIRST_MEASUREMENTS or (
            disagree(values[-FIRST_MEASUREMENTS:]) and len(values) < MAXIMUM_FIRST
        ):
            try:
                measured = self._measure(self.original.candidate, self.expected, 0)
            except BudgetSpent:
                if len(values) < FIRST_MEASUREMENTS:
                    raise
                break
            self.original.add(measured)
            self.expected = measured.value
        if not disagree(values[-FIRST_MEASUREMENTS:]):
            self.disturbed, values[:] = values[:-FIRST_MEASUREMENTS], values[-FIRST_MEASUREMENTS:]
            self.repeats[self.original.candidate] = list(values)
        self.noise.add([self.score(value) for value in self.original.values])
        self.knobs = self.order(self.knobs)

    def open_knobs(self) -> Iterator[Knob]:
        """Yield each knob, and again those that were raced before the best configuration changed."""
        raced: dict[int, Candidate] = {}
        while pending := [n for n in range(len(self.knobs)) if raced.get(n) != self.best.candidate]:
            for number in pending:
                if raced.get(number) != self.best.candidate:
                    yield self.knobs[number]
                    raced[number] = self.best.candidate

    def race(self, arms: Sequence[Arm | None]) -> None:
        """Race candidates against the best configuration, and let a winner replace it."""
        racing = [arm for arm in arms if arm]
        alive = list(racing)
        try:
            for number in range(RACE_ROUNDS):
                if not alive:
                    break
                try:
                    self.round(alive, number)
                finally:  # the time may be up in the middle of a round
                    if measured := [arm for arm in alive if len(arm.values) > number or arm.outcome == FAILED]:
                        alive = self.survivors(measured, len(racing))
                if alive and alive[0].outcome == BETTER:
                    break
        finally:
            winner = self.winner(alive)
            for arm in racing:
                if arm.values or arm.reason:
                    self.arms.append(arm)
                    self.log(arm)
            if winner:
                self.best = winner
                self.expected = winner.values[-1]

    def winner(self, alive: list[Arm]) -> Arm | None:
        """Return the first arm if it is better, or likely to be."""
        first = alive[0] if alive else None
        if not first or not first.ci95 or first.outcome == FAILED:
            return None
        half_width = math.log(first.ci95[1] / first.ci95[0]) / 2
        if first.outcome != BETTER and self.mean(first) > LIKELY_FROM * half_width:
            first.outcome = LIKELY
        return first if first.outcome in (BETTER, LIKELY) else None

    def usual(self) -> Arm | None:
        """Return the original with the usual value of every knob, unless that makes no difference."""
        candidate = self.original.candidate
        for knob in self.knobs:
            if knob.usual is not None:
                candidate = candidate.with_value(knob, knob.usual)
        if self.same(candidate, self.original.candidate):
            return None
        return Arm(candidate, candidate.label, self.original.candidate)

    def arm(self, knob: Knob, value: Value) -> Arm | None:
        """Return the best configuration with another value, unless that makes no difference or was tried before."""
        candidate = self.best.candidate.with_value(knob, value)
        if self.same(candidate, self.best.candidate) or any(
            self.same(candidate, arm.candidate) and arm.base == self.best.candidate for arm in self.arms
        ):
            return None
        return Arm(candidate, label(knob.model, knob.name, value), self.best.candidate)

    def round(self, alive: list[Arm], number: int) -> None:
        """Measure the best configuration and each arm once."""
        order: list[Arm | None] = [None, *alive]
        measured: dict[int, Measured] = {}
        try:
            for arm in order if number % 2 == 0 else reversed(order):
                self.show(arm.label if arm else "the best so far")
                if not self.budget.has(1 + 2 * MINIMUM_PAIRS):
                    raise BudgetSpent
                try:
                    candidate = arm.candidate if arm else self.best.candidate
                    measured[id(arm)] = self._measure(candidate, self.expected, number, in_full=arm is None)
                except CandidateFailed as error:
                    if arm is None:
                        raise
                    arm.outcome, arm.reason = FAILED, str(error)
        finally:
            if base := measured.get(id(None)):
                self.expected = base.value
                compared = [arm for arm in alive if id(arm) in measured]
                self.compared_with += bool(compared)
                for arm in compared:
                    arm.add(measured[id(arm)])
                    arm.base_values.append(base.value)

    def survivors(self, alive: list[Arm], racing: int) -> list[Arm]:
        """Judge the arms by all rounds so far; return those that may still win, the best first.

        The race began with `racing` arms.
        """
        left = [arm for arm in alive if arm.outcome != FAILED]
        for arm in left:
            if len(arm.values) > 1:
                self.noise.add_newest(self.differences(arm))
        for arm in left:
            self.judge(arm, self.noise.half_width(len(arm.values)))
        left = sorted((arm for arm in left if arm.outcome != NOT_BETTER), key=self.mean, reverse=True)
        return left[: max(1, math.ceil(racing * SURVIVORS ** len(left[0].values)))] if left else []

    def confirm(self) -> None:
        """Measure the winner against the user's own configuration, in pairs A B, B A, A B ..."""
        winner = Arm(self.best.candidate, self.best.candidate.label, self.original.candidate)
        self.confirmed = winner
        expected = {False: self.original.values[-1], True: self.best.values[-1]}
        for number in range(MAXIMUM_PAIRS):
            if not self.budget.has(2):
                break
            self.show(f"the winner against your configuration, pair {number + 1}")
            pair: dict[bool, float] = {}
            for is_winner in (False, True) if number % 2 == 0 else (True, False):
                arm = winner if is_winner else self.original
                try:
                    measured = self._measure(arm.candidate, expected[is_winner], RACE_ROUNDS + number)
                except BudgetSpent:
                    self.is_out_of_time = True
                    return
                except CandidateFailed as error:
                    if not is_winner:
                        raise
                    winner.outcome, winner.reason = FAILED, str(error)
                    return
                arm.probes += measured.probes
                pair[is_winner] = expected[is_winner] = measured.value
            winner.values.append(pair[True])
            winner.base_values.append(pair[False])
            if len(winner.values) > 1:
                self.judge(winner, half_width(self.differences(winner)))

    def judge(self, arm: Arm, half_width: float) -> None:
        mean = self.mean(arm)
        arm.ratio = math.exp(mean)
        arm.ci95 = math.exp(mean - half_width), math.exp(mean + half_width)
        arm.outcome = BETTER if arm.ci95[0] > 1 else NOT_BETTER if arm.ci95[1] < 1 else NOT_PROVEN

    def score(self, value: float) -> float:
        return math.log(value) if self.larger_is_better else -math.log(value)

    def differences(self, arm: Arm) -> list[float]:
        return [self.score(own) - self.score(base) for own, base in zip(arm.values, arm.base_values, strict=True)]

    def mean(self, arm: Arm) -> float:
        differences = self.differences(arm)
        return sum(differences) / len(differences)

    def _measure(self, candidate: Candidate, expected: float | None, pattern: int, in_full: bool = True) -> Measured:
        began = self.budget.now()
        try:
            measured = self.measure(candidate, expected, pattern, in_full)
        finally:
            self.budget.spend(self.budget.now() - began)
        if not measured.is_bound:
            self.repeats.setdefault(candidate, []).append(measured.value)
        self.measurements.append((candidate, measured))
        self.measured(candidate, measured)
        return measured


# --- to go on with a search that was stopped --------------------------------------------------------------------------


class Log:
    """Wraps the measurements of a search, and keeps them in a file, so that a stopped search can go on: RESUME=1.

    The search follows from its measurements and the order of its knobs. So replaying them brings it to where it
    stopped. `subject` is plain data: the measurements are valid only for it.
    """

    def __init__(
        self,
        path: Path,
        subject: dict[str, Any],
        measure: Measure,
        order: Callable[[list[Knob]], list[Knob]] = lambda knobs: knobs,
    ) -> None:
        self.path = path
        self.subject = subject
        self.entries: list[dict[str, Any]] = []
        self.replay: list[dict[str, Any]] = []
        self.knobs: list[list[str]] = []  # model and name of each, in order
        self.measure_now = measure
        self.order_now = order

    def resume(self) -> None:
        """Replay the measurements of the search that was stopped."""
        try:
            saved = json.loads(self.path.read_text())
            subject, self.knobs, self.replay = saved["subject"], saved["knobs"], saved["measurements"]
        except FileNotFoundError:
            raise UserError("RESUME=1: no search was stopped here; leave RESUME out") from None
        except (ValueError, KeyError, TypeError):
            raise UserError(f"RESUME=1: {self.path} cannot be read; leave RESUME out") from None
        if subject != self.subject:
            changed = [name for name, value in self.subject.items() if subject.get(name) != value]
            raise UserError(f"RESUME=1: the search that was stopped had another {', '.join(changed)}; leave RESUME out")

    def order(self, knobs: list[Knob]) -> list[Knob]:
        """Return the knobs in the order that the search had before it was stopped.

        The statistics that decide about a new order are gone: Triton begins them anew with every load.
        """
        if not self.knobs:
            self.knobs = [[knob.model, knob.name] for knob in self.order_now(knobs)]
        places = {(model, name): place for place, (model, name) in enumerate(self.knobs)}
        return sorted(knobs, key=lambda knob: places.get((knob.model, knob.name), len(places)))

    def measure(self, candidate: Candidate, expected: float | None, pattern: int, in_full: bool = True) -> Measured:
        changes = [list(change) for change in candidate.changes]
        if self.replay and self.replay[0]["changes"] == changes:
            entry = self.replay.pop(0)
        else:
            self.replay.clear()  # the search took another way
            entry = {"changes": changes, "value": None, "probes": [], "is_bound": False, "reason": ""}
            try:
                entry |= self.measure_now(candidate, expected, pattern, in_full)._asdict()
            except CandidateFailed as error:
                entry["reason"] = str(error)
        self.entries.append(entry)
        log = {"subject": self.subject, "knobs": self.knobs, "measurements": self.entries}
        write_atomically(self.path, json.dumps(log))
        if entry["value"] is None:
            raise CandidateFailed(entry["reason"])
        return Measured(entry["value"], [(rate, p95) for rate, p95 in entry["probes"]], entry["is_bound"])

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)
