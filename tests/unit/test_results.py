"""Windows in, verdict out."""

import csv
import json
import math

import pytest

from loadtest import statistics as results
from loadtest.switching import MODES
from loadtest.windows import Counters, Plan, Sample, Window
from scripts.common.settings import UserError


def window(mode, number, rps, mean_batch=1.0, cpu=0.2, errors=0, seconds=10.0):
    count = int(rps * seconds)
    samples = [Sample(i / rps, 1000 / rps, "") for i in range(count)] + [Sample(1.0, 5.0, "500 no")] * errors
    executions = round(count / mean_batch)
    counters = {
        "encoder": Counters(count, count, executions, count * 10**6, count * 5 * 10**6, {int(mean_batch): executions}),
        "tokenizer": Counters(count, count, count, count * 10**5, count * 10**5, {1: count}),
    }
    return Window(number, mode, 0.0, seconds, samples, counters, cpu, 0.0)


def rounds(pairs, **kwargs):
    return [
        window(mode, n, rps, mean_batch=8 if mode == "dynamic" else 1, **kwargs)
        for n, pair in enumerate(pairs, 1)
        for mode, rps in zip(MODES, pair, strict=True)
    ]


def test_the_order_is_abba():
    assert [mode[0] for _, mode in Plan("s", 4, None, 0, 1, None).schedule()] == list("nddnnddn")


def test_ratio_and_interval():
    found = results.verdict(rounds([(100, 150), (100, 160), (100, 140)]), "encoder")
    logs = [math.log(1.5), math.log(1.6), math.log(1.4)]
    mean = sum(logs) / 3
    half = 4.303 * math.sqrt(sum((x - mean) ** 2 for x in logs) / 2) / math.sqrt(3)
    assert found["throughput_ratio"] == pytest.approx(math.exp(mean))
    assert found["ci95"] == pytest.approx([math.exp(mean - half), math.exp(mean + half)])
    assert found["batched"]
    assert not found["client_bound"]


def test_the_ratio_is_the_quotient_of_the_table():
    windows = rounds([(100, 150), (80, 160), (120, 140)])
    by_mode = {mode: results.summary([w for w in windows if w.mode == mode], "encoder") for mode in MODES}
    quotient = by_mode["dynamic"]["throughput_rps"] / by_mode["none"]["throughput_rps"]
    assert results.verdict(windows, "encoder")["throughput_ratio"] == pytest.approx(quotient)


def test_the_heaviest_model_decides():
    assert results.heaviest(rounds([(100, 150)])) == "encoder"


def test_only_whole_rounds_are_paired():
    windows = [*rounds([(100, 150), (100, 150)]), window("none", 3, 100)]
    assert [none.round for none, _ in results.paired(windows)] == [1, 2]


def test_batching_that_did_not_happen_is_said():
    windows = [window("none", 1, 100), window("dynamic", 1, 100, mean_batch=1)]
    assert "'encoder' ran only 1.00" in results.unproven(windows, "encoder")


def test_batching_that_happened_though_off_is_said():
    windows = [window("none", 1, 100, mean_batch=2), window("dynamic", 1, 100, mean_batch=8)]
    assert "something else was using the server" in results.unproven(windows, "encoder")
    assert not results.verdict(windows, "encoder")["batched"]


def test_failures_do_not_count_as_throughput():
    windows = rounds([(100, 150)], errors=7)
    found = results.summary([windows[0]], "encoder")
    assert found["failures"] == 7
    assert found["throughput_rps"] == pytest.approx(100)


def test_a_busy_client_is_said():
    assert results.verdict(rounds([(100, 150), (100, 150)], cpu=0.97), "encoder")["client_bound"]


def test_a_server_that_restarted_is_said():
    before, after = Counters(9, 9, 9, 0, 0), Counters(2, 2, 2, 0, 0)
    with pytest.raises(UserError, match="restarted"):
        after.since(before)


def test_student_t_never_ends_too_narrow():
    assert results.t95(1) == 12.706
    assert results.t95(500) == results.t95(30) == 2.042


def test_a_window_without_one_sound_answer():
    dead = window("none", 2, 100)
    dead.samples[:] = [Sample(s.at, s.latency_ms, "500 no") for s in dead.samples]
    record = results.window_record(dead, "encoder")
    assert (record["throughput_rps"], record["p95_ms"], record["failures"]) == (0.0, None, 1000)
    assert results.window_line(dead).split()[2:4] == ["0.0", "-"]
    assert len(results.paired([*rounds([(100, 150)]), dead, window("dynamic", 2, 150)])) == 1


def test_everything_is_json_and_csv(tmp_path):
    windows = rounds([(100, 150), (100, 150)])
    json.dumps([results.window_record(w, "encoder") for w in windows], allow_nan=False)
    results.write_csv(windows, tmp_path / "requests.csv")
    with (tmp_path / "requests.csv").open() as file:
        assert sum(1 for _ in csv.DictReader(file)) == sum(len(w.samples) for w in windows)


@pytest.mark.parametrize(("answered", "said"), [(1000, False), (1300, False), (1500, True)])
def test_foreign_load_is_said(answered, said):
    """Triton counts from a moment before the window to a moment after."""
    windows = [{"answered_by_triton": answered, "requests": 1000}] * 2
    assert bool(results.foreign({"windows": windows, "settings": {"users": 32}})) is said
