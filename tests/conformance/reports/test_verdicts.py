"""Test what each report concludes: the numbers of its sentence, what is large, the complaints, and the exit code."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
from markupsafe import Markup
from prometheus_client import generate_latest

from loadtest.compare import compare
from loadtest.measure import verdicts
from loadtest.measure.statistics import heaviest
from loadtest.measure.verdicts import DOUBTFUL, EXIT_CODES, NOT_PROVEN, PROVEN, Cause, Code, judge
from loadtest.measure.windows import Window
from loadtest.overload import overload
from loadtest.reports import report
from loadtest.server.machine import host
from loadtest.tune import table, tuning
from tests.support.measured_windows import comparison, generating_rounds, generating_window, open_loop_rounds, rounds
from tests.support.report_results import arm, at_rate, better, not_confirmed, nothing_better, overloaded
from triton_transformers.pages import prose
from triton_transformers.settings import MODES, Settings, UserError


def numbers_of(sentence: str) -> str:
    return " ".join(re.findall(r"\d+(?:\.\d+)?", sentence))


def large(page: str) -> str:
    """Return the kind of the large number of a page and the number, or nothing."""
    return " ".join(" ".join(found) for found in re.findall(r'<div class="ratio (\w+)">([\d.]+)<', page))


def check_shown(complaints: Iterable[Cause | str], sentence: str, page: str, printed: str) -> None:
    """Fail unless the page and the terminal have the sentence and all complaints."""
    for text in (sentence, *map(str, complaints)):
        assert prose(text) in page
        assert " ".join(text.split()) in " ".join(printed.split())


# --- comparisons ------------------------------------------------------------------------------------------------------

ROUNDS = [(100, 150), (100, 160), (100, 140)]
P95S = [(100, 90, 50), (100, 90, 52), (100, 91, 48)]
OPEN = {"RATE": "100"}
Rates = list[tuple[float, ...]]


VERDICTS = (PROVEN, DOUBTFUL, NOT_PROVEN)
USUAL = "64 1.50 95 1.27 1.77 95 7 10"


class Case(NamedTuple):
    windows: list[Window]
    numbers: str = USUAL  # of what was measured
    word: str = "proven"
    large: str = ""
    codes: tuple[Code, ...] = ()
    settings: Mapping[str, str] = MappingProxyType({})
    stopped: str = ""


def closed(rates: Rates = ROUNDS, **fields: Any) -> list[Window]:
    return changed(rounds(rates), **fields)


def at_a_rate(p95s: Rates = P95S, overloaded: tuple[str, ...] = (), rate: float = 100.0, **fields: Any) -> list[Window]:
    return changed(open_loop_rounds(p95s, rate, overloaded), **fields)


def formats(rates: Rates = ROUNDS, **fields: Any) -> list[Window]:
    names = {"none": "onnx", "dynamic": "int8"}
    windows = closed(rates, **fields)
    for window in windows:
        window.mode = names[window.mode]
    return windows


def generating(*first: float, together: float = 6.0) -> list[Window]:
    """Return the windows of three rounds; `first`: tokens per step, and answers, of the first one."""
    windows = generating_rounds([(20, 100), (22, 99), (18, 101)], together)
    return [generating_window("none", 1, 20, *first), *windows[1:]]


def changed(
    windows: list[Window],
    only: int | None = None,
    failed: int = 0,
    without_batches: bool = False,
    foreign_requests: int = 0,
    **fields: Any,
) -> list[Window]:
    """Give these fields to one window, or to all."""
    for window in windows if only is None else [windows[only]]:
        window.samples[:failed] = [sample._replace(error="500 no") for sample in window.samples[:failed]]
        encoder = window.counters[heaviest([window])]
        encoder.executions = encoder.rows if without_batches else encoder.executions
        encoder.requests += foreign_requests
        for name, value in fields.items():
            setattr(window, name, value)
    return windows  # fmt: skip


TOKENS = "64 5.02 95 3.81 6.60 95 500 500"
WIDE = [(100, 110), (100, 370), (100, 200)], "64 2.01 95 0.45 9.08 95 9 10"
FEW_AT_A_RATE = (Code.FEW_RESPONSES, Code.NO_BATCHES, Code.LOCUST_BOUND)
# At most 256 requests per second.
THINKING = {"WAIT": "0.1,0.4"}
COMPARISONS = {
    "faster": Case(closed(), large="faster 1.50"),
    "slower": Case(
        closed([(150, 100), (160, 100), (140, 100)]), "64 0.67 95 0.57 0.79 95 10 7", large="slower 0.67"
    ),
    "three modes": Case(closed([(100, 120, 150)] * 3), "64 1.25 95 1.25 1.25 2 95 7 8", large="faster 1.25"),
    "interval contains 1": Case(closed(WIDE[0]), WIDE[1], NOT_PROVEN, codes=(Code.CONTAINS_ONE,)),
    "rounds disagree": Case(
        closed([(100, 98), *[(100, 150)] * 9]), "64 1.44 95 1.31 1.58 95 10 10", DOUBTFUL, codes=(Code.ROUNDS_DISAGREE,)
    ),
    "another mode may be the best": Case(
        closed([(30, 120, 150), (110, 120, 151), (150, 121, 150)]), "64 1.25 95 1.23 1.27 2 95 7 8", DOUBTFUL,
        codes=(Code.ROUNDS_DISAGREE,),
    ),
    "two rounds": Case(closed([(100, 300)] * 2), "64 3.00 95 3 10", NOT_PROVEN, codes=(Code.FEW_ROUNDS,)),
    "interrupted": Case(closed(), USUAL, NOT_PROVEN, codes=(Code.STOPPED,), stopped="interrupted"),
    "stopped": Case(closed(), USUAL, NOT_PROVEN, codes=(Code.STOPPED,), stopped="Triton is gone"),
    "idle machine": Case(closed(only=1, other_cores=0.19), large="faster 1.50"),
    "busy machine": Case(closed(only=1, other_cores=1.3), USUAL, DOUBTFUL, codes=(Code.OTHER_PROGRAMS,)),
    "busy machine and an interval that contains 1": Case(
        closed(WIDE[0], other_cores=1.3), WIDE[1], DOUBTFUL, codes=(Code.OTHER_PROGRAMS, Code.CONTAINS_ONE)
    ),
    "two rounds on a busy machine": Case(
        closed([(100, 169)] * 2, other_cores=1.2), "64 1.69 95 6 10", NOT_PROVEN,
        codes=(Code.FEW_ROUNDS, Code.OTHER_PROGRAMS),
    ),
    "failed requests": Case(closed(only=0, failed=3), USUAL, NOT_PROVEN, codes=(Code.FAILED_REQUESTS,)),
    "Locust is the limit": Case(closed(client_cpu=0.97), USUAL, DOUBTFUL, codes=(Code.LOCUST_BOUND,)),
    "users are the limit": Case(
        closed([(220, 230), (222, 228), (221, 229)]), "64 95 4 5", DOUBTFUL, codes=(Code.THINKING_USERS,),
        settings=THINKING,
    ),
    "users are no limit without batching": Case(
        closed([(100, 230), (100, 228), (100, 229)]), "64 2.29 95 2.27 2.31 95 4 10", large="faster 2.29",
        settings=THINKING,
    ),
    "requests of others": Case(
        closed(foreign_requests=1000, counted_s=10.5), USUAL, NOT_PROVEN, codes=(Code.FOREIGN_REQUESTS,)
    ),
    "counters read late": Case(closed(foreign_requests=1000, counted_s=25.0), large="faster 1.50"),
    "no batches": Case(closed(without_batches=True), USUAL, NOT_PROVEN, codes=(Code.NO_BATCHES,)),
    "MIN_RATIO reached": Case(closed(), large="faster 1.50", settings={"MIN_RATIO": "1.2"}),
    "MIN_RATIO below 1 reached": Case(
        closed([(100, 99), (100, 101), (100, 102)]), "64 1.01 95 0.97 1.05 95 10 10", large="faster 1.01",
        settings={"MIN_RATIO": "0.9"},
    ),
    "ratio below": Case(
        closed(), USUAL, NOT_PROVEN, codes=(Code.RATIO_TOO_LOW,), settings={"MIN_RATIO": "1.6"}
    ),
    "interval begins below": Case(
        closed(), USUAL, NOT_PROVEN, codes=(Code.INTERVAL_TOO_LOW,), settings={"MIN_RATIO": "1.45"}
    ),
    "MIN_RATIO reached on a busy machine": Case(
        closed(only=1, other_cores=1.3), USUAL, DOUBTFUL, codes=(Code.OTHER_PROGRAMS,), settings={"MIN_RATIO": "1.2"}
    ),
    "not proven and below": Case(
        closed(WIDE[0]), WIDE[1], NOT_PROVEN, codes=(Code.INTERVAL_TOO_LOW,), settings={"MIN_RATIO": "1.2"}
    ),
    "faster at a rate": Case(at_a_rate(), "100 95 50 90 2 1.81 95 1.61 2.02", large="faster 1.81", settings=OPEN),
    "slower at a rate": Case(
        at_a_rate([(50, 100)] * 3), "100 95 100 50 0.50 95 0.50 0.50", NOT_PROVEN, codes=(Code.RATIO_TOO_LOW,),
        settings=OPEN | {"MIN_RATIO": "1.9"},
    ),
    "interval contains 1 at a rate": Case(
        at_a_rate([(100, 90), (100, 110), (100, 100)]), "100 95 100 100 1.00 95 0.78 1.29", NOT_PROVEN,
        codes=(Code.CONTAINS_ONE,), settings=OPEN,
    ),
    "others do not keep up": Case(at_a_rate(overloaded=("none", "instances")), "100 2 95 50", settings=OPEN),
    "batching does not keep up": Case(at_a_rate(overloaded=("dynamic",)), "100 2 95 90", settings=OPEN),
    "batching misses its gate": Case(
        at_a_rate(overloaded=("dynamic",)), "100 2 95 90", NOT_PROVEN, codes=(Code.SUBJECT_OVERLOADED,),
        settings=OPEN | {"MIN_RATIO": "1.2"},
    ),
    "nothing keeps up": Case(
        at_a_rate(overloaded=MODES), "100 2", NOT_PROVEN, codes=(Code.NEVER_KEEPS_UP,), settings=OPEN
    ),
    "few requests at a rate": Case(
        at_a_rate([(100, 50)] * 3, rate=1, without_batches=True, client_cpu=1.0), "100 95 50 100 2.00 95 2.00 2.00",
        NOT_PROVEN, codes=FEW_AT_A_RATE, settings=OPEN,
    ),
    "tokens": Case(generating(1.0), TOKENS, large="faster 5.02"),
    "steps that only read a prompt": Case(generating(0.8), TOKENS, large="faster 5.02"),
    "together in the mode of one": Case(generating(1.5), TOKENS, NOT_PROVEN, codes=(Code.RAN_TOGETHER,)),
    "few texts": Case(generating(1.0, 2), TOKENS, NOT_PROVEN, codes=(Code.FEW_RESPONSES,)),
    "never together": Case(generating(1.0, together=1.0), TOKENS, NOT_PROVEN, codes=(Code.RAN_ONE_AT_A_TIME,)),
}  # fmt: skip


@pytest.fixture
def run(monkeypatch, tmp_path, blank_charts) -> Callable[..., tuple[compare.Comparison, int]]:
    """Return a function that runs `make loadtest` as if it had measured these windows."""

    def run_with(windows: list[Window], stopped: str = "", **settings: str) -> tuple[compare.Comparison, int]:
        measured = comparison(Settings.load().replace(USERS="64", REPORTS=str(tmp_path), **settings), windows)
        measured.stopped = stopped
        monkeypatch.setattr(compare, "Comparison", lambda _: measured)
        return measured, compare.main()

    # measure() does the same at its end, when Prometheus scrapes for the last time.
    monkeypatch.setattr(compare.Comparison, "measure", lambda measured: measured.metrics.verdict(measured.verdict()))
    monkeypatch.setattr(compare, "host", lambda: host() | {"cores": 2})
    monkeypatch.setattr(report, "drawn_dashboard", lambda *_: Markup("<p>drawn</p>"))
    return run_with


@pytest.mark.parametrize("case", COMPARISONS.values(), ids=list(COMPARISONS))
def test_comparison_concludes(case, run, tmp_path, capsys):
    measured, status = run(case.windows, case.stopped, **case.settings)
    results, page = measured.results(), (tmp_path / "latest/report.html").read_text()
    verdict, sentence = results["verdict"], report.sentence(results)
    codes = tuple(Code[cause["code"]] for cause in verdict["causes"])
    concluded = (numbers_of(report.measured(results)), verdict["word"], large(page), codes)
    assert concluded == (case.numbers, case.word, case.large, case.codes)
    assert status == (130 if case.stopped == "interrupted" else EXIT_CODES[case.word])
    printed = capsys.readouterr()
    check_shown(verdicts.also(verdict), sentence, page, printed.out + printed.err)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (
            "users are the limit",
            "Doubtful: 64 users who think between their requests can send 256 per second at most, and they sent 86 % "
            "of that or more in both modes of the ratio: the users were the limit, not the server. With 64 users, "
            "dynamic batching answered 95 % of their requests of embedding within 4 ms, and the same server with "
            "dynamic batching off within 5 ms. Clear WAIT to see what the server can answer.",
        ),
        (
            "busy machine",
            "Doubtful: in 1 of 6 windows other programs used up to 1.3 cores of this machine's 2, so the numbers "
            "show them too. With 64 users, dynamic batching answered 1.50 times as many requests of embedding (95 % "
            "interval 1.27 to 1.77) as the same server with dynamic batching off. p95: 7 ms instead of 10 ms. End the "
            "other programs and measure again.",
        ),
    ],
)
def test_sentence_has_the_cause_then_the_number_and_one_remedy(case, expected, run):
    measured, _ = run(COMPARISONS[case].windows, **COMPARISONS[case].settings)
    assert report.sentence(measured.results()) == expected


BUSY = {"other_cores": 1.3}
LATE_AT_A_RATE = [(100, 90, 95), (100, 90, 85), (100, 90, 90)]
# Three runs of each command, which are proven, doubtful and not proven.
WORDS: dict[str, tuple[dict[str, str], list[Window], list[Window], list[Window]]] = {
    "modes": ({}, closed(), closed(only=1, **BUSY), closed(WIDE[0])),
    "three modes": (
        {}, closed([(100, 120, 150)] * 3), closed([(100, 120, 150)] * 3, **BUSY), closed([(100, 150, 150)] * 3),
    ),
    "users who think": (
        THINKING, closed([(100, 230)] * 3), closed([(221, 229)] * 3), closed([(100, 230)] * 2),
    ),
    "workers": ({"WORKERS": "2"}, closed(), closed(client_cpu=0.97), closed(only=0, failed=3)),
    "MIN_RATIO": ({"MIN_RATIO": "1.2"}, closed(), closed(**BUSY), closed(WIDE[0])),
    "formats": ({"FORMATS": "onnx int8"}, formats(), formats(**BUSY), formats(WIDE[0])),
    "a rate": (OPEN, at_a_rate(), at_a_rate(**BUSY), at_a_rate(LATE_AT_A_RATE)),
    "texts": ({}, generating(1.0), changed(generating(1.0), client_cpu=0.97), generating(1.5)),
}  # fmt: skip


@pytest.mark.parametrize("number", range(3), ids=VERDICTS)
@pytest.mark.parametrize("command", WORDS)
def test_every_output_of_a_comparison_shows_the_same_word(command, number, run, tmp_path, capsys):
    settings, *windows = WORDS[command]
    measured, status = run(windows[number], **settings)
    exported = generate_latest(measured.metrics.registry).decode()
    words = re.findall(r'^loadtest_verdict{.*word="(.*)"} 1.0$', exported, re.MULTILINE)
    page = tmp_path / "latest/report.html"
    words += shown_words(capsys.readouterr().out, page, status)
    assert words == [VERDICTS[number]] * 5
    is_large = [bool(large(page.read_text())), "\nloadtest_proven_ratio{" in exported]
    assert is_large == [number == 0] * 2


def shown_words(printed: str, page: Path, status: int) -> list[str]:
    """Return the words that the terminal, the page, the results beside it and the exit code show."""
    words = re.findall(r"^(Proven|Doubtful|Not proven): ", printed, re.MULTILINE)
    words += re.findall(r"<h1>(Proven|Doubtful|Not proven): ", page.read_text())
    (results,) = page.resolve().parent.glob("*.json")
    codes = {code: word for word, code in EXIT_CODES.items()}
    return [*map(str.lower, words), json.loads(results.read_text())["verdict"]["word"], codes[status]]


def test_full_disk_leaves_the_printed_table(run, monkeypatch, capsys):
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(report, "html", fail)
    with pytest.raises(UserError, match="No space left on device"):
        run(rounds(ROUNDS))
    assert "dynamic batching answered 1.50 times as many requests" in capsys.readouterr().out


# --- overloads --------------------------------------------------------------------------------------------------------

NONE_IN_TIME = "234 3 1000 0.00 78 66"
IN_TIME = {"goodput_rps": 70.0, "goodput_ratio": 0.9}
QUEUE = "which at 78 answers per second are a queue of 3.3 s, so that 95 % of the answers come within 3300 ms"


@pytest.fixture
def run_overload(monkeypatch, tmp_path, blank_charts) -> Callable[[dict], int]:
    """Return a function that runs `make loadtest OVERLOAD=3` as if it had these results."""

    def run_with(results: dict) -> int:
        monkeypatch.setattr(overload, "Overload", lambda _: SimpleNamespace(run=lambda: results))
        return overload.main()

    monkeypatch.setenv("REPORTS", str(tmp_path))
    return run_with


@pytest.mark.parametrize(
    ("change", "numbers", "shown", "codes"),
    [
        ({}, NONE_IN_TIME, "slower 0.00", []),
        (IN_TIME, "70 234 3 1000 0.90 8 66", "faster 0.90", []),
        ({"late_p95_ms": None, "other_cores": None}, NONE_IN_TIME, "slower 0.00", []),
        ({"client_cores": 0.95}, NONE_IN_TIME, "", [Code.LOCUST_BOUND]),
        ({"given_up": 3}, NONE_IN_TIME, "", [Code.NOT_SENT]),
        ({"late_p95_ms": 80.0}, NONE_IN_TIME, "", [Code.SENT_LATE]),
        ({"arrived_rps": 100.0}, "100 3 1000 0.00 78 66", "", [Code.FEW_ARRIVALS]),
        ({"other_cores": 1.5}, NONE_IN_TIME, "", [Code.OTHER_PROGRAMS]),
        ({"other_cores": 1.5, "late_p95_ms": 80.0}, NONE_IN_TIME, "", [Code.OTHER_PROGRAMS, Code.SENT_LATE]),
        ({"answered_rps": 0.0}, "234 3 1000 0.00 0 66", "", [Code.NO_ANSWER]),
    ],
)
def test_overload_concludes(change, numbers, shown, codes, run_overload, tmp_path, capsys):
    results = overloaded([], **change)
    verdict, status = results["verdict"], run_overload(results)
    sentence, page = overload.sentence(results), (tmp_path / "latest-overload/report.html").read_text()
    found = [Code[cause["code"]] for cause in verdict["causes"]]
    assert (numbers_of(overload.measured(results)), large(page), found) == (numbers, shown, codes)
    word = codes[0].word if codes else PROVEN
    assert (verdict["word"], status) == (word, EXIT_CODES[word])
    printed = capsys.readouterr().out
    check_shown(verdicts.also(verdict), sentence, page, printed)
    # A doubtful number proves no cause, so only the remedy of its doubt stands there.
    assert ("GATEWAY_IN_FLIGHT=77 for 1000 ms" in " ".join(printed.split())) == (not codes)
    assert (QUEUE in page) == (not codes)


# --- searches ---------------------------------------------------------------------------------------------------------

BETTER = better()
NOTHING = nothing_better(BETTER)
UNCONFIRMED = not_confirmed(BETTER)
NOT_COMPARED = NOTHING | {
    "outcome": "not compared", "arms": [], "verdict": judge([Cause(Code.TIME_OVER, minutes=7)]),
}  # fmt: skip
BUSY = NOTHING | {
    "outcome": "too busy", "arms": [], "disagreement": {"label": "as configured", "values": [3.6, 70.4, 104.9]},
    "verdict": judge([Cause(Code.REPEATS_DISAGREE)]),
}  # fmt: skip
FAILED = arm("encoder: instances 4 x 1 threads", None, "failed", reason="no memory")
ONCE = arm("encoder: max_batch_size 8", 1.3, "not proven") | {"values": [394.0]}
GONE = {"stopped": "Triton is gone", "verdict": judge([Cause(Code.STOPPED, reason="Triton is gone")])}
ORIGINAL_ONCE = {"original": BETTER["original"] | {"values": [303.0]}}


@pytest.fixture
def run_search(monkeypatch, tmp_path, blank_charts) -> Callable[[dict], int]:
    """Return a function that runs `make tune` as if it had this result."""

    def run_with(result: dict) -> int:
        settings = Settings.load().replace(REPORTS=str(tmp_path))
        search = SimpleNamespace(run=lambda: None, result=lambda: result, settings=settings, stopped=result["stopped"])
        monkeypatch.setattr(tuning, "Tuning", lambda _: search)
        return tuning.main()

    return run_with


# The outcome of a search -> the numbers of what was measured. A single measurement has none.
@pytest.mark.parametrize(
    ("result", "numbers", "shown"),
    [
        (BETTER, "1.13 95 1.05 1.20 95 100 340 302", "faster 1.13"),
        (BETTER | GONE, "1.13 95 1.05 1.20 95 100 340 302", ""),
        (at_rate(BETTER), "200 95 58.8 66.2 1.13 95 1.05 1.20", "faster 1.13"),
        (NOTHING, "303 95 100 16 1.01 95 0.96 1.06", ""),
        (at_rate(NOTHING), "200 95 65.9 16 1.01 95 0.96 1.06", ""),
        (NOTHING | {"arms": [], "stopped": "interrupted"}, "303 95 100", ""),
        (NOTHING | {"arms": [FAILED]}, "303 95 100", ""),
        (NOTHING | {"arms": [FAILED] * 3}, "303 95 100 3", ""),
        (NOTHING | {"arms": [FAILED, ONCE]}, "303 95 100", ""),
        (NOTHING | {"arms": [ONCE, *NOTHING["arms"]]}, "303 95 100 16 1.01 95 0.96 1.06", ""),
        (NOTHING | ORIGINAL_ONCE, "16 1.01 95 0.96 1.06", ""),
        (UNCONFIRMED, "16 1.02 95 0.98 1.06", ""),
        (at_rate(UNCONFIRMED), "16 1.02 95 0.98 1.06", ""),
        (UNCONFIRMED | {"confirmation": None}, "16", ""),
        (NOT_COMPARED, "303 95 100", ""),
        (NOT_COMPARED | {"goal": {"rate": 200.0}}, "200 95 303", ""),
        (NOT_COMPARED | ORIGINAL_ONCE, "", ""),
        (BUSY, "3.60 105 3", ""),
        (BUSY | {"goal": {"rate": 50.0}}, "95 3.60 105 3", ""),
    ],
)
def test_search_concludes(result, numbers, shown, run_search, tmp_path, capsys):
    word = result["verdict"]["word"]
    assert run_search(result) == (130 if result["stopped"] == "interrupted" else EXIT_CODES[word])
    page = (tmp_path / "latest-tune/tune.html").read_text()
    sentence = table.sentence(result)
    assert (numbers_of(table.measured(result)), large(page)) == (numbers, shown)
    assert sentence.startswith(f"{word.capitalize()}: ")
    check_shown([], sentence, page, capsys.readouterr().out)
    assert not result["confirmation"] or table.rows(result)[-1][-1] == word


@pytest.mark.parametrize(("result", "ratio"), [(BETTER, "1.13"), (at_rate(BETTER), "1.13"), (UNCONFIRMED, "1.02")])
def test_ratio_of_a_search_is_that_of_its_row(result, ratio):
    """The row has both numbers that the ratio compares, and the sentence has the same ratio."""
    *_, (_, own, beside, shown, *_) = table.rows(result)
    assert shown == ratio and f"{ratio} times" in table.sentence(result)
    quotient = float(own) / float(beside)
    assert quotient ** (-1 if "rate" in result["goal"] else 1) == pytest.approx(float(ratio), abs=0.01)


def test_each_outcome_of_a_search_has_a_cause_and_one_remedy():
    assert table.sentence(NOT_COMPARED) == (
        "Not proven: the time was over before another configuration was measured twice. Your configuration answers 303 "
        "requests/s with a p95 of at most 100 ms. Set RESUME=1 MINUTES=7, which goes on from these measurements."
    )
    assert table.sentence(BUSY) == (
        "Doubtful: measurements of one configuration disagree. Your configuration reached 3.60 to 105 requests/s in 3 "
        "measurements of the same. End the other programs and measure again."
    )
    assert table.sentence(UNCONFIRMED).endswith("Keep what you have.")
    assert table.sentence(NOTHING).startswith("Not proven: no other configuration won. Your configuration answers 303")


@pytest.mark.parametrize(
    ("runner", "link", "word", "results"),
    [
        ("run_overload", "latest-overload/report.html", PROVEN, lambda: overloaded([])),
        ("run_overload", "latest-overload/report.html", DOUBTFUL, lambda: overloaded([], other_cores=1.5)),
        ("run_overload", "latest-overload/report.html", NOT_PROVEN, lambda: overloaded([], answered_rps=0.0)),
        ("run_overload", "latest-overload/report.html", NOT_PROVEN, lambda: overloaded([], failed=3)),
        ("run_search", "latest-tune/tune.html", PROVEN, lambda: BETTER),
        ("run_search", "latest-tune/tune.html", DOUBTFUL, lambda: BUSY),
        ("run_search", "latest-tune/tune.html", NOT_PROVEN, lambda: NOTHING),
    ],
)
def test_every_output_of_other_commands_shows_the_same_word(runner, link, word, results, request, tmp_path, capsys):
    status = request.getfixturevalue(runner)(results())
    assert shown_words(capsys.readouterr().out, tmp_path / link, status) == [word] * 4
    assert bool(large((tmp_path / link).read_text())) == (word == PROVEN)
