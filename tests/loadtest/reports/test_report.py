"""The files of a report: their content, and the secrets that they never contain."""

import re

import pytest
from markupsafe import Markup
from rich.console import Console

from loadtest.compare import compare
from loadtest.compare.compare import Comparison
from loadtest.reports import report
from monitoring.drawing.charts import MODE_COLOURS
from monitoring.drawing.draw import colours_of
from monitoring.drawing.evaluate import BATCHING, load
from tests.support.measured_windows import comparison, open_loop_rounds, rounds
from triton_transformers import settings as settings_module
from triton_transformers.settings import MODES, TABLE, Settings

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


def test_page_names_what_was_sent(measured):
    assert "256 from <code>triton_transformers/corpus/mixed.txt</code>" in page(measured)
    at_a_rate = page(comparison(Settings.load().replace(RATE="100"), open_loop_rounds([(100, 50)])))
    assert "100 per second, at random (Poisson)" in at_a_rate and "Latency over time" in at_a_rate
    images = page(comparison(measured.settings, measured.windows, noun="images"))
    assert "<dt>images</dt><dd>0 generated ones" in images and "images per batch (encoder)" in images
    assert "texts" not in images


def test_sentence_and_table_name_the_best_other_mode(measured):
    measured.windows = rounds([(100, 120, 150), (100, 120, 150), (100, 121, 150)])
    results = measured.results()
    assert "one instance for each of its 2 cores, the best of the other modes." in report.sentence(results)
    assert report.columns(results) == ["", "no batching", "2 instances", "dynamic batching"]
    assert report.rows(results)[:3] == [
        ["requests/s", "100.0", "120.3", "150.0"],
        ["dynamic / this mode", "1.50", "1.25", ""],
        ["  95 % interval", "1.50-1.50", "1.23-1.26", ""],
    ]
    measured.windows = rounds([(120, 100, 150)] * 3)
    assert "with dynamic batching off, the best of the other modes." in report.sentence(measured.results())


@pytest.mark.parametrize(
    ("overloaded", "ratios", "kept_up"),
    [
        ((), ["2.00", "1.81", ""], ["3 of 3", "3 of 3", "3 of 3"]),
        (("none", "instances"), [""] * 3, ["0 of 3", "0 of 3", "3 of 3"]),
        (("dynamic",), [""] * 3, ["3 of 3", "3 of 3", "0 of 3"]),
    ],
)
def test_latency_at_a_rate_is_compared_only_with_modes_that_keep_up(measured, overloaded, ratios, kept_up):
    windows = open_loop_rounds([(100, 90, 50), (100, 90, 52), (100, 91, 48)], overloaded=overloaded)
    results = comparison(Settings.load().replace(RATE="100"), windows).results()
    rows = {row[0]: row[1:] for row in report.rows(results)}
    assert next(iter(rows)) == "latency p95, ms"
    assert (rows["p95, this mode / dynamic"], rows["windows that kept up"]) == (ratios, kept_up)
    shown = [report.window_line(window).endswith("does not keep up") for window in windows]
    assert sum(shown) == 3 * len(overloaded)


def test_ratio_of_a_rate_is_that_of_the_table(measured):
    """The percentile of all rounds together would be 240 ms and 100 ms: another ratio."""
    windows = open_loop_rounds([(100, 100), (400, 100), (100, 100)])
    results = comparison(Settings.load().replace(RATE="100"), windows).results()
    rows = {row[0]: row[1:] for row in report.rows(results)}
    assert rows["latency p95, ms"] == ["159", "100"]
    assert rows["p95, this mode / dynamic"] == ["1.59", ""]
    assert "dynamic batching off: 1.59 times as fast" in report.sentence(results)


def test_formats_are_compared_with_the_first_in_speed_and_answers(drawn, blank_charts, capsys):
    formats = ["onnx", "int8", "python"]
    drawn.settings |= {"FORMATS": " ".join(formats)}
    drawn.quality = {
        "int8": {"cosine_min": 0.97512, "cosine_mean": 0.99}, "python": {"cosine_min": 1.0, "cosine_mean": 1.0}
    }  # fmt: skip
    names = dict(zip(MODES, formats, strict=True))
    drawn.windows = rounds([(100, 171, 50), (100, 173, 51), (100, 172, 50)])
    for window in drawn.windows:
        window.mode = names[window.mode]
        if window.mode == "python":  # a format may have other models
            window.counters = {"whole": window.counters["encoder"]}
    results = drawn.results()
    assert (results["verdict"]["word"], results["verdict"]["baseline"]) == ("proven", "onnx")
    assert [f"{r['throughput_ratio']:.2f}" for r in results["verdict"]["ratios"].values()] == ["1.72", "0.50"]
    assert report.sentence(results).startswith(
        "Proven: with 64 users, FORMAT=int8 answered 1.72 times as many requests"
    )
    report.print_table(results, Console(width=500))
    printed = " ".join(capsys.readouterr().out.split())
    assert "this format / onnx 1.72 0.50" in printed
    assert "smallest cosine of an answer 0.9751 1.0000" in printed
    html = page(drawn, results)
    assert "onnx, int8, python" in html
    assert all(f"var(--{mode})" in html for mode in MODES)
    assert "as <code>make add</code> configures it" in html and "`" not in html


def test_recorded_charts_give_a_format_the_colour_of_the_other_charts():
    like = {"onnx": "none", "onnx-int8": "dynamic", "python": "instances"}
    charts = report.charts_only(load(BATCHING), like)
    shades = {re.search('mode="(.+?)"', mark["expr"])[1]: mark["iconColor"] for mark in charts["annotations"]["list"]}
    expected = {form: MODE_COLOURS[mode] for form, mode in like.items()}
    assert shades == expected
    names = [f"CPU, {form}" for form in like]
    for panel in charts["panels"]:
        if panel["fieldConfig"]["overrides"]:
            assert list(colours_of(panel, names).values()) == list(expected.values())


def test_dashboard_in_report_repeats_no_number():
    """Prometheus computes the ratio differently, so a report that showed both would contradict itself."""
    panels = report.charts_only(load(BATCHING), {})["panels"]
    assert panels
    assert {panel["type"] for panel in panels} == {"timeseries"}
    assert not [panel["title"] for panel in panels if "Requests/s" in panel["title"]]


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
    results = done.results()
    dashboard = report.drawn_dashboard(compare.Prometheus(loaded.url("PROMETHEUS_PORT")), results, done.windows)
    folder = report.write(results, done.windows, tmp_path / "reports", dashboard)
    files = list(folder.iterdir())
    assert {"report.html", "results.json", "requests.csv"} < {file.name for file in files}
    for file in files:
        assert b"a-secret" not in file.read_bytes(), file.name
