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
    BudgetTooSmall,
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

    def search(self, minutes: float = 10, larger_is_better: bool = True) -> Search:
        measure = self.measure
        if not larger_is_better:
            measure = lambda *arguments: Measured(1e5 / self.measure(*arguments).value, [])  # noqa: E731
        search = Search(self.knobs, measure, larger_is_better, Budget(minutes * 60, lambda: self.seconds))
        search.run()
        return search


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
    search = Search(server.knobs, server.measure, True, Budget(600, lambda: server.seconds))

    def measure(candidate, *arguments):
        if server.measurements == 5:  # three of the original, two of the first round
            raise BudgetSpent
        return server.measure(candidate, *arguments)

    search.measure = measure
    search.run()
    assert [len(arm.values) for arm in search.arms] == [1]
    assert search.arms[0].ratio


def test_candidate_that_fails_is_one_arm():
    server = SimulatedServer(1, failing=("openvino-bf16", 32))
    search = server.search()
    failed = [arm for arm in search.arms if arm.outcome == FAILED]
    assert {arm.reason for arm in failed} == {"Triton refused it"}
    assert search.outcome == BETTER
    assert not {"openvino-bf16", 32} & {value for _, _, value in search.best.candidate.changes}


def test_original_that_fails_beside_the_winner_is_not_blamed_on_the_winner():
    server = SimulatedServer(1)
    search = Search(server.knobs, server.measure, True, Budget(600, lambda: server.seconds))

    def measure(candidate, *arguments):
        if search.confirmed and not candidate.changes:
            raise CandidateFailed("the server crashed")
        return server.measure(candidate, *arguments)

    search.measure = measure
    with pytest.raises(CandidateFailed):
        search.run()
    assert (search.outcome, search.confirmed.reason) == (NOT_CONFIRMED, "")


def test_only_candidates_in_a_race_may_be_measured_in_part():
    server = SimulatedServer(1)
    search = Search(server.knobs, server.measure, True, Budget(600, lambda: server.seconds))
    in_part = []

    def measure(candidate, expected, pattern, in_full):
        if not in_full:
            in_part.append((candidate, search.best.candidate, search.confirmed))
        return server.measure(candidate, expected, pattern, in_full)

    search.measure = measure
    search.run()
    assert search.outcome == BETTER
    assert in_part
    assert not [candidate for candidate, best, confirmed in in_part if candidate == best or confirmed]


def test_values_that_change_nothing_are_not_measured():
    server = SimulatedServer(1)
    search = Search(server.knobs, server.measure, True, Budget(600, lambda: server.seconds), same=lambda *_: True)
    search.run()
    assert (search.arms, search.outcome) == ([], NOTHING_BETTER)


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
    assert len(search.disturbed) == 2
    assert min(search.original.values) > 250


def test_winner_whose_fresh_measurements_disagree_is_no_verdict():
    server = SimulatedServer(1)
    search = Search(server.knobs, server.measure, True, Budget(600, lambda: server.seconds))

    def measure(candidate, *arguments):
        measured = server.measure(candidate, *arguments)
        return (
            measured._replace(value=measured.value * server.random.choice([0.1, 1])) if search.confirmed else measured
        )

    search.measure = measure
    search.run()
    assert search.confirmed.values
    assert search.outcome == TOO_BUSY


def test_budget_too_small_for_a_verdict_is_refused():
    with pytest.raises(BudgetTooSmall) as refused:
        SimulatedServer(1).search(minutes=2.5)
    assert refused.value.measurement_s == MEASUREMENT_S


def test_much_too_small_budget_is_refused_after_one_measurement():
    server = SimulatedServer(1)
    with pytest.raises(BudgetTooSmall):
        server.search(minutes=1.5)
    assert server.measurements == 1


def test_measurement_that_outlasts_the_budget_ends_the_search():
    """The server slows down in the middle: a measurement is given up when only the time for the end is left."""
    server = SimulatedServer(1)
    search = Search(server.knobs, server.measure, True, Budget(300, lambda: server.seconds))

    def measure(*arguments):
        if server.measurements > 5:
            server.seconds += 1000
            raise BudgetSpent
        return server.measure(*arguments)

    search.measure = measure
    search.run()
    assert search.outcome in (NOTHING_BETTER, NOT_CONFIRMED, NOT_COMPARED)
    assert search.is_out_of_time


def test_search_without_a_candidate_that_was_measured_twice_has_no_verdict():
    server = SimulatedServer(1)
    search = Search(server.knobs, server.measure, True, Budget(400, lambda: server.seconds))

    def measure(candidate, *arguments):
        if candidate.changes:
            raise BudgetSpent
        return server.measure(candidate, *arguments)

    search.measure = measure
    search.run()
    assert search.outcome == NOT_COMPARED


def test_verdict_leaves_time_to_restore_and_to_report():
    budget = Budget(100, lambda: 0.0)
    before = budget.left
    budget.loaded(20)
    budget.loaded(5)
    assert budget.left == before - 20
    assert before < 100


@pytest.mark.parametrize("capacity", [0.5, 3, 47, 100, 101, 450, 20_000])
@pytest.mark.parametrize("start", [10, 100])
def test_bisection_finds_the_capacity(capacity, start):
    rates = []

    def meets(rate: float) -> bool:
        rates.append(rate)
        return rate <= capacity

    assert 1 / RESOLUTION < highest_rate(meets, start) / capacity < RESOLUTION
    assert len(rates) <= 16


def test_bisection_that_starts_close_takes_few_tries():
    rates = []
    highest_rate(lambda rate: rates.append(rate) or rate <= 105, 100)
    assert len(rates) <= 5


def test_bisection_from_a_guess_tries_few_low_rates():
    rates = []
    highest_rate(lambda rate: rates.append(rate) or rate <= 105, 5, step=GUESSED_STEP)
    assert sum(rate < 50 for rate in rates) <= 3


def test_bisection_stops_below_what_the_caller_needs():
    rates = []
    assert highest_rate(lambda rate: rates.append(rate) or rate <= 10, 100, give_up_below=70) == 70
    assert len(rates) <= 4
