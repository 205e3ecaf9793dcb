"""The files of a report: their content, and the secrets that they never contain."""

import errno
import json
import os
import re

import pytest
from markupsafe import Markup, escape
from rich.console import Console

from loadtest.compare import compare
from loadtest.compare.compare import Comparison
from loadtest.measure import statistics
from loadtest.reports import report
from loadtest.server.machine import host
from monitoring.drawing.charts import DARK, LIGHT, PLACEHOLDERS, coloured, render
from monitoring.drawing.evaluate import BATCHING, load
from tests.support.measured_windows import comparison, open_loop_rounds, rounds
from triton_transformers import settings as settings_module
from triton_transformers.settings import MODES, TABLE, Settings, UserError

ROUNDS = [(100, 150), (100, 160), (100, 140)]
DASHBOARD = Markup("<p>drawn</p>")


@pytest.fixture
def dotenv(tmp_path, monkeypatch):
    """Return the path of an .env that does not exist yet."""
    monkeypatch.setattr(settings_module, "DOTENV", tmp_path / ".env")
    return tmp_path / ".env"


@pytest.fixture
def drawn(dotenv) -> Comparison:
    return comparison(Settings.load().replace(USERS="64"), rounds(ROUNDS))


@pytest.fixture
def measured(drawn, blank_charts) -> Comparison:
    return drawn


def page(comparison: Comparison, results: dict | None = None) -> str:
    results = results or comparison.results()
    return report.html(results, report.all_charts(results, comparison.windows), DASHBOARD)


def test_page_and_terminal_have_every_number_and_what_was_sent(measured, capsys):
    results = measured.results()
    assert (results["complaints"], results["passed"]) == ([], True)
    sentence = report.sentence(results)
    assert sentence.startswith("With 64 users, dynamic batching answers 1.50 times as many requests of embedding")
    assert "as the same server with dynamic batching off. p95: " in sentence
    results["complaints"] = ["the ratio is below"]
    html = page(measured, results)
    report.print_table(results, Console(width=500))
    printed = capsys.readouterr().out
    explained = "Every mode runs on this server with the same models, users and texts. No batching: the"
    for text in (sentence, explained, *(cell for row in report.rows(results) for cell in row)):
        assert escape(text) in html and text in printed
    sent = "256 from <code>triton_transformers/corpus/mixed.txt</code>"
    assert all(text in html for text in ("the ratio is below", sent, "texts per batch (encoder)"))
    images = page(comparison(measured.settings, measured.windows, noun="images"))
    assert "<dt>images</dt><dd>0 generated ones" in images and "images per batch (encoder)" in images
    assert "texts" not in images


def test_page_draws_the_slowest_requests_on_one_scale(measured):
    steps = [
        {"model": "encoder", "name": name, "waiting": name == "queue", "start_ms": start, "ms": ms, "links": []}
        for name, start, ms in (("queue", 0.1, 41.0), ("pack", 41.1, 0.1), ("run", 41.2, 8.0))
    ]
    requests = [{"trace": "a", "ms": ms, "cause": f"waited {ms} ms", "steps": steps} for ms in (82.0, 49.2)]
    html = page(measured, measured.results() | {"slowest": {"traced": 1234, "requests": requests}})
    assert "Of 1,234 traced requests" in html
    assert html.count('<i class="waiting" style="margin-left: 0.12%; width: 50.00%">') == 2
    assert html.count("encoder: run") == 2
    assert "encoder: pack" not in html  # too short to see
    assert "<strong>49 ms</strong> waited 49.2 ms" in html
    assert "The slowest requests" not in page(measured)
    html = page(measured, measured.results() | {"slowest": {"traced": 0, "requests": []}})
    assert "No traces of these windows arrived" in html


