"""The numbers and the verdict, computed from windows."""

import csv
import json
import math

import pytest

from loadtest import statistics, table
from loadtest.crowd.crowd import Sample
from loadtest.switching import MODES
from loadtest.windows import Counters, Plan, Window
from scripts.common.settings import UserError
from tests.support.measured_windows import rounds, window


def test_rounds_are_in_abba_order():
    assert [mode[0] for _, mode in Plan("s", 4, None, 0, 1, None).schedule()] == list("nddnnddn")


def test_verdict_has_ratio_and_student_interval():
    verdict = statistics.verdict(rounds([(100, 150), (100, 160), (100, 140)]), "encoder")
    logs = [math.log(1.5), math.log(1.6), math.log(1.4)]
    mean = sum(logs) / 3
    half = 4.303 * math.sqrt(sum((x - mean) ** 2 for x in logs) / 2) / math.sqrt(3)
    assert verdict["throughput_ratio"] == pytest.approx(math.exp(mean))
    assert verdict["ci95"] == pytest.approx([math.exp(mean - half), math.exp(mean + half)])
    assert verdict["batched"]
    assert not verdict["client_bound"]


@pytest.mark.parametrize(
    ("interval", "outcome"),
    [
        ([1.2, 1.8], "faster"),
        ([0.6, 0.9], "slower"),
        ([0.73, 5.48], "not proven"),
        ([1.0, 1.4], "not proven"),
        (None, "not proven"),
    ],
)
def test_outcome_is_proven_only_by_an_interval_without_1(interval, outcome):
    assert statistics.outcome(interval) == outcome


def test_ratio_is_the_quotient_of_the_modes():
    windows = rounds([(100, 150), (80, 160), (120, 140)])
    by_mode = {mode: statistics.summary([w for w in windows if w.mode == mode], "encoder") for mode in MODES}
    quotient = by_mode["dynamic"]["throughput_rps"] / by_mode["none"]["throughput_rps"]
    assert statistics.verdict(windows, "encoder")["throughput_ratio"] == pytest.approx(quotient)


def test_heaviest_is_the_model_that_computes_the_most():
    assert statistics.heaviest(rounds([(100, 150)])) == "encoder"


def test_incomplete_rounds_are_not_paired():
    windows = [*rounds([(100, 150), (100, 150)]), window("none", 3, 100)]
    assert [none.round for none, _ in statistics.paired(windows)] == [1, 2]


def test_missing_batches_are_an_error():
    windows = [window("none", 1, 100), window("dynamic", 1, 100, mean_batch=1)]
    assert "'encoder' ran only 1.00" in statistics.batching_error(windows, "encoder")


def test_counters_read_between_two_updates_are_no_batch():
    windows = [window("none", 1, 100), window("dynamic", 1, 100, mean_batch=8)]
    windows[0].counters["encoder"].executions += 1
    assert not statistics.batching_error(windows, "encoder")


def test_batches_while_batching_is_off_are_an_error():
    windows = [window("none", 1, 100, mean_batch=2), window("dynamic", 1, 100, mean_batch=8)]
    assert "something else was using the server" in statistics.batching_error(windows, "encoder")
    assert not statistics.verdict(windows, "encoder")["batched"]


def test_failed_requests_do_not_count_as_throughput():
    windows = rounds([(100, 150)], errors=7)
    summary = statistics.summary([windows[0]], "encoder")
    assert summary["failures"] == 7
    assert summary["throughput_rps"] == pytest.approx(100)


def test_busy_client_is_client_bound():
    assert statistics.verdict(rounds([(100, 150), (100, 150)], cpu=0.97), "encoder")["client_bound"]


def test_counters_that_fall_raise_an_error():
    before, after = Counters(9, 9, 9, 0, 0), Counters(2, 2, 2, 0, 0)
    with pytest.raises(UserError, match="restarted"):
        after.since(before)


def test_student_t_is_never_too_narrow():
    assert statistics.t95(1) == 12.706
    assert statistics.t95(500) == statistics.t95(30) == 2.042


def test_window_of_failures_only_has_no_latencies():
    failed = window("none", 2, 100)
    failed.samples[:] = [Sample(s.at, s.latency_ms, "500 no") for s in failed.samples]
    record = statistics.window_record(failed, "encoder")
    assert (record["throughput_rps"], record["p95_ms"], record["failures"]) == (0.0, None, 1000)
    assert table.window_line(failed).split()[2:4] == ["0.0", "-"]
    assert len(statistics.paired([*rounds([(100, 150)]), failed, window("dynamic", 2, 150)])) == 1


def test_records_are_valid_json_and_csv_has_every_request(tmp_path):
    windows: list[Window] = rounds([(100, 150), (100, 150)])
    json.dumps([statistics.window_record(w, "encoder") for w in windows], allow_nan=False)
    statistics.write_csv(windows, tmp_path / "requests.csv")
    with (tmp_path / "requests.csv").open() as file:
        assert sum(1 for _ in csv.DictReader(file)) == sum(len(w.samples) for w in windows)
