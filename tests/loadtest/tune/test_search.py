"""The search on a simulated server whose best configuration is known."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from loadtest.tune.knobs import Candidate, Knob
from loadtest.tune.running_server import GUESSED_STEP, RESOLUTION, highest_rate
from loadtest.tune.search import (
    BETTER,
    FAILED,
    NOT_COMPARED,
    NOT_CONFIRMED,
    NOTHING_BETTER,
    TOO_BUSY,
    Budget,
    BudgetSpent,
    CandidateFailed,
    Measured,
    Search,
)

MEASUREMENT_S = 13.0
# Value of a knob -> the factor by which it multiplies the requests per second.
GAINS = {
    "instances": {"1 x 2 threads": 1.0, "2 x 1 threads": 1.15, "2 x 2 threads": 0.8},
    "max_batch_size": {64: 1.0, 4: 0.6, 8: 0.75, 16: 0.95, 32: 1.12, 128: 0.97},
    "dynamic_batching": {"on": 1.0, "off": 0.55},
    "max_queue_delay_microseconds": {0: 1.0, 500: 0.99, 2000: 0.96, 8000: 0.85},
    "engine": {"openvino-f32": 1.0, "openvino-bf16": 1.6, "onnxruntime": 0.9},
}


class SimulatedServer:
    """Multiplies the gains of a candidate's values; each measurement is off by some percent and takes its time."""

    def __init__(self, seed: int, gains=GAINS, noise: float = 0.05, failing: tuple = ()) -> None:
        self.random = random.Random(seed)
        self.gains, self.noise, self.failing = gains, noise, failing
        self.seconds = 0.0
        self.measurements = 0
        self.knobs = [
            Knob("encoder", name, tuple(values), lambda config, value: config) for name, values in gains.items()
        ]

    def truth(self, candidate: Candidate) -> float:
        return 300 * math.prod(self.gains[knob.name][candidate.value(knob)] for knob in self.knobs)

    def measure(self, candidate: Candidate, expected: float | None, pattern: int, in_full: bool) -> Measured:
        self.seconds += MEASUREMENT_S
        self.measurements += 1
        if any(change[2] in self.failing for change in candidate.changes):
            raise CandidateFailed("Triton refused it")
        value = self.truth(candidate) * math.exp(self.random.gauss(0, self.noise))
        return Measured(value, [(value, 99.0)])

    def search(self, minutes: float = 10, larger_is_better: bool = True, instead=None, **options) -> Search:
        """Search. `instead(search, *arguments)` may raise, or return a measurement in place of the server's."""

        def measure(*arguments) -> Measured:
            replaced = instead(self.running, *arguments) if instead else None
            measured = replaced or self.measure(*arguments)
            return measured if larger_is_better else Measured(1e5 / measured.value, [])

        self.running = Search(
            self.knobs, measure, larger_is_better, Budget(minutes * 60, lambda: self.seconds), **options
        )
        self.running.run()
        return self.running


@pytest.mark.parametrize("larger_is_better", [True, False])
def test_optimum_is_found_in_19_of_20_seeds(larger_is_better):
    right = 0
    for seed in range(20):
        server = SimulatedServer(seed)
        search = server.search(larger_is_better=larger_is_better)
        best = math.prod(max(values.values()) for values in GAINS.values()) * 300
        right += search.outcome == BETTER and server.truth(search.best.candidate) >= 0.97 * best
    assert right >= 19


def test_interval_of_the_winner_covers_its_true_gain():
    covered = 0
    for seed in range(40):
        server = SimulatedServer(seed)
        confirmed = server.search().confirmed
        true = server.truth(confirmed.candidate) / server.truth(Candidate())
        covered += confirmed.ci95[0] <= true <= confirmed.ci95[1]
    assert covered >= 35


def test_equal_configurations_rarely_win():
    """A false win has a probability of at most 2.5 %."""
    equal = {name: dict.fromkeys(values, 1.0) for name, values in GAINS.items()}
    outcomes = [SimulatedServer(seed, equal).search().outcome for seed in range(3000)]
    assert outcomes.count(BETTER) <= 0.025 * len(outcomes)


