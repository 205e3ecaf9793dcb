"""The numbers and the verdict, computed from windows."""

import csv
import json
import math

import numpy as np
import pytest

from loadtest.load.arrivals import Sample
from loadtest.measure import statistics
from loadtest.measure.verdicts import Code
from loadtest.measure.windows import Counters, Window, schedule
from loadtest.reports import report
from tests.support.measured_windows import generating_window, open_loop_rounds, rounds, window
from triton_transformers.settings import MODES, UserError


@pytest.mark.parametrize(("modes", "order"), [(("none", "dynamic"), "AB BA AB BA"), (MODES, "ABC CBA ACB BCA ABC CBA")])
def test_rounds_mirror_each_other_so_that_a_steady_drift_cancels(modes, order):
    rounds = order.split()
    assert [(number, "ABC"[modes.index(mode)]) for number, mode in schedule(modes, len(rounds))] == [
        (number, letter) for number, letters in enumerate(rounds, 1) for letter in letters
    ]
    # A machine that gets slower from window to window takes the same from every mode.
    for count in (2, 4, 6):
        places = {mode: [] for mode in modes}
        for place, (_, mode) in enumerate(schedule(modes, count)):
            places[mode].append(place)
        assert len({sum(of_mode) for of_mode in places.values()}) == 1


def test_verdict_has_ratio_and_student_interval():
    verdict = statistics.verdict(rounds([(100, 150), (100, 160), (100, 140)]), "encoder")
    logs = [math.log(1.5), math.log(1.6), math.log(1.4)]
    mean = sum(logs) / 3
    half = 4.303 * math.sqrt(sum((x - mean) ** 2 for x in logs) / 2) / math.sqrt(3)
    assert verdict["throughput_ratio"] == pytest.approx(math.exp(mean))
    assert verdict["ci95"] == pytest.approx([math.exp(mean - half), math.exp(mean + half)])
    assert not verdict["client_bound"]


def test_failed_requests_do_not_count_as_throughput():
    summary = statistics.summary(rounds([(100, 150)], errors=7)[:1], "encoder")
    assert (summary["failures"], summary["throughput_rps"]) == (7, pytest.approx(100))
    assert not {"overloaded", "given_up", "unanswered_at_end"} & summary.keys()  # a closed loop has none


def test_counters_that_fall_raise_an_error():
    with pytest.raises(UserError, match="restarted"):
        Counters(2, 2, 2, 0, 0).since(Counters(9, 9, 9, 0, 0))
    assert statistics.t95(1) == 12.706
    assert statistics.t95(500) == statistics.t95(30) == 2.042  # never too narrow


def test_ratio_is_the_quotient_of_the_modes():
    windows = rounds([(100, 150), (80, 160), (120, 140)])
    by_mode = {
        mode: statistics.summary([w for w in windows if w.mode == mode], "encoder") for mode in ("none", "dynamic")
    }
    quotient = by_mode["dynamic"]["throughput_rps"] / by_mode["none"]["throughput_rps"]
    assert statistics.verdict(windows, "encoder")["throughput_ratio"] == pytest.approx(quotient)


@pytest.mark.parametrize(
    ("mode", "batches", "skew", "error"),
    [
        ("none", (1, 8), 0, None),
        ("none", (1, 8), 1, None),  # the counters were read between two updates
        ("none", (1, 1), 0, Code.NO_BATCHES),
        ("none", (2, 8), 0, Code.FOREIGN_BATCHES),
        ("instances", (2, 8), 0, Code.FOREIGN_BATCHES),
    ],
)
def test_batches_that_contradict_the_modes_are_an_error(mode, batches, skew, error):
    windows = [window(mode, 1, 100, mean_batch=batches[0]), window("dynamic", 1, 100, mean_batch=batches[1], cpu=0.97)]
    windows[0].counters["encoder"].executions += skew
    found = statistics.batching_error(windows, statistics.heaviest(windows))
    assert (found.code if found else None) == error
    assert statistics.verdict(windows, "encoder")["client_bound"]


@pytest.mark.parametrize(
    ("together", "steps", "error"),
    [(6.0, 1.0, None), (6.0, 1.5, Code.RAN_TOGETHER), (1.0, 1.0, Code.RAN_ONE_AT_A_TIME)],
)
def test_texts_that_run_otherwise_than_their_mode_are_an_error(together, steps, error):
    windows = [generating_window("none", 1, 20, steps), generating_window("dynamic", 1, 100, together)]
    found = statistics.batching_error(windows, "story")
    assert (found.code if found else None) == error


@pytest.mark.parametrize(
    ("generates", "rate", "users", "remedy"),
    [
        (False, 100.0, 64, "a higher RATE"),
        (False, 0.0, 1, "more USERS"),
        (False, 0.0, 64, "more USERS than the model's instances"),
        (True, 0.0, 64, "a max_batch above 1"),
    ],
)
def test_remedy_of_no_batches_follows_from_the_load(generates, rate, users, remedy):
    assert remedy in statistics.more_batches(users, rate, generates)


