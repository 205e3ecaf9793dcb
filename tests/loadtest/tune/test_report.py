"""Test what `make tune` shows: the sentence, the table, the charts and the page, without secrets."""

import fnmatch
import json
import random
import re
from html.parser import HTMLParser

import pytest
from markupsafe import escape
from rich.console import Console

from loadtest.tune import report, table
from loadtest.tune.search import Measured
from monitoring.drawing import charts
from monitoring.drawing.charts import DARK, LIGHT, render, svg_data_urls

DIFF = """\
--- encoder/config.pbtxt
+++ encoder/configs/cpu.pbtxt
@@ -5,7 +5,7 @@
-max_batch_size: 64
+max_batch_size: 16
 dynamic_batching { }
"""


def arm(label: str, ratio: float | None, outcome: str, around: float = 300, reason: str = "") -> dict:
    """Return a candidate whose rounds and probes lie around a value."""
    values = [around * (ratio or 1) * noise for noise in (0.99, 1.02)] if ratio else []
    return {
        "label": label,
        "changes": {"encoder": {"max_batch_size": 16}},
        "base": {},
        "values": values,
        "ratio": ratio,
        "ci95": [ratio * 0.95, ratio * 1.05] if ratio else None,
        "outcome": outcome,
        "reason": reason,
        "probes": probes(around * ratio) if ratio else [],
    }


def probes(goodput: float, target: float = 100) -> list:
    """Return what a bisection tries on a server whose p95 rises steeply towards its capacity."""
    numbers = random.Random(goodput)
    capacity = goodput / 0.8
    rates = [goodput * factor for factor in (0.8, 1, 1.25, 1.12, 1.06, 0.95)]
    return [
        (rate, target * 0.2 / (1 - rate / capacity) * numbers.uniform(0.9, 1.1) if rate < capacity * 0.98 else None)
        for rate in rates
    ]


def better() -> dict:
    """Return what a search for a p95 of 100 ms found: a candidate that is better."""
    arms = [
        arm("encoder: max_batch_size 16", 1.12, "better"),
        arm("encoder: max_batch_size 128", 0.93, "not better"),
        arm("encoder: instances 2 x 1 threads", 1.02, "likely better", 340),
        arm("tokenizer: max_queue_delay_microseconds 2000", 0.99, "not proven", 340),
        arm("encoder: engine onnxruntime", None, "failed", reason="Triton refused to load it: [no such] engine"),
    ]
    settings = {
        "workload": "mixed", "protocol": "http", "users": 256, "workers": 0, "seed": 1, "minutes": 10,
        "loadtest_cpus": "", "triton_cpus": "", "arrivals": "poisson",
    }  # fmt: skip
    return {
        "run": "20261123T060000Z", "system": "embedding", "profile": "cpu", "runtime": "local", "noun": "texts",
        "host": {"cpu": "A CPU", "cores": 2, "memory_gb": 8.0, "gpu": None, "system": "Linux"},
        "triton": {"version": "2.51.0", "image": None, "cores": 2}, "engines": {"encoder": "openvino bf16"},
        "goal": {"p95_ms": 100.0}, "command": "make tune P95=100", "settings": settings, "arms": arms,
        "original": {"label": "as configured", "values": [303.0, 298.0, 309.0], "probes": probes(303)},
        "winner": {"label": arms[0]["label"], "changes": {}, "values": [341.0, 338.0], "probes": probes(340)},
        "confirmation": {
            "original": [304.1, 298.2, 305.0, 301.0], "winner": [339.0, 336.4, 345.9, 340.1], "ratio": 1.126,
            "ci95": [1.05, 1.2],
        },
        "outcome": "better", "notes": ["requests of more than 16 texts will be refused"],
        "configs": {"encoder": {"max_batch_size": 16}}, "diff": DIFF,
        "files": {"encoder/configs/cpu.pbtxt": "max_batch_size: 16\n"}, "seconds": 571.2, "stopped": "",
        "complaints": [], "resumed": False,
    }  # fmt: skip


@pytest.fixture
def result() -> dict:
    return better()


def nothing_better(result: dict) -> dict:
    arms = [arm("encoder: max_batch_size 16", 1.01, "not proven"), arm("encoder: max_batch_size 8", 0.9, "not better")]
    return result | {
        "outcome": "nothing better", "arms": arms, "winner": None, "confirmation": None, "diff": "", "configs": {},
        "notes": [],
    }  # fmt: skip


def not_confirmed(result: dict) -> dict:
    confirmation = result["confirmation"] | {"ratio": 1.02, "ci95": [0.98, 1.06]}
    return result | {"outcome": "not confirmed", "confirmation": confirmation, "diff": "", "configs": {}, "notes": []}