def test_formats_are_compared_with_the_first_in_speed_and_answers(drawn, blank_charts, capsys):
    formats = ["onnx", "int8", "python"]
    drawn.settings |= {"FORMATS": " ".join(formats)}
    drawn.quality = {
        "int8": {"cosine_min": 0.97512, "cosine_mean": 0.99}, "python": {"cosine_min": 1.0, "cosine_mean": 1.0}
    }  # fmt: skip
    names = dict(zip(MODES, formats, strict=True))
    drawn.windows = rounds([(100, 171, 50), (100, 173, 51)])
    for window in drawn.windows:
        window.mode = names[window.mode]
        if window.mode == "python":  # a format may have other models
            window.counters = {"whole": window.counters["encoder"]}
    results = drawn.results()
    assert (results["complaints"], results["verdict"]["baseline"]) == ([], "onnx")
    assert [f"{r['throughput_ratio']:.2f}" for r in results["verdict"]["ratios"].values()] == ["1.72", "0.50"]
    assert report.sentence(results).startswith("With 64 users, FORMAT=int8 answers 1.72 times as many requests")
    report.print_table(results, Console(width=500))
    printed = " ".join(capsys.readouterr().out.split())
    assert "this format / onnx 1.72 0.50" in printed
    assert "smallest cosine of an answer 0.9751 1.0000" in printed
    html = page(drawn, results)
    assert "onnx, int8, python" in html
    assert all(f"var(--{mode})" in html for mode in MODES)


@pytest.mark.parametrize(
    ("pairs", "stopped", "shown"),
    [
        (ROUNDS, "", '<div class="ratio faster">1.50<small>'),
        (ROUNDS, "interrupted", '<div class="ratio doubtful">1.50<small>'),
        ([(150, 100), (160, 100), (140, 100)], "", '<div class="ratio slower">0.67<small>'),
        ([(100, 110), (100, 370)], "", "Not proven: with 64 users, dynamic batching answered"),
        ([(100, 300)], "", "Not proven: with 64 users, dynamic batching answered"),
    ],
)
def test_only_a_proven_ratio_is_large(measured, pairs, stopped, shown):
    measured.windows, measured.stopped = rounds(pairs), stopped
    html = page(measured)
    assert shown in html and "no difference" not in html
    assert ('class="ratio' in html) == ("ratio" in shown)


def without_ids(svg: bytes) -> bytes:
    """Return the chart without the names that matplotlib gives to markers and areas by a hash of their style."""
    return re.sub(rb"\b[mp][0-9a-f]{10}\b", b"", svg)


def test_chart_drawn_in_placeholders_has_the_colours_of_each_palette(drawn):
    chart = report.all_charts(drawn.results(), drawn.windows)["time"]
    assert render(chart.draw, chart.wide, LIGHT, "png").startswith(b"\x89PNG")
    drawing = render(chart.draw, chart.narrow, PLACEHOLDERS, "svg")
    for palette in (LIGHT, DARK):
        drawn_apart = render(chart.draw, chart.narrow, palette, "svg")
        assert without_ids(coloured(drawing, palette)) == without_ids(drawn_apart)


def test_dashboard_in_report_repeats_no_number():
    """Prometheus computes the ratio differently, so a report that showed both would contradict itself."""
    panels = report.charts_only(load(BATCHING))["panels"]
    assert panels
    assert {panel["type"] for panel in panels} == {"timeseries"}
    assert "Requests/s" not in [panel["title"] for panel in panels]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)


def test_sentence_and_table_name_the_best_other_mode(measured):
    measured.windows = rounds([(100, 120, 150), (100, 120, 150), (100, 121, 150)])
    results = measured.results()
    assert "answers 1.25 times as many requests" in report.sentence(results)
    assert report.sentence(results).endswith(
        "with dynamic batching off and one instance for each of its 2 cores, the best of the other modes. p95: 7 ms "
        "instead of 8 ms."
    )
    assert report.columns(results) == ["", "no batching", "2 instances", "dynamic batching", "dynamic / 2 instances"]
    assert report.rows(results)[:2] == [
        ["requests/s", "100.0", "120.3", "150.0", "1.25"],
        ["dynamic / this mode", "1.50", "1.25", "", ""],
    ]
    assert results["verdict"]["baseline"] == "instances"
    assert "</i>2 instances</th>" in page(measured, results)
    measured.windows = rounds([(120, 100, 150)] * 3)
    assert "as the same server with dynamic batching off, the best of the other modes." in report.sentence(
        measured.results()
    )


