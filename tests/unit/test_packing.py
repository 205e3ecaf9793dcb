"""The cut of length-sorted rows: cheapest by the measured cost, whatever the lengths."""

import itertools
import random

import numpy as np
import pytest

from shared.packing import RunCost, cheapest_cut, row_lengths

COST = RunCost(per_run=2e-3, per_token=2e-4, per_pair=1e-7, per_token2=1e-8)


def total(runs, lengths, cost):
    return sum(cost(end - start, lengths[end - 1]) for start, end in runs)


def every_cut(count):
    for inner in itertools.product((False, True), repeat=count - 1):
        ends = [i + 1 for i, cut in enumerate(inner) if cut] + [count]
        yield list(zip([0, *ends[:-1]], ends, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_no_cut_is_cheaper(seed):
    rng = random.Random(seed)
    lengths = np.array(sorted(rng.randint(1, 256) for _ in range(rng.randint(1, 10))))
    runs = cheapest_cut(lengths, COST)
    assert [i for start, end in runs for i in range(start, end)] == list(range(len(lengths)))
    assert total(runs, lengths, COST) == pytest.approx(min(total(r, lengths, COST) for r in every_cut(len(lengths))))


def test_equal_lengths_stay_together_and_unequal_ones_do_not():
    assert cheapest_cut(np.full(16, 20), RunCost(2e-3, 2e-4)) == [(0, 16)]
    assert cheapest_cut(np.array([5] * 8 + [200] * 8), COST)[0] == (0, 8)


def test_a_run_that_costs_nothing_is_cut_at_every_length():
    assert cheapest_cut(np.array([1, 2, 3]), RunCost(0.0, 1e-4)) == [(0, 1), (1, 2), (2, 3)]


def test_fit_finds_the_cost_back_under_noise():
    rng = random.Random(1)
    shapes = [(1, 8), (1, 32), (8, 16), (1, 256), (16, 32), (32, 32)]
    measured = [(rows, length, COST(rows, length) * rng.uniform(0.97, 1.03)) for rows, length in shapes]
    fitted = RunCost.fit(measured)
    for rows, length in shapes:
        assert fitted(rows, length) == pytest.approx(COST(rows, length), rel=0.08)


def test_fit_never_has_a_negative_term():
    falling = [(1, 8, 0.004), (1, 256, 0.05), (32, 64, 0.2), (32, 32, 0.15), (16, 32, 0.06)]
    fitted = RunCost.fit(falling)
    assert min(fitted.per_run, fitted.per_token, fitted.per_pair, fitted.per_token2) >= 0


def test_measuring_passes_over_lengths_the_model_refuses():
    def seconds_of(rows, length):
        if length > 128:
            raise RuntimeError("position out of range")
        return COST(rows, length)

    assert RunCost.measure(seconds_of, max_rows=64)(8, 16) == pytest.approx(COST(8, 16), rel=0.2)


def test_measuring_says_when_nothing_runs():
    def seconds_of(rows, length):
        raise RuntimeError("no kernel")

    with pytest.raises(ValueError, match="no kernel"):
        RunCost.measure(seconds_of, max_rows=4)


@pytest.mark.parametrize(
    ("mask", "lengths"),
    [
        ([[1, 1, 1]], [3]),
        ([[1, 1, 0], [1, 0, 0]], [2, 1]),
        ([[1, 0, 1, 0]], [3]),  # a hole inside stays
        ([[0, 0, 1]], [3]),  # padding on the left stays
        ([[0, 0, 0]], [3]),  # entirely masked: keeps its width
    ],
)
def test_row_lengths(mask, lengths):
    assert row_lengths(np.array(mask)).tolist() == lengths