def at_rate(result: dict) -> dict:
    """Return the same search for the least p95 at 200 requests/s."""

    def latency(measured: dict) -> dict:
        values = [value and 20000 / value for value in measured["values"]]
        return measured | {"values": values, "probes": [(200.0, value) for value in values]}

    again = result["confirmation"]
    return result | {
        "goal": {"rate": 200.0},
        "arms": [latency(arm) for arm in result["arms"]],
        "original": latency(result["original"]),
        "winner": result["winner"] and latency(result["winner"]),
        "confirmation": again
        and again | {key: [20000 / value for value in again[key]] for key in ("original", "winner")},
    }


def page(result: dict) -> str:
    return report.html(result, report.all_charts(result))


BETTER = better()
NOTHING = nothing_better(BETTER)
UNCONFIRMED = not_confirmed(BETTER)
NOT_COMPARED = NOTHING | {"outcome": "not compared", "arms": []}
BUSY = NOTHING | {
    "outcome": "too busy", "arms": [], "disagreement": {"label": "as configured", "values": [3.6, 70.4, 104.9]},
}  # fmt: skip
FAILED = arm("encoder: instances 4 x 1 threads", None, "failed", reason="no memory")
ONCE = arm("encoder: max_batch_size 8", 1.3, "not proven") | {"values": [394.0]}
ORIGINAL_ONCE = {"original": BETTER["original"] | {"values": [303.0]}}
NONE_TWICE = "No other candidate was measured twice."


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (
            BETTER,
            "With the changes below, embedding answers 1.13 times as many requests (95 % interval 1.05 to 1.20) with a "
            "p95 of at most 100 ms: 340 instead of 302 requests/s.",
        ),
        (
            at_rate(BETTER),
            "At 200 requests/s, embedding with the changes below answers 95 % of the requests within 58.8 ms instead "
            "of 66.2 ms, 1.13 times as fast (95 % interval 1.05 to 1.20).",
        ),
        (
            NOTHING,
            "Nothing is better than what you have: it answers 303 requests/s with a p95 of at most 100 ms. The best "
            "other candidate, encoder: max_batch_size 16, answers 1.01 times as many requests (95 % interval 0.96 to "
            "1.06).",
        ),
        (
            at_rate(NOTHING),
            "Nothing is better than what you have: it answers 95 % of the requests within 65.9 ms at 200 requests/s. "
            "The best other candidate, encoder: max_batch_size 16, answers 1.01 times as fast (95 % interval 0.96 to "
            "1.06).",
        ),
        (NOTHING | {"arms": []}, f"Nothing … ms. {NONE_TWICE}"),
        (NOTHING | {"arms": [FAILED]}, "Nothing … The only other candidate failed."),
        (NOTHING | {"arms": [FAILED] * 3}, "Nothing … All 3 other candidates failed."),
        # A number that was measured once is not in the verdict.
        (NOTHING | {"arms": [FAILED, ONCE]}, f"Nothing … {NONE_TWICE}"),
        (NOTHING | {"arms": [ONCE, *NOTHING["arms"]]}, "Nothing … max_batch_size 16, answers 1.01 times …"),
        (NOTHING | ORIGINAL_ONCE, "Nothing is better than what you have. The best …"),
        (NOTHING | {"original": {"values": [None], "probes": []}}, "Nothing is better than what you have. The best …"),
        (
            UNCONFIRMED,
            "Not confirmed: encoder: max_batch_size 16 was better in the search, but answers only 1.02 times as many "
            "requests (95 % interval 0.98 to 1.06) when it is measured again beside your configuration. Keep what you "
            "have.",
        ),
        (at_rate(UNCONFIRMED), "Not confirmed: … but answers 1.02 times as fast (95 % …"),
        (
            UNCONFIRMED | {"confirmation": None},
            "Not confirmed: encoder: max_batch_size 16 was better in the search, but was not measured again beside "
            "your configuration.",
        ),
        (
            NOT_COMPARED,
            "No verdict: the time was over before another candidate was measured twice. Your configuration answers 303 "
            "requests/s with a p95 of at most 100 ms. Set a larger MINUTES.",
        ),
        (
            NOT_COMPARED | {"goal": {"rate": 200.0}},
            "No verdict: … Your configuration answers 95 % of the requests within 303 ms at 200 requests/s. Set …",
        ),
        (NOT_COMPARED | ORIGINAL_ONCE, "No verdict: … was measured twice. Set a larger MINUTES."),
        (
            BUSY,
            "This machine was too busy to tell: your configuration reached 3.60 to 105 requests/s in 3 measurements of "
            "the same. Keep what you have, end other programs, and tune again.",
        ),
        (BUSY | {"goal": {"rate": 50.0}}, "This … your configuration had a p95 of 3.60 to 105 ms …"),
    ],
)
def test_sentence_states_the_verdict_and_what_was_measured_twice(result, sentence):
    assert fnmatch.fnmatchcase(table.sentence(result), sentence.replace("…", "*")), table.sentence(result)