def test_mode_that_was_left_out_is_explained(measured, capsys):
    measured.left_out["instances"] = "the server has one core"
    results = measured.results()
    assert results["left_out"] == {"instances": "the server has one core"}
    report.print_table(results, Console())
    for text in (page(measured, results), capsys.readouterr().out):
        assert "The mode instances is left out: the server has one core." in text


@pytest.mark.parametrize(("taken", "complains"), [(None, False), (0.19, False), (1.3, True)])
def test_busy_machine_is_reported_with_the_cores_and_passes(measured, monkeypatch, taken, complains):
    monkeypatch.setattr(compare, "host", lambda: {**host(), "cores": 2})
    measured.windows[1].other_cores = taken
    results = measured.results()
    complaint = (
        f"in 1 of {len(measured.windows)} windows other programs used up to 1.3 of this machine's 2 cores, so the "
        "numbers show them too: end them and measure again"
    )
    assert results["complaints"] == [complaint] * complains
    assert results["passed"]
    assert (escape(complaint) in page(measured, results)) == complains
    (row,) = [row for row in report.rows(results) if row[0] == "other programs, cores"]
    assert ("-" if taken is None else f"{taken:.2f}") in row


def test_every_defect_is_a_complaint(measured):
    results = measured.results()
    results["windows"][0]["failures"] = 3
    results["verdict"]["client_bound"] = True
    results["stopped"] = "interrupted"
    assert len(statistics.complaints(results)) == 3


@pytest.mark.parametrize(("counted_s", "complaints"), [(10.5, 1), (25.0, 0)])
def test_requests_of_others_are_noticed_unless_the_counters_were_read_late(measured, counted_s, complaints):
    results = measured.results()
    for window in results["windows"]:
        window["answered_by_triton"] = 2 * window["requests"]
        window["counted_s"] = counted_s
    assert len(statistics.complaints(results)) == complaints


@pytest.mark.parametrize(
    ("pairs", "minimum", "complaint"),
    [
        (ROUNDS, "", ""),
        (ROUNDS, "1.2", ""),
        (ROUNDS, "1.6", "the throughput ratio 1.50 is below MIN_RATIO=1.6"),
        # The ratio of these rounds is 2.02, but their interval begins far below 1.
        ([(100, 110), (100, 370)], "1.2", "the interval begins below MIN_RATIO=1.2"),
        (ROUNDS, "1.45", "the throughput ratio's 95 % interval, 1.27 to 1.77, begins below MIN_RATIO=1.45"),
        ([(100, 300)], "1.2", "one round has no interval that could prove MIN_RATIO=1.2"),
    ],
)
def test_min_ratio_is_compared_with_the_lower_bound(measured, pairs, minimum, complaint, monkeypatch, capsys, tmp_path):
    measured.settings |= {"MIN_RATIO": minimum, "REPORTS": str(tmp_path)}
    measured.windows = rounds(pairs)
    complaints = measured.results()["complaints"]
    assert len(complaints) == bool(complaint)
    assert complaint in "".join(complaints)
    # Exit code, terminal and report agree.
    monkeypatch.setattr(compare, "Comparison", lambda settings: measured)
    monkeypatch.setattr(measured, "measure", lambda: None)
    monkeypatch.setattr(report, "drawn_dashboard", lambda *_: DASHBOARD)
    assert compare.main() == bool(complaint)
    printed = capsys.readouterr()
    html = (tmp_path / "latest/report.html").read_text()
    for text in (complaint, report.sentence(measured.results())):
        assert text in (printed.out + printed.err).replace("\n", " ")
        assert escape(text) in html