def test_bad_start_ends_as_well_as_the_defaults():
    """Start where no single knob gains anything: a batch needs one instance, and one instance needs batches."""
    bad = {
        "instances": {"4 x 4 threads": 0.5, "1 x 2 threads": 1.0, "2 x 1 threads": 1.15, "2 x 2 threads": 0.8},
        "max_batch_size": {1: 0.5, 4: 0.6, 8: 0.75, 16: 0.95, 32: 1.12},
    }
    usual = {"instances": "1 x 2 threads", "max_batch_size": 32}

    class NothingAlone(SimulatedServer):
        def truth(self, candidate: Candidate) -> float:
            return super().truth(candidate if len(candidate.changes) != 1 else Candidate())

    ends = []
    for seed in range(20):
        server = NothingAlone(seed, bad)
        server.knobs = [dataclasses.replace(knob, usual=usual[knob.name]) for knob in server.knobs]
        search = server.search()
        assert search.outcome == BETTER
        ends.append(server.truth(search.best.candidate) / (300 * 1.15 * 1.12))
    assert sorted(ends)[1] >= 0.95


@pytest.mark.parametrize("minutes", [4, 6, 10, 20])
def test_budget_is_kept(minutes):
    for seed in range(5):
        server = SimulatedServer(seed)
        server.search(minutes)
        assert server.seconds <= minutes * 60


def test_candidates_of_an_unfinished_round_are_kept():
    server = SimulatedServer(1)

    def spend(*_):
        if server.measurements == 5:  # three of the original, two of the first round
            raise BudgetSpent

    search = server.search(instead=spend)
    assert [len(arm.values) for arm in search.arms] == [1]
    assert search.arms[0].ratio


def test_original_that_fails_beside_the_winner_is_not_blamed_on_the_winner():
    server = SimulatedServer(1)

    def crash(search, candidate, *_):
        if search.confirmed and not candidate.changes:
            raise CandidateFailed("the server crashed")

    with pytest.raises(CandidateFailed):
        server.search(instead=crash)
    assert (server.running.outcome, server.running.confirmed.reason) == (NOT_CONFIRMED, "")


def test_only_candidates_in_a_race_may_be_measured_in_part():
    in_part = []

    def note(search, candidate, expected, pattern, in_full):
        if not in_full:
            in_part.append((candidate, search.best.candidate, search.confirmed))

    assert SimulatedServer(1).search(instead=note).outcome == BETTER
    assert in_part
    assert not [candidate for candidate, best, confirmed in in_part if candidate == best or confirmed]


def test_values_that_change_nothing_are_not_measured():
    search = SimulatedServer(1).search(same=lambda *_: True)
    assert (search.arms, search.outcome) == ([], NOTHING_BETTER)


def test_winner_whose_fresh_measurements_disagree_is_no_verdict():
    server = SimulatedServer(1)

    def disturb(search, *arguments):
        measured = server.measure(*arguments)
        factor = server.random.choice([0.1, 1]) if search.confirmed else 1
        return measured._replace(value=measured.value * factor)

    search = server.search(instead=disturb)
    assert search.confirmed.values
    assert search.outcome == TOO_BUSY


def test_budget_too_small_for_a_verdict_ends_after_the_first_measurements():
    server = SimulatedServer(1)
    search = server.search(minutes=2.5)
    assert (search.outcome, server.measurements, search.arms) == (NOT_COMPARED, 3, [])
    assert search.budget.needed(3) == 12 * MEASUREMENT_S


@pytest.mark.parametrize("measured", [0, 2])
def test_measurements_that_outlast_the_budget_leave_what_was_measured(measured):
    server = SimulatedServer(1)

    def spend(*_):
        if server.measurements == measured:
            raise BudgetSpent

    search = server.search(instead=spend)
    assert (search.outcome, len(search.original.values)) == (NOT_COMPARED, measured)


