"""Test what `make tune` shows: the sentence, the table, the charts and the page, without secrets."""

import pytest
from rich.console import Console

from loadtest.tune import report, table
from loadtest.tune.search import Measured
from tests.support.report_results import DIFF, arm, at_rate, better, not_confirmed, nothing_better


@pytest.fixture
def result() -> dict:
    return better()


def page(result: dict) -> str:
    return report.html(result, report.all_charts(result))


def test_no_candidate_is_better_on_a_busy_machine(result):
    arms = [result["arms"][0] | {"outcome": outcome} for outcome in ("better", "failed")]
    busy = nothing_better(result) | {"outcome": "too busy", "arms": arms}
    assert [row[-1] for row in table.rows(busy)][1:] == ["not proven", "failed"]


def test_numbers_have_three_digits_and_bounds_are_marked():
    assert [table.number(value) for value in (0.2, 8.254, 41.27, 1234.5)] == ["0.20", "8.25", "41.3", "1,234"]
    assert [table.figure(rounds) for rounds in ([40.0, 90.0], [])] == ["60.0", "-"]
    bound = arm("encoder: max_batch_size 8", 0.65, "not better") | {"is_bound": True, "values": [260.0]}
    assert table.cells(bound) == ["<260", "301", "<0.65", "0.62-0.68", "not better"]
    assert table.cells(bound | {"is_bound": False})[:3] == ["260", "301", "0.65"]
    measured = Measured(104.94, [])
    line = table.measured_line(83.2, "encoder: max_batch_size 8", measured, True)
    assert line == "  1:23  encoder: max_batch_size 8: 105 requests/s"
    assert table.measured_line(3, "x", measured._replace(is_bound=True), False).endswith("x: p95 <105 ms")


def test_terminal_shows_the_diff_of_a_proven_winner_alone(result):
    for shown, has_diff in ((result, True), (not_confirmed(result) | {"diff": DIFF}, False)):
        console = Console(width=80, record=True)
        table.print_result(shown, console)
        assert ("max_batch_size: 16" in console.export_text()) == has_diff


def test_lines_during_the_search_fit_80_columns(result):
    console = Console(width=80, record=True)
    for larger_is_better in (True, False):
        console.print(table.arms_header(larger_is_better))
    for one in [*result["arms"], arm("[red]", 1.0, "not proven") | {"ci95": None}, arm("x" * 200, 1234.5, "better")]:
        console.print(table.arm_line(one))
    lines = console.export_text().splitlines()
    assert len(lines) == 9  # none wraps
    assert lines[2].split() == ["encoder:", "max_batch_size", "16", "338", "301", "1.12", "1.06-1.18", "better"]
    assert lines[5].startswith("tokenizer: ma…oseconds 2000 ")
    assert lines[7].split() == ["[red]", "301", "301", "1.00", "not", "proven"]


def test_page_shows_the_difference_and_what_was_measured(result, blank_charts):
    html = page(result)
    for part in (
        '<span class="removed">-max_batch_size: 64</span>\n<span class="added">+max_batch_size: 16</span>',
        "<code>make tune P95=100</code>",
        "Triton 2.51.0 on 2 cores, profile cpu, runtime local",
        "encoder on openvino bf16",
        "9.5 minutes of 10",
        "<dt>measurements</dt><dd>12; not counted: 1</dd>",
        "<td>12. as configured</td><td>303</td>",
    ):
        assert part in html
    assert "<pre>" not in page(nothing_better(result))
    unproven = page(not_confirmed(result) | {"diff": DIFF})
    assert "What the best in the search would change, not proven" in unproven
    assert "<title>embedding: the best configuration with a p95 of at most 100 ms</title>" in unproven
    assert "<title>embedding: the best configuration at 200 requests/s</title>" in page(at_rate(result))


def test_pareto_front_has_no_point_that_another_beats():
    points = [(100.0, 10.0), (200.0, 20.0), (150.0, 30.0), (200.0, 25.0), (50.0, 10.0), (300.0, 90.0)]
    assert report.pareto_front(points) == [(100.0, 10.0), (200.0, 20.0), (300.0, 90.0)]


@pytest.mark.parametrize("ratio", [0.1, 0.9, 1.0, 8.0])
def test_axis_of_ratios_contains_1_and_the_best(ratio):
    wide = {"ratio": ratio, "ci95": [ratio / 50, ratio * 50]}
    low, high = report.ratio_limits([wide, {"ratio": None, "ci95": None}])
    assert 0 < low < 1 < high
    assert low < max(ratio, report.LOWEST_RATIO) < high


def test_files_of_a_proven_winner_are_in_the_report(result, blank_charts, tmp_path):
    folder = report.write(result, tmp_path)
    assert folder == tmp_path / "20261123T060000Z-embedding-tune"
    assert (folder / "winner/encoder/configs/cpu.pbtxt").read_text() == "max_batch_size: 16\n"
    unproven = report.write(not_confirmed(result) | {"run": "20261123T080000Z", "diff": DIFF}, tmp_path)
    assert not (unproven / "winner").exists()
    assert (tmp_path / "latest-tune").resolve() == unproven
