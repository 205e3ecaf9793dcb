"""Test the promises of all reports: of a comparison, of a search for a configuration, and of an overload."""

from __future__ import annotations

import base64
import errno
import json
import os
import re
from collections.abc import Callable
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from markupsafe import Markup, escape
from rich.console import Console

from loadtest.load.arrivals import Sample
from loadtest.overload import overload
from loadtest.reports import report
from loadtest.tune import report as tune_report
from loadtest.tune import table
from tests.support.measured_windows import comparison, generating_rounds, open_loop_rounds, rounds
from tests.support.report_results import (
    REFUSAL,
    arm,
    at_rate,
    better,
    not_confirmed,
    nothing_better,
    overloaded,
)
from triton_transformers.settings import Settings, UserError

HOSTILE = "<script>[b]"
# The texts of results that come from users, their models, programs, or errors.
FROM_OUTSIDE = {
    "advice", "cpu", "diff", "engines", "image", "label", "left_out", "notes", "reason", "system",
    "text",
}  # fmt: skip


class Report(NamedTuple):
    """The results of one report, and the functions of its kind."""

    results: dict[str, Any]
    write: Callable[[dict[str, Any], Path], Path]
    print: Callable[[dict[str, Any], Console], None]
    shown: Callable[[dict[str, Any]], list[str]]  # what both the terminal and the page show
    module: Any
    numbers: str = "results.json"


def compared(windows: list[Any], **settings: str) -> Report:
    measured = comparison(Settings.load().replace(**settings), windows)
    if len({window.mode for window in windows}) == 2:
        measured.left_out["instances"] = "the server has one core"

    def shown(results: dict[str, Any]) -> list[str]:
        cells = [cell for row in report.rows(results) for cell in row]
        return [report.sentence(results), *cells, report.explanation(results), *report.left_out(results)]

    def write(results: dict[str, Any], folder: Path) -> Path:
        return report.write(results, windows, folder, Markup("<p>drawn</p>"))

    return Report(measured.results(), write, report.print_table, shown, report)


def tuned(results: dict[str, Any]) -> Report:
    def shown(results: dict[str, Any]) -> list[str]:
        cells = [cell for row in table.rows(results) for cell in row]
        return [table.sentence(results), *cells, *table.failures(results), *table.notes(results)]

    return Report(results, tune_report.write, table.print_result, shown, tune_report, "tune.json")


def over(samples: list[Sample], **changes: Any) -> Report:
    def shown(results: dict[str, Any]) -> list[str]:
        cells = [cell.strip() for row in overload.rows(results) for cell in row]
        return [overload.sentence(results), *cells, results["advice"]]

    return Report(overloaded(samples, **changes), overload.write, overload.print_result, shown, overload)


NOTHING = nothing_better(better())
ALONE = {"arms": [], "original": {"label": "as configured", "values": [302.0], "probes": [(5.0, None)]}}
ONCE = {"arms": [one | {"ci95": None, "values": one["values"][:1], "probes": []} for one in better()["arms"]]}
MANY = [arm(f"encoder: parameter {n} of {'x' * (n % 30)}", 0.2 + n / 30, "not better") for n in range(40)]
ANSWERS = [Sample(n / 10, 3000.0, "") for n in range(100)] + [Sample(n / 10, 3.0, REFUSAL) for n in range(100)]
REPORTS: dict[str, Callable[[], Report]] = {
    "closed loop": partial(compared, rounds([(1000, 1200, 1500)] * 2)),
    "one round": partial(compared, rounds([(100, 300)])),
    "open loop": partial(compared, open_loop_rounds([(100, 90, 50)] * 3, overloaded=("none",)), RATE="100"),
    "generating": partial(compared, generating_rounds([(20, 100), (22, 99), (18, 101)])),
    "tuned": lambda: tuned(better()),
    "tuned at a rate": lambda: tuned(at_rate(better())),
    "not confirmed": lambda: tuned(not_confirmed(better())),
    "nothing better": lambda: tuned(NOTHING),
    "no candidate": lambda: tuned(NOTHING | ALONE),
    "no candidate at a rate": lambda: tuned(at_rate(NOTHING | ALONE)),
    "without intervals": lambda: tuned(NOTHING | ONCE),
    "forty candidates": lambda: tuned(better() | {"arms": MANY}),
    "overload": partial(over, ANSWERS),
    "overload without an answer": partial(over, [], single_requests=[]),
}