@pytest.mark.parametrize("seed", range(5))
def test_every_measurement_counts_or_is_named_as_uncounted(seed):
    search = SimulatedServer(seed).search()
    shown = len(search.original.values) + sum(len(arm.values) for arm in search.arms) + 2 * len(search.confirmed.values)
    beside = {(arm.base, value) for arm in search.arms for value in arm.base_values}
    assert len(search.measurements) == shown + len(beside) + search.uncounted
    assert search.uncounted <= 3  # of a round that the time ended


def test_measurement_that_outlasts_the_budget_ends_the_search():
    """The server slows down in the middle: a measurement is given up when only the time for the end is left."""
    server = SimulatedServer(1)

    def slow_down(*_):
        if server.measurements > 5:
            server.seconds += 1000
            raise BudgetSpent

    search = server.search(5, instead=slow_down)
    assert search.outcome in (NOTHING_BETTER, NOT_CONFIRMED, NOT_COMPARED)
    assert search.is_out_of_time


def test_search_without_a_candidate_that_was_measured_twice_has_no_verdict():
    def spend(search, candidate, *_):
        if candidate.changes:
            raise BudgetSpent

    assert SimulatedServer(1).search(400 / 60, instead=spend).outcome == NOT_COMPARED


def test_candidate_that_fails_is_one_arm():
    server = SimulatedServer(1, failing=("openvino-bf16", 32))
    search = server.search()
    failed = [arm for arm in search.arms if arm.outcome == FAILED]
    assert {arm.reason for arm in failed} == {"Triton refused it"}
    assert search.outcome == BETTER
    assert not {"openvino-bf16", 32} & {value for _, _, value in search.best.candidate.changes}


class DisturbedServer(SimulatedServer):
    """The measurements whose numbers are in `disturbed` are off by these factors."""

    disturbed: dict[int, float] = {}  # noqa: RUF012

    def measure(self, *arguments) -> Measured:
        measured = super().measure(*arguments)
        return measured._replace(value=measured.value * self.disturbed.get(self.measurements, 1.0))


def test_machine_whose_repeats_disagree_is_too_busy_to_tell():
    """The values are those of a report that announced 59.6 requests/s as what the server answers."""
    server = DisturbedServer(1, noise=0)
    server.disturbed = dict(enumerate([0.03, 0.6, 0.9, 0.05, 0.8, 0.2], 1))
    search = server.search()
    assert search.outcome == TOO_BUSY
    assert search.arms == []
    label, values = search.disagreement
    assert label == Candidate()
    assert values == pytest.approx([300 * factor for factor in server.disturbed.values()])


def test_first_measurements_that_were_disturbed_do_not_count():
    server = DisturbedServer(1)
    server.disturbed = {1: 0.03, 2: 0.5}
    search = server.search()
    assert search.outcome == BETTER
    assert len(search.disturbed) == 2 <= search.uncounted
    assert min(search.original.values) > 250


def test_verdict_leaves_time_to_restore_and_to_report():
    budget = Budget(100, lambda: 0.0)
    before = budget.left
    budget.loaded(20)
    budget.loaded(5)
    assert budget.left == before - 20
    assert before < 100


def bisected(capacity: float, *arguments, **options) -> tuple[float, list[float]]:
    """Return the highest rate that a server of this capacity answers, and the rates that were tried."""
    rates: list[float] = []
    return highest_rate(lambda rate: rates.append(rate) or rate <= capacity, *arguments, **options), rates


@pytest.mark.parametrize("capacity", [0.5, 3, 47, 100, 101, 450, 20_000])
@pytest.mark.parametrize("start", [10, 100])
def test_bisection_finds_the_capacity(capacity, start):
    rate, rates = bisected(capacity, start)
    assert 1 / RESOLUTION < rate / capacity < RESOLUTION
    assert len(rates) <= 16


def test_bisection_takes_few_tries_from_a_close_start_or_a_guess_and_stops_where_it_may():
    assert len(bisected(105, 100)[1]) <= 5
    assert sum(rate < 50 for rate in bisected(105, 5, step=GUESSED_STEP)[1]) <= 3
    rate, rates = bisected(10, 100, give_up_below=70)
    assert rate == 70 and len(rates) <= 4