def test_no_candidate_is_better_on_a_busy_machine():
    arms = [BETTER["arms"][0] | {"outcome": outcome} for outcome in ("better", "failed")]
    assert [row[-1] for row in table.rows(BUSY | {"arms": arms})][1:] == ["not proven", "failed"]


def test_axis_ends_where_the_points_are(result):
    """The interval of 3.6, 70.4 and 104.9 requests/s ends far beyond the points, at 2,900."""
    original = result["original"] | {
        "values": [3.6, 70.4, 104.9],
        "probes": [(3.6, 90.0), (104.9, 99.0), (150.0, None)],
    }
    figure = charts.Figure(figsize=(9.6, 4.4))
    report.draw_plane(nothing_better(result) | {"arms": [], "original": original}, figure, LIGHT)
    low, high = figure.axes[0].get_xlim()
    assert -10 < low <= 3.6
    assert 150 <= high < 160


def test_numbers_have_three_digits_and_bounds_are_marked():
    assert [table.number(value) for value in (0.2, 8.254, 41.27, 1234.5)] == ["0.20", "8.25", "41.3", "1,234"]
    assert [table.figure(rounds) for rounds in ([40.0, None, 60.0], [None], [])] == ["50.0", "-", "-"]
    bound = arm("encoder: max_batch_size 8", 0.65, "not better") | {"is_bound": True, "values": [260.0]}
    assert table.cells(bound) == ["<260", "<0.65", "0.62-0.68", "not better"]
    assert table.cells(bound | {"is_bound": False})[:2] == ["260", "0.65"]
    measured = Measured(104.94, [])
    line = table.measured_line(83.2, "encoder: max_batch_size 8", measured, True)
    assert line == "  1:23  encoder: max_batch_size 8: 105 requests/s"
    assert table.measured_line(3, "x", measured._replace(is_bound=True), False).endswith("x: p95 <105 ms")


def printed(result: dict) -> list[str]:
    # The options of triton_transformers.cli.out, which every command prints with.
    console = Console(width=80, record=True, highlight=False, soft_wrap=True, emoji=False)
    table.print_result(result, console)
    return [line.rstrip() for line in console.export_text().splitlines()]


@pytest.mark.parametrize("adapt", [dict, at_rate, not_confirmed])
def test_table_fits_80_columns_and_keeps_long_labels(result, adapt):
    lines = printed(adapt(result))
    first = next(number for number, line in enumerate(lines) if line.startswith("candidate"))
    last = next(number for number, line in enumerate(lines) if line.endswith(("confirmed", "not confirmed")))
    assert max(map(len, lines[first - 1 : last + 1])) <= 80
    assert any("max_queue_delay_microseconds" in line for line in lines)


def test_terminal_shows_sentence_failures_notes_and_the_diff_of_a_proven_winner(result):
    text = "\n".join(printed(result))
    for part in (
        table.sentence(result),
        "encoder: engine onnxruntime failed: Triton refused to load it: [no such] engine",
        "Note: requests of more than 16 texts will be refused.",
        DIFF.strip(),
        "\nthe winner, measured again                  340   1.13  1.05-1.20  confirmed\n",
    ):
        assert part in text
    assert "max_batch_size: 16" not in "\n".join(printed(not_confirmed(result) | {"diff": DIFF}))


def test_lines_during_the_search_fit_80_columns(result):
    console = Console(width=80, record=True)
    for larger_is_better in (True, False):
        console.print(table.arms_header(larger_is_better))
    for one in [*result["arms"], arm("[red]", 1.0, "not proven") | {"ci95": None}, arm("x" * 200, 1234.5, "better")]:
        console.print(table.arm_line(one))
    lines = console.export_text().splitlines()
    assert len(lines) == 9  # none wraps
    assert lines[2].split() == ["encoder:", "max_batch_size", "16", "338", "1.12", "1.06-1.18", "better"]
    assert lines[5].startswith("tokenizer: max_qu…_microseconds 2000 ")
    assert lines[7].split() == ["[red]", "302", "1.00", "not", "proven"]


def test_page_has_every_part(result, blank_charts):
    result["complaints"] = ["stopped early: interrupted"]
    html = page(result)
    for row in table.rows(result):
        for cell in row:
            assert escape(cell) in html
    parts = [
        table.sentence(result),
        '<p class="complaint">stopped early: interrupted</p>',
        '<span class="removed">-max_batch_size: 64</span>\n<span class="added">+max_batch_size: 16</span>',
        "Note: requests of more than 16 texts will be refused.",
        "encoder: engine onnxruntime failed: Triton refused to load it: [no such] engine",
        "<code>make tune P95=100</code>",
        "Triton 2.51.0 on 2 cores, profile cpu, runtime local",
        "encoder on openvino bf16",
        "9.5 minutes of 10",
    ]
    for part in parts:
        assert part in html
    assert '<div class="ratio doubtful">1.13<small>' in html
    assert '<div class="ratio faster">1.13<small>' in page(result | {"complaints": []})


