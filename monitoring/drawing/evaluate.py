"""Evaluate the queries of a dashboard's JSON, asking Prometheus as Grafana does."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton_transformers.prometheus import Prometheus, Series
from triton_transformers.settings import ROOT, UserError

FOLDER = ROOT / "monitoring/grafana"
BATCHING = FOLDER / "dashboards/batching.json"
# Maximum points of a line: a panel is not wide enough for more.
POINTS = 300
# Prometheus refuses a query of more than 11000 points.
MAX_POINTS = 10_000
SCRAPE_S = 1  # prometheus.yml's scrape_interval, Grafana's timeInterval
Region = tuple[str, float, float]  # colour, start, end


@dataclass(frozen=True)
class Range:
    """A range of time, in seconds since 1970."""

    start: float
    end: float

    @property
    def step(self) -> int:
        return max(SCRAPE_S, math.ceil((self.end - self.start) / POINTS))


@dataclass(frozen=True)
class Line:
    """A series under its name on the panel."""

    name: str
    series: Series

    @property
    def finite(self) -> list[float]:
        return [value for value in self.series.values if math.isfinite(value)]

    @property
    def last(self) -> float:
        return self.finite[-1]


def dashboards(profile: str) -> list[dict[str, Any]]:
    """Return the dashboards that Grafana shows in this profile."""
    paths = [
        *sorted((FOLDER / "dashboards").glob("*.json"), reverse=True),
        FOLDER / f"hardware/{profile}/hardware.json",
    ]
    return [load(path) for path in paths]


def load(path: Path) -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads(path.read_text())
    return dashboard


def rows(dashboard: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the title of each row with its panels: those in it if it is collapsed, else those that follow it."""
    found: list[tuple[str, list[dict[str, Any]]]] = [("", [])]
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            found.append((panel["title"], [*panel["panels"]]))
        else:
            found[-1][1].append(panel)
    return [(title, panels) for title, panels in found if panels]


class Evaluator:
    """Evaluates one dashboard over one range. `chosen` overrides the defaults of its variables."""

    def __init__(
        self, prometheus: Prometheus, dashboard: dict[str, Any], time: Range, chosen: dict[str, str] | None = None
    ) -> None:
        self.prometheus = prometheus
        self.dashboard = dashboard
        self.time = time
        self.values = {
            "__rate_interval": f"{max(time.step + SCRAPE_S, 4 * SCRAPE_S)}s",
            "__interval": f"{time.step}s",
            "__range": f"{math.ceil(time.end - time.start)}s",
        }
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "datasource":
                continue  # no query contains it
            self.values[variable["name"]] = (chosen or {}).get(variable["name"]) or self.default(variable)

    def default(self, variable: dict[str, Any]) -> str:
        """Return the value for all values of the label, or else the last in the alphabet: the newest comparison."""
        if variable["includeAll"]:
            return str(variable["allValue"])
        query = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
        assert query, "the definitions use no other kind of variable"
        selector, label = query.groups()
        values = self.prometheus.label_values(label, self.filled_in(selector), self.time.start, self.time.end)
        return max(values, default="")

    def filled_in(self, expr: str) -> str:
        return re.sub(r"\$(\w+)", lambda match: self.values[match[1]], expr)

    def lines(self, panel: dict[str, Any]) -> list[Line]:
        lines: list[Line] = []
        for target in panel["targets"]:
            expr = self.filled_in(target["expr"])
            if target.get("instant"):
                series = self.prometheus.at(expr, self.time.end)
            else:
                series = self.prometheus.over(expr, self.time.start, self.time.end, self.time.step)
            named = [Line(_name(target["legendFormat"], one.labels), one) for one in series]
            lines += sorted((line for line in named if line.finite), key=lambda line: line.name)
        return lines

    def regions(self) -> list[Region]:
        """Return what the dashboard's annotations mark.

        A window is shorter than a step of a long range, so this asks for the smallest step that Prometheus allows.
        """
        step = max(SCRAPE_S, math.ceil((self.time.end - self.time.start) / MAX_POINTS))
        marked = []
        for annotation in self.dashboard["annotations"]["list"]:
            for series in self.prometheus.over(annotation["expr"], self.time.start, self.time.end, step):
                for start, end in _stretches(series.times, step):
                    marked.append((annotation["iconColor"], start, end))
        return marked


def since(text: str) -> float:
    """Return the seconds of a length of time such as 90s, 15m, 2h or 1d."""
    match = re.fullmatch(r"(\d+)([smhd])", text)
    if not match or not int(match[1]):
        raise UserError(f"RANGE={text}: must be a length of time above 0, such as 90s, 15m, 2h or 1d")
    return int(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def _name(form: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{\s*(\w+)\s*}}", lambda match: labels.get(match[1], ""), form)


def _stretches(times: list[float], step: float) -> list[tuple[float, float]]:
    stretches: list[tuple[float, float]] = []
    for time in times:
        if stretches and time - stretches[-1][1] <= 1.5 * step:
            stretches[-1] = (stretches[-1][0], time)
        else:
            stretches.append((time, time))
    return stretches
