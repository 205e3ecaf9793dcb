"""The slowest requests of a comparison, from the traces of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtest.compare import waterfalls
from loadtest.compare.waterfalls import Run, Step, cause
from monitoring.traces import TraceFiles
from tests.support.measured_windows import comparison, rounds
from triton_transformers.settings import Settings

MS = 10**6


class Traces:
    """Writes the traces of requests as Triton and the backends send them."""

    def __init__(self, folder: Path) -> None:
        self.files = TraceFiles(folder)
        self.count = 0

    def span(self, trace: int, name: str, start: float, end: float, parent: str = "", scope: str = "triton-server",
             events: dict[str, float] | None = None, **attributes: Any) -> str:  # fmt: skip
        self.count += 1
        span = {
            "traceId": f"{trace:032x}",
            "spanId": f"{self.count:016x}",
            "parentSpanId": parent,
            "name": name,
            "startTimeUnixNano": str(round(start * MS)),
            "endTimeUnixNano": str(round(end * MS)),
            "attributes": [{"key": key, "value": {"stringValue": str(value)}} for key, value in attributes.items()],
            "events": [{"name": name, "timeUnixNano": str(round(at * MS))} for name, at in (events or {}).items()],
        }
        self.files.append({"resourceSpans": [{"scopeSpans": [{"scope": {"name": scope}, "spans": [span]}]}]})
        return span["spanId"]

    def model(self, trace: int, name: str, start: float, end: float, parent: str = "", queued: float = 0.0) -> str:
        """Write the spans of a model, which computes after this time in its queue."""
        events = {"QUEUE_START": start}
        span = self.span(trace, name, start, end, parent, events=events, **{"triton.model_name": name})
        self.span(trace, "compute", start + queued, end, span)
        return span

    def request(self, trace: int, start: float, total: float, queued: float = 1.0, wait: float = 0.0, run: float = 5.0,
                longest_ahead: int = 0) -> None:  # fmt: skip
        """Write the trace of a request to the ensemble `embedding`."""
        end = start + total
        ensemble = self.span(trace, "embedding", start, end, "f" * 16, **{"triton.model_name": "embedding"})
        self.model(trace, "tokenizer", start, start + 1, ensemble)
        encoder = self.model(trace, "encoder", start + 1, end, ensemble, queued)
        at = start + 1 + queued
        ahead = {"runs_ahead": int(longest_ahead > 0), "longest_ahead": longest_ahead}
        self.span(trace, "wait", at + 0.5, at + wait, encoder, "encoder", **ahead)
        self.span(trace, "run", at + wait, at + wait + run, encoder, "encoder", rows=3, longest=7)


@pytest.fixture
def measured(tmp_path):
    """Return a comparison whose windows of dynamic batching begin at 20 s and last 10 s."""
    windows = rounds([(100, 101)])
    for window in windows:
        window.began_at = 20.0 if window.mode == "dynamic" else 5.0
    return comparison(Settings.load().replace(TRACE="1", LOCAL_STATE=str(tmp_path)), windows)


@pytest.fixture
def traces(tmp_path) -> Traces:
    return Traces(tmp_path / "traces")


def test_slowest_requests_of_the_dynamic_windows_are_chosen(measured, traces):
    for number in range(1, 16):
        traces.request(number, 20_000 + 50 * number, 20 + number)
    traces.request(90, 10_000, 500)  # in a window without batching
    traces.request(91, 19_999, 500)  # in the warm-up
    traces.request(92, 30_000, 500)  # after the window
    traces.model(93, "other", 21_000, 21_900)
    slowest = measured.results()["slowest"]
    assert slowest["traced"] == 15
    assert [int(request["trace"], 16) for request in slowest["requests"]] == list(range(15, 5, -1))
    assert [request["ms"] for request in slowest["requests"]] == [20 + number for number in range(15, 5, -1)]


def test_waterfall_has_every_step_and_the_cause(measured, traces):
    traces.request(1, 20_000, 60, queued=4, wait=41, run=8, longest_ahead=256)
    (request,) = measured.results()["slowest"]["requests"]
    assert [(s["model"], s["name"], s["start_ms"], s["ms"], s["waiting"]) for s in request["steps"]] == [
        ("tokenizer", "queue", 0, 0, True),
        ("tokenizer", "compute", 0, 1, False),
        ("encoder", "queue", 1, 4, True),
        ("encoder", "transfer", 5, 0.5, True),
        ("encoder", "wait", 5.5, 40.5, True),
        ("encoder", "run", 46, 8, False),
        ("encoder", "rest", 54, 6, True),
    ]
    assert request["cause"] == "waited 40 ms for a run of up to 256 tokens in its own batch"


def test_queue_is_explained_by_the_run_that_took_most_of_it(measured, traces):
    traces.request(1, 20_000, 100, queued=80)
    traces.request(2, 20_010, 50, run=40)
    slowest, _ = measured.results()["slowest"]["requests"]
    assert slowest["cause"] == "waited 80 ms in the queue of encoder, meanwhile encoder ran 3 texts of up to 7 tokens"


RUNS = {Run("encoder", 0, 30 * MS, 1, 99), Run("encoder", 30 * MS, 40 * MS, 8, 5), Run("other", 0, 40 * MS, 8, 300)}


@pytest.mark.parametrize(
    ("model", "name", "attributes", "sentence"),
    [
        ("encoder", "queue", {},
         "waited 40 ms in the queue of encoder, meanwhile encoder ran 1 text of up to 99 tokens"),
        ("tokenizer", "queue", {}, "waited 40 ms in the queue of tokenizer"),
        ("encoder", "wait", {"runs_ahead": "2", "longest_ahead": "64"},
         "waited 40 ms for 2 runs of up to 64 tokens in its own batch"),
        ("encoder", "wait", {"runs_ahead": "0", "longest_ahead": "0"}, "waited 40 ms for its run in encoder"),
        ("encoder", "transfer", {}, "waited 40 ms until the process of encoder took its batch"),
        ("encoder", "rest", {}, "waited 40 ms for the rest of its batch in encoder"),
        ("encoder", "run", {"rows": "9", "longest": "17"},
         "ran for 40 ms in encoder, as one of 9 texts of up to 17 tokens"),
        ("tokenizer", "tokenize", {"texts": "3"}, "took 40 ms to tokenize in tokenizer"),
    ],
)  # fmt: skip
def test_cause_is_the_longest_step_in_words(model, name, attributes, sentence):
    assert cause(Step(model, name, 0, 40 * MS, attributes), RUNS) == sentence


@pytest.mark.parametrize("settings", [{"TRACE": "0"}, {"TRACE_URL": "http://collector:4318/v1/traces"}])
def test_report_has_no_waterfalls_without_our_receiver(measured, settings):
    measured.settings = measured.settings.replace(**settings)
    assert measured.results()["slowest"] is None


def test_unreadable_traces_do_not_cost_the_measurements(measured, traces, capsys):
    traces.request(1, 20_000, 60)
    traces.span(1, "run", 20_000, 20_001, "f" * 16, "encoder", rows="many", longest="7")
    assert measured.results()["slowest"] is None
    assert "could not be read: ValueError" in capsys.readouterr().err


def test_missing_traces_are_reported(measured):
    assert measured.results()["slowest"] == {"traced": 0, "requests": []}
    assert waterfalls.slowest(Path("/nowhere"), "embedding", measured.windows)["traced"] == 0