def test_page_names_the_goal_and_has_a_large_ratio_only_for_a_proven_winner(result, blank_charts):
    for unproven in (nothing_better(result), not_confirmed(result)):
        html = page(unproven)
        assert 'class="ratio' not in html
        assert "<pre>" not in html
    diff = page(not_confirmed(result) | {"diff": DIFF})
    assert "What the best in the search would change, not proven" in diff
    assert "<title>embedding: the best configuration for a p95 of 100 ms</title>" in diff
    html = page(at_rate(result))
    assert "<title>embedding: the best configuration for 200 requests/s</title>" in html
    assert "the lowest p95 at 200 requests/s" in html


def test_page_is_self_contained_and_escaped(result, monkeypatch):
    one = report.all_charts(result)["latency"]
    drawing = svg_data_urls(one.draw, one.narrow)
    monkeypatch.setattr(charts, "svg_data_urls", lambda *_: drawing)  # drawing all of them takes seconds
    result["arms"][0]["label"] = result["diff"] = result["notes"][0] = "<script>"
    html = page(result)
    sources = re.findall(r'(?:src|srcset|href)="([^"]*)"', html)
    assert len(sources) == 2 * 4  # charts; wide and narrow, light and dark
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert "<script" not in html
    HTMLParser().feed(html)


MANY = [arm(f"encoder: parameter {n} of {'x' * n}", 0.2 + n / 30, "not better") for n in range(40)]


@pytest.mark.parametrize(
    "changes",
    [
        BETTER,
        # Only the original was tried, and the server was always overloaded.
        {"arms": [], "original": {"label": "as configured", "values": [None], "probes": [(5.0, None)]}},
        {"arms": [arm | {"ci95": None, "values": arm["values"][:1], "probes": []} for arm in BETTER["arms"]]},
        BETTER | {"arms": [MANY[0] | {"values": [None, 40.0]}, *MANY[1:]]},
    ],
    ids=["several", "sparse", "without intervals", "forty candidates"],
)  # fmt: skip
def test_charts_draw(changes):
    searched = NOTHING | changes
    for chart in (*report.all_charts(searched).values(), report.all_charts(at_rate(searched))["latency"]):
        assert render(chart.draw, chart.wide, LIGHT, "png").startswith(b"\x89PNG")
        assert b"<svg" in render(chart.draw, chart.narrow, DARK, "svg")


def test_pareto_front_has_no_point_that_another_beats():
    points = [(100.0, 10.0), (200.0, 20.0), (150.0, 30.0), (200.0, 25.0), (50.0, 10.0), (300.0, 90.0)]
    assert report.pareto_front(points) == [(100.0, 10.0), (200.0, 20.0), (300.0, 90.0)]


@pytest.mark.parametrize("ratio", [0.1, 0.9, 1.0, 8.0])
def test_axis_of_ratios_contains_1_and_the_best(ratio):
    wide = {"ratio": ratio, "ci95": [ratio / 50, ratio * 50]}
    low, high = report.ratio_limits([wide, {"ratio": None, "ci95": None}])
    assert 0 < low < 1 < high
    assert low < max(ratio, report.LOWEST_RATIO) < high


def test_report_is_complete_and_the_latest(result, blank_charts, tmp_path):
    folder = report.write(result, tmp_path)
    assert folder == tmp_path / "20261123T060000Z-embedding-tune"
    files = {"tune.json", "tune.html", "winner", "latency.png", "candidates.png"}
    assert {file.name for file in folder.iterdir()} == files
    assert (folder / "winner/encoder/configs/cpu.pbtxt").read_text() == "max_batch_size: 16\n"
    assert json.loads((folder / "tune.json").read_text())["confirmation"]["ci95"] == [1.05, 1.2]
    assert (tmp_path / "latest-tune").readlink().name == folder.name
    newer = report.write(result | {"run": "20261123T070000Z"}, tmp_path)
    assert (tmp_path / "latest-tune").resolve() == newer
    unproven = report.write(not_confirmed(result) | {"run": "20261123T080000Z", "diff": DIFF}, tmp_path)
    assert {file.name for file in unproven.iterdir()} == files - {"winner"}


def test_report_that_fails_leaves_nothing_behind(result, blank_charts, tmp_path, monkeypatch):
    first = report.write(result, tmp_path)
    monkeypatch.setattr(report, "html", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        report.write(result | {"run": "20261123T070000Z"}, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([first.name, "latest-tune"])
    assert (tmp_path / "latest-tune").resolve() == first
