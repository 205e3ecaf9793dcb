"""Draw a dashboard as HTML: the panels with data, in Grafana's order, with the same unit, legend and numbers."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from monitoring.drawing.charts import MODE_COLOURS, Palette, svg_data_urls
from monitoring.drawing.evaluate import Evaluator, Line, Range, Region, rows
from triton_transformers.pages import page
from triton_transformers.prometheus import Prometheus
from triton_transformers.settings import UserError

# Grafana's columns. A column and a row, in inches of a figure on a page 1240 points wide.
COLUMNS = 24
# Charts in a line, at most.
CHARTS = 3
COLUMN, ROW = 0.5, 0.36
PHONE = (4.0, 2.2)
# The colours of every series that is no mode.
COLOURS = ("#8057c9", "#b8860b", "#c2478b", "#5d8a3a", "#d64a4a", "#4a9fb8", "#7c6f5a", "#9aa832", "#c98ab8")
# A graph names this many lines, the largest. The others are thin and grey.
NAMED = 5
TICKS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800]
# Unit -> (size, name) in rising order. A value is shown in the largest size that is not above it.
SCALES: dict[str, list[tuple[float, str]]] = {
    "s": [(1e-6, "µs"), (1e-3, "ms"), (1, "s")],  # of latencies, which nobody compares in minutes
    "bytes": [(2.0 ** (10 * n), unit) for n, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))],
    "watt": [(1, "W"), (1000, "kW")],
    "joule": [(1e-3, "mJ"), (1, "J"), (1000, "kJ")],
    "none": [(1, "")],
}


def draw(
    prometheus: Prometheus, dashboard: dict[str, Any], time: Range, chosen: dict[str, str] | None = None
) -> Markup:
    evaluator = Evaluator(prometheus, dashboard, time, chosen)
    regions = evaluator.regions()
    shown: dict[str, list[list[dict[str, Any]]]] = {}
    left_out: dict[str, list[str]] = {}
    for title, panels in rows(dashboard):
        lines_of = {panel["title"]: evaluator.lines(panel) for panel in panels}
        reasons = {panel["title"]: why_empty(panel, lines_of[panel["title"]]) for panel in panels}
        filled = [panel for panel in panels if not reasons[panel["title"]]]
        if filled:
            shown[title] = [
                [drawn(panel, lines_of[panel["title"]], regions, time, COLUMNS / len(line)) for panel in line]
                for line in arranged(filled)
            ]
        if title and not filled:  # one reason is enough
            reasons = {f"the row {title}": next(iter(reasons.values()))}
        for name, reason in reasons.items():
            if reason:
                left_out.setdefault(reason, []).append(name)
    return page("monitoring.drawing", "dashboard.html.j2", rows=shown, left_out=left_out)


def why_empty(panel: dict[str, Any], lines: list[Line]) -> str:
    """Return why there is nothing to draw, empty if there is something. A graph of zeros shows nothing."""
    defaults = panel["fieldConfig"]["defaults"]
    if not lines:
        return str(defaults["noValue"])
    if panel["type"] == "timeseries" and not any(differs_from_zero(line, defaults) for line in lines):
        return f"Always {text(0, defaults['unit'], defaults.get('decimals'))}"
    return ""


def differs_from_zero(line: Line, defaults: dict[str, Any]) -> bool:
    unit, decimals = defaults["unit"], defaults.get("decimals")
    return text(largest(line), unit, decimals) != text(0, unit, decimals)


def arranged(panels: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the panels in lines, which they share equally: charts in lines of at most CHARTS, others as in Grafana."""
    lines: list[list[dict[str, Any]]] = []
    for is_chart, group in groupby(panels, key=lambda panel: panel["type"] == "timeseries"):
        same = [*group]
        if is_chart:
            count = math.ceil(len(same) / CHARTS)
            lines += [same[len(same) * n // count : len(same) * (n + 1) // count] for n in range(count)]
        else:
            lines += [[*line] for _, line in groupby(same, key=lambda panel: panel["gridPos"]["y"])]
    return lines


def drawn(panel: dict[str, Any], lines: list[Line], regions: list[Region], time: Range, width: float) -> dict[str, Any]:
    """Return what the template needs to show a panel."""
    defaults = panel["fieldConfig"]["defaults"]
    unit, decimals = defaults["unit"], defaults.get("decimals")
    shown = {"title": panel["title"], "description": panel["description"], "type": panel["type"], "width": width}
    if panel["type"] == "timeseries":
        lines = [line for line in lines if differs_from_zero(line, defaults)]
        lines.sort(key=largest, reverse=True)
        named, others = lines[:NAMED], lines[NAMED:]
        colours = colours_of(panel, sorted(line.name for line in named))
        shown["values"] = [
            {
                "name": line.name.removesuffix(", as configured"),  # no comparison runs
                "colour": colours[line.name],
                "maximum": text(largest(line), unit, decimals),
            }
            for line in named
        ]
        if others:
            name = f"{len(others)} other{'s' if len(others) > 1 else ''}"
            maximum = text(largest(others[0]), unit, decimals)
            shown["values"].append({"name": name, "colour": "var(--faint)", "maximum": maximum})
        shown["sizes"] = {"wide": (width * COLUMN, (panel["gridPos"]["h"] - 2) * ROW), "narrow": PHONE}
        drawing = partial(draw_lines, panel, lines, colours, regions, time)
        shown["charts"] = {form: svg_data_urls(drawing, size) for form, size in shown["sizes"].items()}
    elif panel["type"] in ("stat", "bargauge"):
        only_names = panel.get("options", {}).get("textMode") == "name"
        colours = colours_of(panel, sorted({line.name for line in lines}))
        shown["values"] = [
            {
                "name": line.name,
                "colour": colours[line.name] if panel["type"] == "bargauge" else stat_colour(panel, line),
                "text": line.name if only_names else text(line.last, unit, decimals),
                "share": line.last / (max(other.last for other in lines) or 1),
            }
            for line in lines
        ]
    else:
        raise UserError(f"panel '{panel['title']}' is a {panel['type']}, which cannot be drawn here")
    return shown


def largest(line: Line) -> float:
    return max(line.finite)


def draw_lines(
    panel: dict[str, Any],
    lines: list[Line],
    colours: dict[str, str],
    regions: list[Region],
    time: Range,
    figure: Figure,
    palette: Palette,
) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    axes = figure.add_subplot()
    top = largest(lines[0])
    size, name = scale(defaults["unit"], defaults.get("max", top))
    for shade, start, end in regions:
        axes.axvspan(start, end, color=shade, alpha=0.10, linewidth=0)
    for line in reversed(lines):  # the largest over the others
        times, values = broken(line, time.step)
        values = [value / size for value in values]
        colour, width = (colours[line.name], 1.4) if line.name in colours else (palette.quiet, 0.7)
        axes.plot(times, values, color=colour, linewidth=width)
        axes.plot(*alone(times, values), "o", color=colour, markersize=3)
    axes.set_ylim(0, defaults.get("max", top * 1.08) / size or 1)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axes.set_ylabel(name)
    axes.set_xlim(time.start, time.end)
    max_ticks = figure.get_figwidth() / COLUMN / 1.5  # as many labels as fit
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


def alone(times: list[float], values: list[float]) -> tuple[list[float], list[float]]:
    """Return the points without a neighbour, which no line shows."""
    padded = [math.nan, *values, math.nan]
    points = [
        (time, value)
        for time, before, value, after in zip(times, padded, values, padded[2:], strict=False)
        if math.isnan(before) and math.isnan(after)
    ]
    return [time for time, _ in points], [value for _, value in points]


def colours_of(panel: dict[str, Any], names: list[str]) -> dict[str, str]:
    """Return a colour for each series: the panel's own, its mode's, or one that no other has, if any is left."""
    own = {name: colour for name in names if (colour := own_colour(panel, name))}
    for name in names:
        mode = MODE_COLOURS.get(name.rpartition(", ")[2])
        if mode and mode not in own.values():
            own.setdefault(name, mode)
    free = (colour for colour in COLOURS if colour not in own.values())
    return {name: own.get(name) or next(free, COLOURS[-1]) for name in names}


def own_colour(panel: dict[str, Any], name: str) -> str | None:
    """Return the colour that the panel's overrides give a series."""
    for override in panel["fieldConfig"]["overrides"]:
        if re.search(override["matcher"]["options"].strip("/"), name):
            for setting in override["properties"]:
                if setting["id"] == "color":
                    return str(setting["value"]["fixedColor"])
    return None


def stat_colour(panel: dict[str, Any], line: Line) -> str:
    """Return the colour by the panel's overrides, else by its thresholds, else the page's own."""
    if colour := own_colour(panel, line.name):
        return colour
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    reached = [step["color"] for step in steps if step["value"] is None or line.last >= step["value"]]
    return {"text": "inherit", "green": "#56a64b", "red": "#d64a4a"}[reached[-1]]


# --- numbers with their units, as Grafana formats them, except that seconds stay seconds ------------------------------


def scale(unit: str, largest: float) -> tuple[float, str]:
    """Return (divisor, name) for values up to this one, on an axis or alone."""
    if unit == "percentunit":
        return 0.01, "%"
    if unit.startswith("suffix:"):
        return 1, unit.removeprefix("suffix:").strip()
    if unit not in SCALES:
        raise UserError(f"unknown unit '{unit}'; known are percentunit, suffix:..., {', '.join(SCALES)}")
    fitting = [(size, name) for size, name in SCALES[unit] if size <= abs(largest)]
    # Zero is shown in the plain unit.
    return fitting[-1] if fitting else next((size, name) for size, name in SCALES[unit] if size >= 1 or largest)


def text(value: float, unit: str, decimals: int | None = None) -> str:
    if not math.isfinite(value):
        return "-"
    size, name = scale(unit, value)
    shown = value / size
    if decimals is None:
        decimals = 0 if shown == 0 or abs(shown) >= 100 else 1 if abs(shown) >= 10 else 2
        number = f"{shown:.{decimals}f}"
        number = number.rstrip("0").rstrip(".") if "." in number else number
    else:
        number = f"{shown:.{decimals}f}"
    return f"{number}{'' if name in ('%', '') else ' '}{name}"