@pytest.mark.parametrize(
    ("rates", "baseline", "ratios"),
    [
        ([(100, 120, 180), (100, 120, 180)], "instances", {"none": 1.8, "instances": 1.5}),
        ([(120, 100, 180), (120, 100, 180)], "none", {"none": 1.5, "instances": 1.8}),
        # The better one of each round is another one; of all rounds, it is `instances`.
        ([(110, 100, 200), (100, 130, 200)], "instances", {"none": 1.907, "instances": 1.754}),
    ],
)
def test_headline_is_the_ratio_to_the_best_other_mode(rates, baseline, ratios):
    verdict = statistics.verdict(rounds(rates), "encoder")
    assert verdict["baseline"] == baseline
    assert {mode: ratio["throughput_ratio"] for mode, ratio in verdict["ratios"].items()} == pytest.approx(ratios, 1e-3)
    assert verdict["throughput_ratio"] == min(ratio["throughput_ratio"] for ratio in verdict["ratios"].values())
    assert verdict["ci95"] == verdict["ratios"][baseline]["ci95"]
    slowest = 1000 / min(rate[MODES.index(baseline)] for rate in rates)
    assert verdict["p95_ratio"] == pytest.approx(1000 / rates[0][2] / slowest)


def test_choice_of_the_baseline_never_flatters_dynamic_batching(monkeypatch):
    """Compare often where both other modes are equally good: at most 2.5 % of the intervals lie above the truth."""
    monkeypatch.setattr(statistics, "score", float)  # the windows are plain rates here
    random = np.random.default_rng(1)
    too_high = 0
    for _ in range(2000):
        rates = np.exp(random.normal(0, 0.05, (4, 3))) * (100, 100, 150)
        by_round = [dict(zip(MODES, of_round, strict=True)) for of_round in rates]
        baseline = statistics.best(by_round, ["none", "instances"])
        too_high += statistics.ratio(by_round, baseline)["ci95"][0] > 1.5
    assert too_high / 2000 < 0.025


def test_incomplete_rounds_do_not_count():
    windows = [*rounds([(100, 150), (100, 150)]), window("none", 3, 100)]
    assert [by_mode["none"].round for by_mode in statistics.complete_rounds(windows)] == [1, 2]
    # Round 3 has no window of `dynamic`.
    windows = [*rounds([(100, 120, 150)]), window("none", 3, 100), window("instances", 3, 100)]
    assert len(statistics.complete_rounds(windows)) == 1
    assert statistics.complete_rounds([window("none", 1, 100), window("instances", 1, 100)]) == []
    assert statistics.complete_rounds([window("dynamic", 1, 100)]) == []


def test_first_format_is_the_baseline_even_if_the_first_round_is_incomplete():
    windows = [window("onnx", 1, 100), window("int8", 2, 150, start=20), window("onnx", 2, 100, start=40)]
    (complete,) = statistics.complete_rounds(windows)
    verdict = statistics.verdict([*complete.values()], "encoder", ["onnx", "int8"])
    assert (verdict["baseline"], verdict["subject"]) == ("onnx", "int8")
    assert verdict["throughput_ratio"] == pytest.approx(1.5)


def test_window_of_failures_only_has_no_latencies():
    failed = window("none", 2, 100)
    failed.samples[:] = [Sample(s.at, s.latency_ms, "500 no") for s in failed.samples]
    record = statistics.window_record(failed, "encoder")
    assert (record["throughput_rps"], record["p95_ms"], record["failures"]) == (0.0, None, 1000)
    assert report.window_line(failed).split()[2:4] == ["0.0", "-"]
    assert len(statistics.complete_rounds([*rounds([(100, 150)]), failed, window("dynamic", 2, 150)])) == 1


def test_records_are_valid_json_and_csv_has_every_request(tmp_path):
    windows: list[Window] = rounds([(100, 150), (100, 150)])
    json.dumps([statistics.window_record(w, "encoder") for w in windows], allow_nan=False)
    statistics.write_csv(windows, tmp_path / "requests.csv")
    with (tmp_path / "requests.csv").open() as file:
        assert sum(1 for _ in csv.DictReader(file)) == sum(len(w.samples) for w in windows)


# --- open loop --------------------------------------------------------------------------------------------------------


def test_open_loop_compares_95th_percentiles_round_by_round():
    verdict = statistics.verdict(open_loop_rounds([(100, 50), (120, 50), (100, 60)]), "encoder")
    logs = [math.log(2), math.log(2.4), math.log(10 / 6)]
    half = 4.303 * np.std(logs, ddof=1) / math.sqrt(3)
    assert verdict["headline"] == "latency_ratio"
    assert "throughput_ratio" not in verdict
    assert verdict["latency_ratio"] == pytest.approx(math.exp(np.mean(logs)))
    assert verdict["ci95"] == pytest.approx([math.exp(np.mean(logs) - half), math.exp(np.mean(logs) + half)])
    assert verdict["overloaded"] == []
    assert verdict["p95_ratio"] < 1


def test_best_other_mode_of_an_open_loop_has_the_lowest_percentile():
    verdict = statistics.verdict(open_loop_rounds([(100, 80, 50), (100, 90, 50)]), "encoder")
    assert verdict["baseline"] == "instances"
    assert {mode: ratio["latency_ratio"] for mode, ratio in verdict["ratios"].items()} == pytest.approx(
        {"none": 2.0, "instances": math.sqrt(1.6 * 1.8)}
    )


def test_overloaded_mode_is_named_and_loses_nothing():
    windows = open_loop_rounds([(9000, 50), (9500, 50)], overloaded=("none",))
    none, dynamic = (
        statistics.summary([w for w in windows if w.mode == mode], "encoder") for mode in ("none", "dynamic")
    )
    assert (none["overloaded"], none["overloaded_windows"], dynamic["overloaded"]) == (True, 2, False)
    assert (none["throughput_rps"], dynamic["throughput_rps"]) == pytest.approx((50, 100))
    assert (none["requests"], none["given_up"], none["failures"]) == (2000, 2, 0)
    assert none["p99_ms"] > 9000  # requests that were never sent count with the time that they waited
    assert statistics.verdict(windows, "encoder")["overloaded"] == ["none"]
