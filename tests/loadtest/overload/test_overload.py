"""The numbers of `make loadtest OVERLOAD=3`."""

from __future__ import annotations

import itertools

import pytest

from loadtest.load.arrivals import GIVEN_UP, Sample
from loadtest.measure.verdicts import Cause, Code, judge
from loadtest.overload import overload
from tests.support.report_results import LATE, REFUSAL


def test_figures_count_each_request_once():
    samples = [
        Sample(1.0, 500.0, ""),
        Sample(2.0, 100.0, ""),
        Sample(1.5, 4.0, REFUSAL, late_ms=1.0, is_refused=True),
        Sample(1.6, 8.0, REFUSAL, late_ms=3.0, is_refused=True),
        Sample(1.7, 3.0, "500 the server failed"),
        Sample(3.0, 200.0, GIVEN_UP),
        Sample(0.1, 300.0, ""),  # arrived before the window, and was answered in it
        Sample(4.5, 1000.0, ""),  # arrived in the window, and was answered after it
    ]
    figures = overload.figures(samples, 4.0, target_ms=300)
    counts = ("arrived", "accepted", "refused", "failed", "given_up")
    assert [figures[name] for name in counts] == [7, 3, 2, 1, 1]
    assert figures["answered_rps"] == 3 / 4
    assert figures["goodput_rps"] == 2 / 4
    assert figures["accepted_within_target"] == 1
    assert figures["refused_share"] == pytest.approx(2 / 7)
    assert (figures["arrived_rps"], figures["sent_rps"]) == (7 / 4, 6 / 4)
    assert (figures["refused_p50_ms"], figures["refused_since_sent_p50_ms"]) == (6, 4)
    assert figures["late_p95_ms"] == 2.5
    assert figures["accepted_p50_ms"] == 500
    alone = overload.figures([Sample(1.0, 5.0, "")], 2.0, target_ms=10)
    assert (alone["refused_share"], alone["refused_p95_ms"]) == (0.0, None)


@pytest.mark.parametrize(
    ("latencies", "seconds"),
    [([5] * 5, 1), ([None, 50, 5, 5, 5, 5, 5], 3), ([5, 5, 5, 50, 5, 5, 5, 5, 5], 5), ([50] * 99, None)],
)
def test_recovery_ends_with_the_first_of_several_fast_requests(monkeypatch, latencies, seconds):
    monkeypatch.setattr(overload.gevent, "sleep", lambda _: None)
    answers, clock = iter(latencies), itertools.count()
    # The clock is read once at the start, and once before each request.
    recovered_s, requests = overload.recovery(lambda: next(answers), 10, lambda: next(clock))
    assert recovered_s == seconds
    assert [latency for _, latency in requests] == latencies[: len(requests)]
    assert requests[0][0] == 1


def test_timeline_counts_the_responses_of_each_second():
    samples = [
        Sample(0.5, 100.0, ""),
        Sample(0.9, 900.0, ""),
        Sample(0.7, 4.0, REFUSAL, is_refused=True),
        Sample(2.5, 100.0, ""),
        Sample(2.6, 3.0, "500 the server failed"),
        Sample(2.7, 200.0, GIVEN_UP),
        Sample(-0.5, 1.0, ""),
    ]
    first, empty, last = overload.timeline(samples, target_ms=300)
    assert first == {
        "second": 0, "in_time": 1, "late": 1, "refused": 1, "failed": 0, "accepted_p50_ms": 500.0,
        "accepted_p95_ms": 860.0,
    }  # fmt: skip
    assert (empty["in_time"], empty["accepted_p50_ms"]) == (0, None)
    assert (last["in_time"], last["late"], last["failed"]) == (1, 0, 2)


def test_table_shows_answers_in_time_and_all_answers():
    labels = dict(overload.rows(LATE | {"goodput_rps": 70.0, "goodput_ratio": 0.9}))
    assert labels["goodput, answers within 1000 ms per second"] == "70.0"
    assert labels["all answers per second"] == "78.0"


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({}, "set GATEWAY_IN_FLIGHT=77 for 1000 ms."),
        ({"accepted_p95_ms": 8000.0}, "TRACE=1"),  # of which the queue's 3.3 s are less than a half
        ({"verdict": judge([Cause(Code.NOT_SENT, requests=1)])}, None),
        ({"lone_p50_ms": 1500.0}, "Set a higher P95"),
        ({"refused": 0}, "TRACE=1"),
        ({"accepted_p95_ms": 900.0}, None),
        ({"accepted_p95_ms": None}, None),
    ],
)
def test_late_answers_get_a_setting_that_mends_them(change, advice):
    given = overload.advice(LATE | {"verdict": judge([])} | change)
    assert advice in given if advice else not given


@pytest.mark.parametrize(
    ("cores", "others", "remedy"),
    [
        (0.14, 1.5, "End"),
        (0.14, 0.1, "Keep a CPU free of Triton (TRITON_CPUS)"),
        (0.14, None, "Keep a CPU free of Triton (TRITON_CPUS)"),
        (0.7, 0.1, "Give it a CPU of its own (LOADTEST_CPUS and TRITON_CPUS)"),
    ],
)
def test_late_load_generator_gets_the_advice_that_its_own_use_allows(cores, others, remedy):
    causes = overload.causes(LATE | {"late_p95_ms": 80.0, "client_cores": cores, "other_cores": others})
    assert judge(causes)["remedy"].startswith(remedy)