def test_report_shows_the_engines_of_all_windows(measured, monkeypatch):
    """Show both engines if the modes ran on different ones; leave out models of other systems."""
    served = [{"encoder": "onnxruntime f32", "another": "openvino f32"}, {"encoder": "openvino bf16"}]
    monkeypatch.setattr(compare, "engines", lambda url: served.pop())
    assert measured.results()["engines"] == {}
    assert "<dt>engine</dt>" not in page(measured)
    for _ in range(2):
        measured.note_engines(["encoder"])
    assert measured.results()["engines"] == {"encoder": "onnxruntime f32, openvino bf16"}
    assert "<dt>engine</dt><dd>encoder on onnxruntime f32, openvino bf16</dd>" in page(measured)


def test_one_user_is_named_as_the_likely_cause(measured):
    measured.windows = rounds([(100, 101)] * 3)
    for window in measured.windows:
        window.counters["encoder"].executions = window.counters["encoder"].rows
    assert "allow_ragged_batch" in measured.results()["complaints"][0]
    results = measured.results()
    results["settings"]["users"] = 1
    assert "use more USERS" in statistics.complaints(results)[0]


def test_command_repeats_what_differs_from_the_defaults(dotenv):
    dotenv.write_text("USERS=64\nTRITON_HTTP_PORT=8010\nROUNDS=4\nMODES='none dynamic'\n")
    assert report.command(Settings.load()) == "make loadtest USERS=64 MODES='none dynamic'"


def test_no_report_shows_a_secret(dotenv, blank_charts, monkeypatch, tmp_path):
    """Set every setting that is not shown to a secret, in .env or in the environment."""
    hidden = {name for name, row in TABLE.items() if not row.shown}
    assert {"HF_TOKEN", "TRITON_ADMIN_KEY", "GRAFANA_ADMIN_PASSWORD", "TRANSFORMERS", "TORCH_INDEX"} <= hidden
    numbers = {name for name in hidden if name.endswith("_PORT")}
    secrets = {name: f"a-secret-in-{name}" for name in hidden - numbers}
    in_dotenv = sorted(secrets)[::2]
    dotenv.write_text("".join(f"{name}={secrets[name]}\n" for name in in_dotenv))
    for name in secrets.keys() - set(in_dotenv):
        monkeypatch.setenv(name, secrets[name])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-in-the-shell")

    loaded = Settings.load(checked=False)  # a secret is no valid port or flag
    assert all(loaded[name] == secret for name, secret in secrets.items())
    loaded |= {"BIND_ADDRESS": "127.0.0.1", "PROMETHEUS_PORT": "9"}
    done = comparison(loaded, rounds(ROUNDS))
    dashboard = report.drawn_dashboard(compare.Prometheus(loaded.url("PROMETHEUS_PORT")), done.run, done.windows)
    folder = report.write(done.results(), done.windows, tmp_path / "reports", dashboard)
    files = list(folder.iterdir())
    assert {"report.html", "results.json", "requests.csv"} < {file.name for file in files}
    for file in files:
        assert b"a-secret" not in file.read_bytes(), file.name


# --- open loop --------------------------------------------------------------------------------------------------------

P95S = [(100, 90, 50), (100, 90, 52), (100, 91, 48)]


@pytest.fixture
def open_loop(measured) -> Comparison:
    settings = Settings.load().replace(RATE="100", REPORTS=measured.settings["REPORTS"])
    return comparison(settings, open_loop_rounds(P95S))


def test_open_loop_shows_the_ratio_of_percentiles(open_loop):
    results = open_loop.results()
    assert results["complaints"] == []
    assert report.sentence(results) == (
        "At 100 requests per second, dynamic batching answers 95 % of the requests of embedding within 50 ms instead "
        "of 90 ms with dynamic batching off and one instance for each of its 2 cores, the best of the other modes: "
        "1.81 times as fast (95 % interval 1.61 to 2.02)."
    )
    rows = {row[0]: row[1:] for row in report.rows(results)}
    assert next(iter(rows)) == "latency p95, ms"
    assert rows["p95, this mode / dynamic"] == ["2.00", "1.81", "", ""]
    assert rows["windows that kept up"] == ["3 of 3", "3 of 3", "3 of 3", ""]
    html = page(open_loop, results)
    assert '<div class="ratio faster">1.81<small>' in html
    assert "Latency over time" in html
    assert "100 per second, at random (Poisson)" in html
    assert "make loadtest RATE=100" in html


