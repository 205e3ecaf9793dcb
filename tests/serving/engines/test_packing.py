"""The cut of length-sorted rows has minimum cost or keeps all workers busy, and the cost fits what was measured."""

import itertools
import random

import numpy as np
import pytest

from serving.engines.packing import (
    PADDING,
    RunCost,
    cheapest_cut,
    equal_lengths,
    flat_cut,
    last_ends,
    row_lengths,
    spread_cut,
)

COST = RunCost(per_run=2e-3, per_token=2e-4, per_pair=1e-7, per_token2=1e-8)


def total(runs, lengths, cost):
    return sum(cost(end - start, lengths[end - 1]) for start, end in runs)


def all_cuts(count):
    for inner in itertools.product((False, True), repeat=count - 1):
        ends = [i + 1 for i, cut in enumerate(inner) if cut] + [count]
        yield list(zip([0, *ends[:-1]], ends, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_no_cut_is_cheaper(seed):
    rng = random.Random(seed)
    lengths = np.array(sorted(rng.randint(1, 256) for _ in range(rng.randint(1, 10))))
    runs = cheapest_cut(lengths, COST)
    assert [i for start, end in runs for i in range(start, end)] == list(range(len(lengths)))
    cheapest = min(total(cut, lengths, COST) for cut in all_cuts(len(lengths)))
    assert total(runs, lengths, COST) == pytest.approx(cheapest)


@pytest.mark.parametrize("workers", [2, 4, 16])
@pytest.mark.parametrize("seed", range(5))
def test_runs_are_spread_over_the_workers(seed, workers):
    rng = random.Random(seed)
    lengths = np.array(sorted(rng.randint(1, 64) for _ in range(32)))

    def last_end(runs):
        taken = {(start, end): COST(end - start, int(lengths[end - 1])) for start, end in runs}
        return last_ends(taken, workers)[0]

    few, spread = (spread_cut(lengths, COST, count) for count in (1, workers))
    assert sorted(i for start, end in spread for i in range(start, end)) == list(range(32))
    assert len(spread) >= len(few)
    assert last_end(spread) <= last_end(few)
    equal_shares = sum(COST(end - start, int(lengths[end - 1])) for start, end in spread) / workers
    assert last_end(spread) <= 1.5 * max(equal_shares, COST(1, int(lengths[-1])))


def test_run_that_takes_longest_comes_first():
    lengths = np.array([5] * 60 + [100])
    assert spread_cut(lengths, RunCost(1e-2, 1e-4), 1) == [(0, 60), (60, 61)]


def test_rows_that_pack_well_are_split_only_if_each_worker_gets_some():
    cost = RunCost(1e-4, 1e-4)
    assert spread_cut(np.full(7, 20), cost, 8) == [(0, 7)]
    assert sorted(spread_cut(np.full(8, 20), cost, 8)) == [(i, i + 1) for i in range(8)]
    assert spread_cut(np.full(8, 20), RunCost(1.0, 1e-4), 8) == [(0, 8)]  # splits would cost more than they save
    assert spread_cut(np.array([], int), cost, 8) == []


def test_other_runs_are_split_beside_a_row_that_takes_longest():
    lengths = np.array([20] * 24 + [300])
    cost = RunCost(1e-3, 1e-4)
    assert cheapest_cut(lengths, cost) == [(0, 24), (24, 25)]
    runs = spread_cut(lengths, cost, 4)
    assert (24, 25) in runs
    assert len(runs) > 2
    assert last_ends({run: cost(run[1] - run[0], int(lengths[run[1] - 1])) for run in runs}, 4)[0] == cost(1, 300)


@pytest.mark.parametrize(("lengths", "runs"), [([], []), ([3], [(0, 1)]), ([1, 1, 2, 5, 5], [(0, 2), (2, 3), (3, 5)])])
def test_runs_without_padding_have_rows_of_one_length(lengths, runs):
    assert equal_lengths(np.array(lengths, int)) == runs


def test_fit_recovers_cost_from_noisy_measurements():
    rng = random.Random(1)
    shapes = [(1, 8), (1, 32), (8, 16), (1, 256), (16, 32), (32, 32)]
    measured = [(rows, length, COST(rows, length) * rng.uniform(0.97, 1.03)) for rows, length in shapes]
    fitted = RunCost.fit(measured)
    for rows, length in shapes:
        assert fitted(rows, length) == pytest.approx(COST(rows, length), rel=0.08)


def test_fit_has_no_negative_term():
    falling = [(1, 8, 0.004), (1, 256, 0.05), (32, 64, 0.2), (32, 32, 0.15), (16, 32, 0.06)]
    fitted = RunCost.fit(falling)
    assert min(fitted.per_run, fitted.per_token, fitted.per_pair, fitted.per_token2) >= 0


def test_measure_skips_lengths_that_the_model_refuses():
    def seconds_of(rows, length):
        if length > 128:
            raise RuntimeError("position out of range")
        return COST(rows, length)

    assert RunCost.measure(seconds_of, max_rows=64)(8, 16) == pytest.approx(COST(8, 16), rel=0.2)


@pytest.mark.parametrize("max_rows", [1, 8, 64])
def test_measured_runs_follow_runs_of_another_shape(max_rows):
    shapes = []

    def seconds_of(rows, length):
        shapes.append((rows, length))
        if length > 128:
            raise RuntimeError("position out of range")
        return COST(rows, length)

    RunCost.measure(seconds_of, max_rows)
    assert all(one != next_one for one, next_one in itertools.pairwise(shapes))
    assert shapes.count((1, 256)) == 1  # a refused shape is not tried again
    assert max(rows for rows, _ in shapes) <= max_rows


def test_measure_reports_the_error_if_no_run_succeeds():
    def seconds_of(rows, length):
        raise RuntimeError("no kernel")

    with pytest.raises(ValueError, match="no kernel"):
        RunCost.measure(seconds_of, max_rows=4)


@pytest.mark.parametrize(
    ("mask", "lengths"),
    [
        ([[1, 1, 1]], [3]),
        ([[1, 1, 0], [1, 0, 0]], [2, 1]),
        ([[1, 0, 1, 0]], [3]),  # a gap inside is kept
        ([[0, 0, 1]], [3]),  # padding on the left is kept
        ([[0, 0, 0]], [3]),  # an entirely masked row keeps its width
    ],
)
def test_row_lengths_end_at_the_last_unmasked_column(mask, lengths):
    assert row_lengths(np.array(mask)).tolist() == lengths


@pytest.mark.parametrize("seed", range(5))
def test_flat_runs_stay_within_their_tokens(seed):
    rng = random.Random(seed)
    lengths = np.array(sorted(rng.randint(1, 300) for _ in range(64)))
    runs = flat_cut(lengths, 256)
    assert [i for start, end in runs[::-1] for i in range(start, end)] == list(range(64))
    for start, end in runs:
        assert end - start == 1 or lengths[start:end].sum() <= 256
        assert end - start == 1 or (end - start) * lengths[end - 1] <= PADDING * 256
    # No run could take another row.
    for start, end in runs[:-1]:
        longer = lengths[start - 1 : end]
        assert longer.sum() > 256 or len(longer) * longer[-1] > PADDING * 256


def test_flat_runs_grow_while_that_saves_time_and_memory_lasts():
    def seconds_of(rows: int, length: int) -> float:
        return 1 + 0.01 * rows * length

    cost, tokens = RunCost.measure_flat(seconds_of, 16)
    assert tokens == 1024  # twice as many take 21.5 s instead of 2 x 11.2
    assert cost(1024, 1) == pytest.approx(seconds_of(64, 16), rel=0.1)
    assert cost(1, 1) == pytest.approx(1, rel=0.05)

    def limited(rows: int, length: int) -> float:
        if rows > 32:
            raise RuntimeError("out of memory")
        return seconds_of(rows, length)

    assert RunCost.measure_flat(limited, 16)[1] == 512
