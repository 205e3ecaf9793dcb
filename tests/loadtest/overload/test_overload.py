"""The numbers of `make loadtest OVERLOAD=3`."""

from __future__ import annotations

import itertools

import pytest

from loadtest.load.arrivals import GIVEN_UP, Sample
from loadtest.overload import overload
from tests.support.report_results import LATE, REFUSAL


def test_figures_count_each_request_once():
    samples = [
        Sample(1.0, 500.0, ""),
        Sample(2.0, 100.0, ""),
        Sample(1.5, 4.0, REFUSAL, late_ms=1.0),
        Sample(1.6, 8.0, REFUSAL, late_ms=3.0),
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
        Sample(0.7, 4.0, REFUSAL),
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


def test_headline_counts_only_answers_within_the_target():
    assert overload.sentence(LATE) == (
        "None of the 234 requests of embedding that arrive per second, 3 times the capacity, is answered within 1000 "
        "ms: a goodput of 0.00 times the capacity. 78 per second are answered later, and the gateway refuses 66%."
    )
    some = LATE | {"goodput_rps": 70.0, "goodput_ratio": 0.9}
    assert overload.sentence(some).startswith(
        "70 of the 234 requests of embedding that arrive per second, 3 times the capacity, are answered within 1000 "
        "ms: a goodput of 0.90 times the capacity. 8 per second"
    )
    labels = dict(overload.rows(some))
    assert labels["goodput, answers within 1000 ms per second"] == "70.0"
    assert labels["all answers per second"] == "78.0"


def test_late_answers_get_a_cause_and_a_setting_that_mends_it():
    assert overload.advice(LATE) == (
        "The gateway admits 256 requests at once, and at 78 answers per second that is a queue of 3.3 s. Set "
        "GATEWAY_IN_FLIGHT=62, so that an admitted request waits no longer than 1000 ms and the others are refused at "
        "once."
    )
    assert "Even one request alone takes 1500 ms" in overload.advice(LATE | {"lone_p50_ms": 1500.0})
    assert "queue does not explain that" in overload.advice(LATE | {"refused": 0})
    assert "No request was answered as long as" in overload.advice(LATE | {"answered_rps": 0.0})
    assert overload.advice(LATE | {"accepted_p95_ms": 900.0}) == ""
    assert overload.advice(LATE | {"accepted_p95_ms": None}) == ""


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, ""),
        ({"late_p95_ms": None, "other_cores": None}, ""),
        ({"client_cores": 0.95}, "the load generator used 0.95 of the 1 core that a process can use"),
        ({"given_up": 3}, "3 requests were not sent"),
        ({"late_p95_ms": 80.0}, "the load generator sent one of twenty requests more than 80 ms after its arrival"),
        ({"arrived_rps": 100.0}, "only 100 of 234 requests per second arrived in the window: set a longer WINDOW"),
        ({"other_cores": 1.5}, "other programs used up to 1.5 of this machine's 2 cores"),
    ],
)
def test_doubtful_measurement_is_reported(change, complaint):
    assert [text.partition(",")[0] for text in overload.complaints(LATE | change)] == [complaint] * bool(complaint)


@pytest.mark.parametrize(
    ("cores", "others", "remedy"),
    [
        (0.14, 1.5, "other programs used the CPU that it waited for"),
        (0.14, 0.1, "it used only 0.14 cores, and waited for those that the server used: keep one free of Triton"),
        (0.14, None, "it used only 0.14 cores"),
        (0.7, 0.1, "give it a CPU of its own (LOADTEST_CPUS and TRITON_CPUS)"),
    ],
)
def test_late_load_generator_gets_the_advice_that_its_own_use_allows(cores, others, remedy):
    complaint = overload.complaints(LATE | {"late_p95_ms": 80.0, "client_cores": cores, "other_cores": others})[-1]
    assert remedy in complaint
    assert ("a CPU of its own" in complaint) == (cores > 0.5)
