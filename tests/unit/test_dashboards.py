"""The dashboards as Grafana gets them, and what draws them without it. With data: tests/stack/test_dashboards.py."""

from __future__ import annotations

import json
import math
import re

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from loadtest.telemetry import LAST_SCRAPE_S
from scripts.common.prometheus import Prometheus, PrometheusError, Series
from scripts.common.settings import ROOT, Settings, UserError
from scripts.dashboards.__main__ import FOLDER, files
from scripts.dashboards.definitions.hardware import PROFILES
from scripts.dashboards.render import units
from scripts.dashboards.render.draw import draw
from scripts.dashboards.render.evaluate import SCRAPE_S, Evaluator, Range, dashboards, since
from scripts.dashboards.render.page import chosen_range
from tests.support.dashboards import ALL, PANELS


def test_the_files_are_what_the_code_makes():
    for path, text in files().items():
        assert path.read_text() == text, f"{path}: run make dashboards-json"
    assert set(files()) == set(FOLDER.rglob("*.json"))


@pytest.mark.parametrize("name", ALL)
def test_grafanas_own_schema_reads_all_of_it(name):
    """As the SDK of Grafana 11 has it: nothing is lost on the way in and out again."""
    ours = ALL[name]
    theirs = json.loads(json.dumps(Dashboard.from_json(ours), cls=JSONEncoder))
    for annotation in ours["annotations"]["list"]:
        del annotation["step"], annotation["titleFormat"]  # the SDK has no field for them, Grafana has
    assert theirs == ours


def test_fixed_uids_one_tag_and_links():
    assert {found["uid"] for found in ALL.values()} == {"triton-throughput", "triton-batching", "triton-hardware"}
    for found in ALL.values():
        assert found["tags"] == found["links"][0]["tags"] == ["triton"]
        ids = [panel["id"] for panel in found["panels"]]
        assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("profile", PROFILES)
def test_each_profile_has_one_hardware_dashboard(profile):
    uids = [found["uid"] for found in dashboards(profile)]
    assert uids == ["triton-throughput", "triton-batching", "triton-hardware"]


@pytest.mark.parametrize("name", ALL)
def test_panels_lie_side_by_side(name):
    cells = set()
    for panel in ALL[name]["panels"]:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & own, panel["title"]
        cells |= own
    assert len(cells) == 24 * (max(y for _, y in cells) + 1), "a hole"


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_says_what_it_is(panel):
    assert panel["description"].endswith(".")
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["noValue"]
    assert units.text(1, defaults["unit"])
    assert panel["targets"]
    for target in panel["targets"]:
        assert target["legendFormat"]
        assert panel["datasource"] == target["datasource"] == {"type": "prometheus", "uid": "prometheus"}
        # Of the dashboard's own range or resolution, never of a length written down.
        assert set(re.findall(r"\[([^\]]+)\]", target["expr"])) <= {"$__rate_interval", "$__range", "$__range:1s"}
        assert "clamp_min" not in target["expr"]


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0.000_25, "s", "250 µs"),
        (0.0382, "s", "38.2 ms"),
        (1.5, "s", "1.5 s"),
        (90, "s", "1.5 min"),
        (0, "s", "0 s"),
        (0.123, "percentunit", "12.3%"),
        (0, "percentunit", "0%"),
        (2 * 2**30, "bytes", "2 GiB"),
        (0, "bytes", "0 B"),
        (152.34, "reqps", "152 req/s"),
        (1999, "reqps", "2 K req/s"),
        (0.25, "reqps", "0.25 req/s"),
        (285.4, "watt", "285 W"),
        (0.5, "joule", "500 mJ"),
        (17.9, "none", "17.9"),
        (3730, "none", "3730"),
        (3730, "short", "3.73 K"),
        (1.794, "suffix: ×", "1.79 ×"),
        (math.nan, "s", "-"),
    ],
)
def test_units(value, unit, shown):
    assert units.text(value, unit) == shown


