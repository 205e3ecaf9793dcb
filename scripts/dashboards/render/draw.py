"""Draw a dashboard as HTML: each panel where Grafana puts it, with the same unit, legend and numbers."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from scripts.common.figures import Palette, svg_data_urls
from scripts.common.pages import page
from scripts.common.prometheus import Prometheus
from scripts.common.settings import UserError
from scripts.dashboards.render.evaluate import Evaluator, Line, Range
from scripts.dashboards.render.units import scale, text

# A column of Grafana's 24 and a row, in inches of a figure on a page 1240 points wide.
COLUMN, ROW = 0.5, 0.36
COLOURS = ("#3274d9", "#e0752d", "#56a64b", "#b877d9", "#d64a4a", "#2a9d9d", "#c2a200", "#8a8a8a", "#d4699a", "#7c6f5a")
# How a line is drawn: solid, and once every colour is taken dashed, then dotted. CSS and matplotlib share the names.
STYLES = ("solid", "dashed", "dotted")
TICKS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800]


def draw(prometheus: Prometheus, dashboard: dict, time: Range, chosen: dict[str, str] | None = None) -> Markup:
    evaluator = Evaluator(prometheus, dashboard, time, chosen)
    regions = evaluator.regions()
    panels = [drawn(panel, evaluator.lines(panel), regions, time) for panel in dashboard["panels"]]
    return page("scripts.dashboards.render", "dashboard.html.j2", panels=panels)


def drawn(panel: dict, lines: list[Line], regions: list, time: Range) -> dict:
    """Return what the template needs to show a panel."""
    defaults = panel["fieldConfig"]["defaults"]
    unit, decimals = defaults["unit"], defaults.get("decimals")
    looks = looks_of(panel, sorted({line.name for line in lines}))
    only_names = panel.get("options", {}).get("textMode") == "name"
    shown = {
        "title": panel["title"],
        "description": panel["description"],
        "type": panel["type"],
        "place": panel["gridPos"],
        "empty": "" if lines else defaults["noValue"],
        "values": [
            {
                "name": line.name,
                "colour": looks[line.name].colour if panel["type"] != "stat" else stat_colour(panel, line),
                "style": looks[line.name].style,
                "text": line.name if only_names else text(line.last, unit, decimals),
                "maximum": text(max(line.finite), unit, decimals),
                "share": line.last / (max(other.last for other in lines) or 1),
            }
            for line in (sorted(lines, key=lambda line: -max(line.finite)) if panel["type"] == "timeseries" else lines)
        ],
    }
    if panel["type"] == "timeseries" and lines:
        size = (panel["gridPos"]["w"] * COLUMN, (panel["gridPos"]["h"] - 2) * ROW)
        shown["size"] = size
        shown["charts"] = svg_data_urls(partial(draw_lines, panel, lines, looks, regions, time), size)
    elif panel["type"] not in ("timeseries", "stat", "bargauge"):
        raise UserError(f"panel '{panel['title']}' is a {panel['type']}, which cannot be drawn here")
    return shown


def draw_lines(
    panel: dict,
    lines: list[Line],
    looks: dict[str, Look],
    regions: list,
    time: Range,
    figure: Figure,
    palette: Palette,
) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    axes = figure.add_subplot()
    top = max(value for line in lines for value in line.finite)
    size, name = scale(defaults["unit"], defaults.get("max", top))
    for shade, start, end in regions:
        axes.axvspan(start, end, color=shade, alpha=0.10, linewidth=0)
    for line in lines:
        times, values = broken(line, time.step)
        values = [value / size for value in values]
        look = looks[line.name]
        axes.plot(times, values, color=look.colour, linestyle=look.style, linewidth=1.4)
        if len(times) == 1:
            axes.plot(times, values, "o", color=look.colour, markersize=3)
    axes.set_ylim(0, defaults.get("max", top * 1.08) / size or 1)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axes.set_ylabel(name)
    axes.set_xlim(time.start, time.end)
    max_ticks = panel["gridPos"]["w"] / 1.5  # as many labels as fit
    between = next((t for t in TICKS if (time.end - time.start) / t <= max_ticks), TICKS[-1])
    first = math.ceil(time.start / between) * between
    axes.set_xticks([first + n * between for n in range(int((time.end - first) / between) + 1)])
    form = "%H:%M:%S" if between < 60 else "%H:%M" if between < 86400 else "%d %b"
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{datetime.fromtimestamp(value, UTC):{form}}"))


def broken(line: Line, step: float) -> tuple[list[float], list[float]]:
    """Return the line's points, with a gap where some are missing."""
    times: list[float] = []
    values: list[float] = []
    for time, value in zip(line.series.times, line.series.values, strict=True):
        if times and time - times[-1] > 1.5 * step:
            times.append(time)
            values.append(math.nan)
        times.append(time)
        values.append(value)
    return times, values


@dataclass(frozen=True)
class Look:
    """The colour and the line style of a series on its panel."""

    colour: str
    style: str = STYLES[0]


def looks_of(panel: dict, names: list[str]) -> dict[str, Look]:
    """Return a look for each series: the panel's own colour, else one that no other series of the panel has.

    Bars and numbers stand beside their names, so only lines must differ.
    """
    looks = {name: Look(colour) for name in names if (colour := own_colour(panel, name))}
    taken = set(looks.values())
    free = (look for style in STYLES for look in (Look(colour, style) for colour in COLOURS) if look not in taken)
    return {name: looks.get(name) or next(free, Look(COLOURS[-1], STYLES[-1])) for name in names}


def own_colour(panel: dict, name: str) -> str | None:
    """Return the colour that the panel's overrides give a series."""
    for override in panel["fieldConfig"]["overrides"]:
        if re.search(override["matcher"]["options"].strip("/"), name):
            for setting in override["properties"]:
                if setting["id"] == "color":
                    return setting["value"]["fixedColor"]
    return None


def stat_colour(panel: dict, line: Line) -> str:
    """Return the colour by the panel's overrides, else by its thresholds, else the page's own."""
    if colour := own_colour(panel, line.name):
        return colour
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    reached = [step["color"] for step in steps if step["value"] is None or line.last >= step["value"]]
    return {"text": "inherit", "green": "#56a64b", "red": "#d64a4a"}[reached[-1]]
