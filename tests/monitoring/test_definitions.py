"""The dashboards' definitions and their rendering. tests/stack/test_dashboards.py adds real data."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from markupsafe import escape

from loadtest.load.telemetry import LAST_SCRAPE_S
from monitoring.__main__ import FOLDER, files
from monitoring.definitions.hardware import PROFILES
from monitoring.drawing import draw as units
from monitoring.drawing.charts import MODE_COLOURS
from monitoring.drawing.draw import COLOURS, NAMED, alone, arranged, colours_of, draw
from monitoring.drawing.evaluate import SCRAPE_S, Evaluator, Range, dashboards, rows
from monitoring.drawing.page import check_ours, chosen_range
from tests.support.dashboards import ALL, PANELS, panels_of
from triton_transformers.prometheus import Prometheus, Series
from triton_transformers.settings import MODES, ROOT, Settings, UserError


def test_committed_files_match_definitions():
    for path, text in files().items():
        assert path.read_text() == text, f"{path}: run make dashboards-json"
    assert set(files()) == set(FOLDER.rglob("*.json"))


@pytest.mark.parametrize("name", ALL)
def test_grafana_schema_reads_every_field(name):
    """Read and write each dashboard with the SDK of Grafana 11: nothing may be lost."""
    ours = ALL[name]
    theirs = json.loads(json.dumps(Dashboard.from_json(ours), cls=JSONEncoder))
    for annotation in ours["annotations"]["list"]:
        del annotation["step"], annotation["titleFormat"]  # the SDK has no field for them, Grafana has
    assert theirs == ours


@pytest.mark.parametrize("profile", PROFILES)
def test_dashboards_of_a_profile_have_fixed_uids(profile):
    uids = [dashboard["uid"] for dashboard in dashboards(profile)]
    assert uids == ["triton-throughput", "triton-batching", "triton-hardware"]


@pytest.mark.parametrize("name", ALL)
def test_panels_fill_the_grid_without_overlap(name):
    places = [place["gridPos"] for panel in ALL[name]["panels"] for place in (panel, *panel.get("panels", []))]
    cells = [(p["x"] + x, p["y"] + y) for p in places for y in range(p["h"]) for x in range(p["w"])]
    assert sorted(cells) == [(x, y) for x in range(24) for y in range(max(y for _, y in cells) + 1)]


@pytest.mark.parametrize("name", ALL)
def test_no_dashboard_draws_a_query_or_a_title_twice(name):
    panels = panels_of(ALL[name])
    for seen in (
        [panel["title"] for panel in panels],
        [target["expr"] for panel in panels for target in panel["targets"]],
    ):
        assert len(set(seen)) == len(seen)


def test_overview_fits_one_screen_and_rows_that_a_stack_may_lack_are_collapsed():
    headings = [panel for panel in ALL["dashboards/throughput"]["panels"] if panel["type"] == "row"]
    assert {panel["title"]: panel["collapsed"] for panel in headings} == {
        "Overview": False, "Gateway": False, "Batching": False, "Generation": True, "Load test": True
    }  # fmt: skip
    assert headings[1]["gridPos"]["y"] <= 20  # Grafana's rows are 38 points high: 760 points


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"RANGE": "5m"}, Range(3300, 3600)),
        *(({"RANGE": text}, Range(3600 - s, 3600)) for text, s in (("90s", 90), ("1h", 3600))),
        *(({"RANGE": text}, f"RANGE={text}: must be a length of time above 0") for text in ("15", "m", "0m", "1.5h")),
        ({"RANGE": "3650d"}, "RANGE=3650d: must be at most 31d"),
        *(
            ({"UNTIL": until}, f"UNTIL={until}: must be a time such as")
            for until in ("yesterday", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59-12:00", "1970-01-01T00:01:00Z")
        ),
    ],
)
def test_range_is_read_from_two_settings(settings, expected):
    chosen = Settings.load().replace(**{"UNTIL": "1970-01-01T01:00:00Z"} | settings)
    if isinstance(expected, Range):
        assert chosen_range(chosen) == expected
    else:
        with pytest.raises(UserError, match=expected):
            chosen_range(chosen)


@pytest.mark.parametrize("panel", PANELS)
def test_panel_has_description_unit_and_queries(panel):
    assert panel["description"].endswith(".")
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["noValue"]
    assert units.text(1, defaults["unit"])
    assert panel["targets"]
    for target in panel["targets"]:
        assert target["legendFormat"]
        assert panel["datasource"] == target["datasource"] == {"type": "prometheus", "uid": "${source}"}
        # Windows follow the dashboard's range or resolution; a fixed length would not.
        assert set(re.findall(r"\[([^\]]+)\]", target["expr"])) <= {
            "$__rate_interval",
            "$__range",
            "$__range:1s",
            "$__rate_interval:1s",
        }
        assert "clamp_min" not in target["expr"]


@pytest.mark.parametrize(
    ("unit", "values"),
    [
        ("s", {0.000_25: "250 µs", 0.0382: "38.2 ms", 1.5: "1.5 s", 4000: "4000 s", 0: "0 s", math.nan: "-"}),
        ("percentunit", {0.123: "12.3%", 0: "0%"}),
        ("bytes", {2 * 2**30: "2 GiB", 0: "0 B"}),
        ("suffix:requests/s", {152.34: "152 requests/s", 1999: "1999 requests/s", 0.25: "0.25 requests/s"}),
        ("watt", {285.4: "285 W"}),
        ("joule", {0.5: "500 mJ"}),
        ("none", {17.9: "17.9", 3730: "3730"}),
        ("suffix:×", {1.794: "1.79 ×"}),
    ],
)
def test_numbers_have_a_readable_unit(unit, values):
    assert {value: units.text(value, unit) for value in values} == values


def test_scrape_interval_is_the_same_everywhere():
    scrapes = yaml.safe_load((ROOT / "monitoring/prometheus/prometheus.yml").read_text())["global"]
    source = yaml.safe_load((FOLDER / "provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
    interval = f"{SCRAPE_S}s"
    assert scrapes["scrape_interval"] == scrapes["evaluation_interval"] == interval
    assert source["jsonData"]["timeInterval"] == interval
    assert LAST_SCRAPE_S > SCRAPE_S


class EmptyPrometheus(Prometheus):
    """Stands in for a Prometheus without samples; records the queries."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9")
        self.queries: list[str] = []

    def at(self, expr: str, time: float) -> list[Series]:
        self.queries.append(expr)
        return []

    def over(self, expr: str, start: float, end: float, step: float) -> list[Series]:
        self.queries.append(expr)
        return []

    def label_values(self, label: str, selector: str, start: float, end: float) -> list[str]:
        return []