def test_an_unknown_unit_is_said():
    with pytest.raises(UserError, match="no unit 'furlongs'"):
        units.text(1, "furlongs")


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("15m", 900), ("2h", 7200), ("1d", 86400)])
def test_a_length_of_time(text, seconds):
    assert since(text) == seconds


@pytest.mark.parametrize("text", ["", "15", "m", "0m", "-3m", "1.5h", "15 m", "15min"])
def test_no_length_of_time(text):
    with pytest.raises(UserError, match=f"RANGE={re.escape(text)}"):
        since(text)


def test_the_chosen_range():
    settings = Settings(Settings.load() | {"RANGE": "5m", "UNTIL": "1970-01-01T01:00:00Z"})
    assert chosen_range(settings) == Range(3300, 3600)
    for until in ("yesterday", "0001-01-01T00:00:00Z"):
        with pytest.raises(UserError, match=f"UNTIL={until}: a time as in"):
            chosen_range(Settings(settings | {"UNTIL": until}))
    with pytest.raises(UserError, match="RANGE=3650d: at most 31d"):
        chosen_range(Settings(settings | {"RANGE": "3650d"}))


def test_all_know_how_often_prometheus_asks():
    told = yaml.safe_load((ROOT / "monitoring/prometheus/prometheus.yml").read_text())["global"]
    source = yaml.safe_load((FOLDER / "provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
    every = f"{SCRAPE_S}s"
    assert told["scrape_interval"] == told["evaluation_interval"] == source["jsonData"]["timeInterval"] == every
    assert LAST_SCRAPE_S > SCRAPE_S


def test_a_long_range_has_no_more_points_than_a_panel_is_wide():
    assert Range(0, 60).step == 1
    assert Range(0, 86400).step == 288


class NothingStored(Prometheus):
    """Stands in for a Prometheus that has nothing, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9")
        self.asked: list[str] = []

    def at(self, expr: str, time: float) -> list[Series]:
        self.asked.append(expr)
        return []

    def over(self, expr: str, start: float, end: float, step: float) -> list[Series]:
        self.asked.append(expr)
        return []

    def label_values(self, label: str, selector: str, start: float, end: float) -> list[str]:
        return []


@pytest.mark.parametrize("name", ALL)
def test_without_data_each_panel_says_so(name):
    prometheus = NothingStored()
    page = str(draw(prometheus, ALL[name], Range(0, 900)))
    for panel in ALL[name]["panels"]:
        assert panel["fieldConfig"]["defaults"]["noValue"] in page
    assert "<img" not in page
    assert not any("$" in expr for expr in prometheus.asked), "a variable is not filled in"


def test_the_newest_comparison_is_the_default_and_all_models():
    prometheus = NothingStored()
    prometheus.label_values = lambda *_: ["20261121T090027Z", "20261121T193319Z", "20261120T000000Z"]
    time = Range(0, 900)
    assert Evaluator(prometheus, ALL["dashboards/batching"], time).values["run"] == "20261121T193319Z"
    assert Evaluator(prometheus, ALL["dashboards/batching"], time, {"run": "x"}).values["run"] == "x"
    assert Evaluator(prometheus, ALL["dashboards/throughput"], time).values["model"] == ".*"


def test_text_of_series_is_escaped():
    prometheus = NothingStored()
    prometheus.at = lambda *_: [Series({"mode": "<script>"}, [900.0], [1.0])]
    prometheus.over = lambda *_: [Series({"model": "<script>", "mode": "<script>"}, [800.0, 900.0], [1.0, 2.0])]
    page = str(draw(prometheus, ALL["dashboards/batching"], Range(0, 900)))
    assert "&lt;script&gt;" in page
    assert "<script" not in page


def test_a_prometheus_that_is_gone_is_one_sentence():
    with pytest.raises(PrometheusError, match=r"http://127.0.0.1:9 does not answer"):
        draw(Prometheus("http://127.0.0.1:9"), ALL["dashboards/batching"], Range(0, 900))