@pytest.mark.parametrize(
    ("overloaded", "sentence", "complaints"),
    [
        (
            ("none", "instances"),
            "within 50 ms. With dynamic batching off and one instance for each of its 2 cores, the best of the other "
            "modes, the server does not keep up: the latency grows as long as the load lasts.",
            [],
        ),
        (("dynamic",), "At 100 requests per second, with dynamic batching the server does not keep up:", []),
        (
            MODES,
            "Not proven: at 100 requests per second, the server does not keep up, neither with dynamic batching nor",
            ["the server never keeps up with 100 requests per second: set a lower RATE"],
        ),
    ],
)
def test_mode_that_does_not_keep_up_has_no_large_number(open_loop, overloaded, sentence, complaints):
    open_loop.windows = open_loop_rounds(P95S, overloaded=overloaded)
    results = open_loop.results()
    assert sentence in report.sentence(results)
    assert results["complaints"] == complaints
    rows = {row[0]: row[1:] for row in report.rows(results)}
    assert "0 of 3" in rows["windows that kept up"]
    assert rows["latency p95, ms"][-1] == ""
    assert not any(rows["p95, this mode / dynamic"])
    assert 'class="ratio' not in page(open_loop, results)
    shown = [report.window_line(window) for window in open_loop.windows]
    assert sum(line.endswith("does not keep up") for line in shown) == 3 * len(overloaded)


@pytest.mark.parametrize(
    ("p95s", "sentence"),
    [
        ([(100, 90), (100, 110)], "Not proven: at 100 requests per second, dynamic batching was 1.01 times as fast as"),
        ([(100, 50)], "in the only complete round, and one round has no interval."),
        ([(50, 100), (50, 100)], "within 100 ms instead of 50 ms with dynamic batching off: 0.50 times"),
    ],
)
def test_open_loop_without_a_gain_is_not_called_one(open_loop, p95s, sentence):
    open_loop.windows = open_loop_rounds(p95s)
    open_loop.settings["MIN_RATIO"] = "1.9"
    assert sentence in report.sentence(open_loop.results())
    assert "the latency ratio" in open_loop.results()["complaints"][0] or p95s == [(100, 50)]


def test_defects_of_an_open_loop_name_its_settings(open_loop):
    open_loop.windows = open_loop_rounds([(100, 50), (100, 50)], rate=1)
    for window in open_loop.windows:
        window.client_cpu = 1.0
        window.counters["encoder"].executions = window.counters["encoder"].rows
    complaints = "\n".join(open_loop.results()["complaints"])
    assert "requests arrive so seldom that none waits for another; set a higher RATE" in complaints
    assert (
        "had only 10 response(s) in 10 s, too few to show the latency: set a longer WINDOW, or a higher RATE"
        in complaints
    )
    assert "a part of the latency is its own: set more WORKERS, or a lower RATE" in complaints


def test_full_disk_loses_neither_the_table_nor_the_numbers(measured, monkeypatch, tmp_path, capsys):
    measured.settings["REPORTS"] = str(tmp_path)
    monkeypatch.setattr(compare, "Comparison", lambda settings: measured)
    monkeypatch.setattr(Comparison, "measure", lambda comparison: None)
    monkeypatch.setattr(report, "drawn_dashboard", lambda *_: DASHBOARD)

    def page_that_does_not_fit(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(report, "html", page_that_does_not_fit)
    target = tmp_path / f"{measured.run}-{measured.plan.system}"
    with pytest.raises(UserError, match=f"^{target} cannot be written: No space left on device.*results.json"):
        compare.main()
    assert report.sentence(measured.results()) in capsys.readouterr().out
    assert json.loads((target / "results.json").read_text())["windows"]
    assert not (tmp_path / "latest").exists()