@pytest.mark.parametrize("name", ALL)
def test_panels_without_data_are_left_out_and_named(name):
    prometheus = EmptyPrometheus()
    page = str(draw(prometheus, ALL[name], Range(0, 900)))
    assert "<section" not in page
    left_out = page.partition("Left out.")[2]
    for title, panels in rows(ALL[name]):
        assert panels[0]["fieldConfig"]["defaults"]["noValue"] in left_out
        names = [f"the row {title}"] if title else [panel["title"] for panel in panels]
        assert all(escape(name) in left_out for name in names)
    assert not any("$" in expr for expr in prometheus.queries), "a variable is not filled in"


def test_defaults_are_the_newest_comparison_and_all_models():
    prometheus = EmptyPrometheus()
    prometheus.label_values = lambda *_: ["20261121T090027Z", "20261121T193319Z", "20261120T000000Z"]
    time = Range(0, 900)
    assert Evaluator(prometheus, ALL["dashboards/batching"], time).values["run"] == "20261121T193319Z"
    assert Evaluator(prometheus, ALL["dashboards/batching"], time, {"run": "x"}).values["run"] == "x"
    assert Evaluator(prometheus, ALL["dashboards/throughput"], time).values["model"] == ".*"


def test_modes_keep_their_colours():
    (panel,) = (panel for panel in panels_of(ALL["dashboards/throughput"]) if panel["title"] == "Hardware in use")
    colours = colours_of(panel, ["CPU, dynamic", "CPU, instances", "CPU, none", "GPU, none"])
    assert [colours[f"CPU, {mode}"] for mode in MODES] == list(MODE_COLOURS.values())
    assert not {colours["GPU, none"], *COLOURS} & {*MODE_COLOURS.values()}


def legend_of(title: str, series: list[Series]) -> tuple[list[str], list[str]]:
    """Return the texts and the colours of the legend of a panel that has these series."""
    dashboard = ALL["dashboards/throughput"]
    panels = [panel for panel in panels_of(dashboard) if panel["title"] == title]
    prometheus = EmptyPrometheus()
    prometheus.over = lambda expr, *_: [] if "loadtest_window" in expr else series
    page = str(draw(prometheus, dashboard | {"panels": panels}, Range(0, 900)))
    entries = re.findall(r'<span><i style="border-color: ([^"]+)"></i>([^<]+)</span>', page)
    return [text for _, text in entries] or re.findall(r"Left out\. ([^<]+)\.", page), [colour for colour, _ in entries]


