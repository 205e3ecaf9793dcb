"""The numbers of `make loadtest OVERLOAD=3`."""

from __future__ import annotations

import itertools

import pytest

from loadtest import overload
from loadtest.arrivals import GIVEN_UP
from loadtest.sample import Sample

REFUSAL = '429 {"error": {}}'


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
    assert (figures["arrived"], figures["accepted"], figures["refused"], figures["failed"], figures["given_up"]) == (
        7,
        3,
        2,
        1,
        1,
    )
    assert figures["goodput_rps"] == 3 / 4
    assert figures["goodput_within_target_rps"] == 2 / 4
    assert figures["refused_share"] == pytest.approx(2 / 7)
    assert (figures["arrived_rps"], figures["sent_rps"]) == (7 / 4, 6 / 4)
    assert (figures["refused_p50_ms"], figures["refused_since_sent_p50_ms"]) == (6, 4)
    assert figures["late_p95_ms"] == 2.5
    assert figures["accepted_p50_ms"] == 500


def test_figures_of_a_window_without_refusals_are_empty():
    figures = overload.figures([Sample(1.0, 5.0, "")], 2.0, target_ms=10)
    assert (figures["refused_share"], figures["refused_p95_ms"]) == (0.0, None)


@pytest.mark.parametrize(
    ("latencies", "seconds"),
    [([5] * 5, 1), ([None, 50, 5, 5, 5, 5, 5], 3), ([5, 5, 5, 50, 5, 5, 5, 5, 5], 5), ([50] * 99, None)],
)
def test_recovery_ends_with_the_first_of_several_fast_requests(monkeypatch, latencies, seconds):
    monkeypatch.setattr(overload.gevent, "sleep", lambda _: None)
    answers, clock = iter(latencies), itertools.count()
    # The clock is read once at the start, and once before each request.
    assert overload.recovery(lambda: next(answers), 10, lambda: next(clock)) == seconds


GOOD = {"client_cores": 0.5, "given_up": 0, "late_p95_ms": 3.0, "arrived_rps": 290.0, "scheduled_rps": 300.0}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"client_cores": 0.95}, "the load generator used 0.95 of the 1 core that a process can use"),
        ({"given_up": 3}, "3 requests were not sent"),
        ({"late_p95_ms": 80.0}, "the load generator sent one of twenty requests more than 80 ms after its arrival"),
        ({"arrived_rps": 200.0}, "only 200 of 300 requests per second arrived in the window: set a longer WINDOW"),
    ],
)
def test_weak_load_generator_is_reported(change, complaint):
    assert [text.partition(",")[0] for text in overload.complaints(GOOD | change)] == [complaint]


def test_good_load_generator_is_not_reported():
    assert not overload.complaints(GOOD)
    assert not overload.complaints(GOOD | {"late_p95_ms": None})