@pytest.fixture(params=REPORTS)
def kind(request) -> Report:
    return REPORTS[request.param]()


def hostile(value: Any, is_outside: bool = False) -> Any:
    """Return the results with hostile texts in all places that others than this project fill."""
    if isinstance(value, dict):
        return {key: hostile(part, is_outside or key in FROM_OUTSIDE) for key, part in value.items()}
    if isinstance(value, list):
        return [hostile(part, is_outside) for part in value]
    return HOSTILE + value if is_outside and isinstance(value, str) and value else value


def printed(kind: Report, results: dict[str, Any], width: int) -> str:
    # The options of triton_transformers.cli.out, which every command prints with.
    console = Console(width=width, record=True, highlight=False, soft_wrap=True, emoji=False)
    kind.print(results, console)
    return console.export_text()


def test_report_draws_every_chart_into_one_page_without_foreign_sources(kind, tmp_path):
    folder = kind.write(kind.results, tmp_path)
    (page,) = folder.glob("*.html")
    html = page.read_text()
    charts = list(folder.glob("*.png"))
    sources = re.findall(r'(?:src|srcset|href)="([^"]*)"', html)
    without_candidates = kind.results.get("arms") == []  # the page then leaves their chart out
    assert len(sources) == 4 * (len(charts) - without_candidates) > 0  # wide and narrow, light and dark
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert not any(b"#01020" in base64.b64decode(source.partition(",")[2]) for source in sources)  # PLACEHOLDERS
    assert all(chart.read_bytes().startswith(b"\x89PNG") for chart in charts)
    assert json.loads((folder / kind.numbers).read_text())["run"] == kind.results["run"]
    assert [link.resolve() for link in tmp_path.iterdir() if link.is_symlink()] == [folder]


def test_page_and_terminal_show_every_number_and_escape_every_text(kind, tmp_path, blank_charts):
    verdict = kind.results.get("verdict", {}) | {"causes": [{"code": "", "text": "doubtful"}] * 2}
    results = hostile(kind.results | {"verdict": verdict})
    html = next(kind.write(results, tmp_path).glob("*.html")).read_text()
    HTMLParser().feed(html)
    assert "<script" not in html
    assert escape(HOSTILE + "doubtful") in html
    text = printed(kind, results, 500)
    for shown in kind.shown(results):
        assert escape(shown) in html
        assert shown in text


def test_table_fits_80_columns(kind):
    lines = printed(kind, kind.results, 80).splitlines()
    assert not [line for line in lines if len(line) > 80 and "  " in line.strip()]  # sentences have no columns
    assert not any("…" in line for line in lines)


def test_full_disk_leaves_the_numbers_and_another_error_nothing(kind, tmp_path, blank_charts, monkeypatch):
    def fail(error: Exception) -> None:
        raise error

    monkeypatch.setattr(kind.module, "page", lambda *_, **__: fail(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        kind.write(kind.results, tmp_path)
    assert not list(tmp_path.iterdir())
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(kind.module, "page", lambda *_, **__: fail(full))
    with pytest.raises(UserError, match=f"cannot be written: No space left on device.*{kind.numbers}"):
        kind.write(kind.results, tmp_path)
    (folder,) = tmp_path.iterdir()  # and no link to it as the latest
    assert json.loads((folder / kind.numbers).read_text())["run"] == kind.results["run"]