def rates(mode: str = "none", **models: float) -> list[Series]:
    return [Series({"model": m, "mode": mode}, [800.0, 900.0], [0.0, rate]) for m, rate in models.items()]


def test_legend_names_the_five_largest_series_and_counts_the_others():
    entries, colours = legend_of("Requests/s by model", rates(**{f"m{n}": float(n) for n in range(40)}))
    assert entries == [
        *(f"m{n}, none, at most {n} requests/s" for n in (39, 38, 37, 36, 35)),
        "34 others, at most 34 requests/s",  # and m0 answered nothing
    ]
    assert len(set(colours)) == NAMED + 1


def test_series_that_are_always_zero_and_the_mode_outside_of_comparisons_are_left_out():
    assert legend_of("Requests/s by model", rates("as configured", m=1.0))[0] == ["m, at most 1 requests/s"]
    assert legend_of("Requests/s by model", rates(busy=2.0, idle=0.0))[0] == ["busy, none, at most 2 requests/s"]
    assert legend_of("Requests/s by model", rates(idle=0.0))[0] == ["Always 0 requests/s: Requests/s by model"]
    assert legend_of("Cache in use", rates(idle=1e-7))[0] == ["Always 0%: Cache in use"]


@pytest.mark.parametrize(
    "lines",
    [
        [["Pending"]],
        [["Pending", "Alerts firing"], ["Engines"], ["Hardware in use"]],
        [["Mean batch size", "Queue time per request", "Tokens/s"]],
        [["Mean batch size", "Queue share"], ["Tokens/s", "Padding share"]],
    ],
)
def test_panels_with_data_fill_their_line(lines):
    titles = [title for line in lines for title in line]
    panels = [panel for panel in panels_of(ALL["dashboards/throughput"]) if panel["title"] in titles]
    assert [[panel["title"] for panel in line] for line in arranged(panels)] == lines


class OneWindow(EmptyPrometheus):
    """Stands in for a Prometheus with one measured window of five seconds, an hour ago."""

    def over(self, expr: str, start: float, end: float, step: float) -> list[Series]:
        times = [at for at in np.arange(start, end + 1, step) if 1001 <= at < 1006]
        return [Series({}, times, [1.0] * len(times))] if times and 'mode="none"' in expr else []


@pytest.mark.parametrize("length", [300, 3600, 3 * 3600 - 1000])
def test_short_window_is_shaded_on_a_long_range(length):
    ((colour, start, end),) = Evaluator(OneWindow(), ALL["dashboards/throughput"], Range(900, 900 + length)).regions()
    assert colour == MODE_COLOURS["none"]
    assert 1001 <= start < end < 1006
    # Points without a neighbour are marked, because no line shows them.
    times, values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [7.0, math.nan, 8.0, 9.0, math.nan, 6.0]
    assert alone(times, values) == ([1.0, 6.0], [7.0, 6.0])


def test_another_stacks_prometheus_is_refused():
    settings = Settings.load()
    prometheus = EmptyPrometheus()
    prometheus.url = settings.url("PROMETHEUS_PORT")
    prometheus.at = lambda *_: [Series({"instance": "127.0.0.1:8102"}, [900.0], [1.0])]
    with pytest.raises(UserError, match=r"another stack: it scrapes 127\.0\.0\.1:8102, not 127\.0\.0\.1:8002"):
        check_ours(prometheus, settings)
    prometheus.at = lambda *_: [Series({"instance": "127.0.0.1:8002"}, [900.0], [1.0])]
    check_ours(prometheus, settings)


def test_engines_are_shown_by_name_and_labels_are_escaped():
    prometheus = EmptyPrometheus()
    labels = {"model": "encoder", "engine": "openvino", "precision": "bf16"}
    prometheus.at = lambda expr, _: [Series(labels, [900.0], [1.0])] if "transformers_engine" in expr else []
    page = str(draw(prometheus, ALL["dashboards/throughput"], Range(0, 900)))
    assert page.count("encoder: openvino bf16") == page.count("<b>encoder: openvino bf16</b>") == 1
    prometheus.at = lambda *_: [Series({"mode": "<script>"}, [900.0], [1.0])]
    prometheus.over = lambda *_: [Series({"model": "<script>", "mode": "<script>"}, [800.0, 900.0], [1.0, 2.0])]
    page = str(draw(prometheus, ALL["dashboards/batching"], Range(0, 900)))
    assert "&lt;script&gt;" in page
    assert "<script" not in page
