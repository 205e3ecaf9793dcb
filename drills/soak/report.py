"""The files of a soak: soak.json, soak.html, and its charts as PNG, a small one for each series."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from drills.clients import ManyClients, Pace
from drills.harness import counted
from drills.soak.series import BY_PROCESS, ERROR_RATE, SAMPLE_S, SHORT, Series, first_judged, verdicts
from loadtest.machine import host
from triton_transformers.figures import PALETTES, Chart, Palette, images, write_charts
from triton_transformers.files import complete_folder, write_atomically, write_json
from triton_transformers.pages import page

# The content of soak.json.
Results = dict[str, Any]

LATEST = "latest-soak"
STACK = "stack"
HEIGHT = 1.35  # of a small chart, in inches
# The part of the axis that is shown, at least, as a share of the highest value.
MINIMUM_SPAN = 0.1
COLUMNS = ("", "start", "end", "slope per hour", "interval", "verdict")


def command(pace: Pace, minutes: float) -> str:
    """Return the command that repeats the soak."""
    return f"make drill SOAK={minutes:g} USERS={pace.clients} WAIT={pace.wait[0]:g},{pace.wait[1]:g} SEED={pace.seed}"


def results_of(
    pace: Pace, minutes: float, clients: ManyClients, series: Sequence[Series], seconds: float, began: datetime
) -> Results:
    """Return the content of soak.json, with a verdict on each series.

    `minutes` is how long the soak was to last, and `seconds` is when the last sample was taken.
    """
    return {
        "run": f"{began:%Y%m%dT%H%M%SZ}",
        "command": command(pace, minutes),
        "host": host(),
        "minutes": seconds / 60,
        "clients": pace.clients,
        "wait_s": pace.wait,
        "sample_s": SAMPLE_S,
        "judged_from_s": (first_judged(len(series[0].values)) + 1) * SAMPLE_S,
        "error_rate": ERROR_RATE,
        "requests": {"good": counted(clients.outcomes), "bad": counted(clients.refusals)},
        "good_by_route": dict(Counter(outcome.route for outcome in clients.outcomes)),
        "series": [verdict.as_json() for verdict in verdicts(series)],
    }


def complaints(results: Results) -> list[str]:
    """Return why the soak fails; without complaints its exit code is 0."""
    reasons = list(results["problems"])
    if results["stopped"]:
        reasons.append(f"{results['stopped']}; what was sampled until then is kept")
    if failing := [series["name"] for series in results["series"] if series["fails"]]:
        reasons.append(f"not flat: {', '.join(failing)}. A longer SOAK shows if that goes on")
    for kind, figures in results["requests"].items():
        wrong = {
            "failed": figures["failed_gateway"] + figures["failed_direct"],
            "wrong": figures["wrong"],
            "lost": figures["lost"],
        }
        if any(wrong.values()):
            numbers = ", ".join(f"{count} {name}" for name, count in wrong.items() if count)
            errors = sorted(figures["errors"].items(), key=lambda item: -item[1])[:3]
            messages = "; ".join(f"{count} x {text}" for text, count in errors)
            reasons.append(f"of {figures['requests']:,} {kind} requests {numbers}: {messages}")
    if not results["requests"]["good"]["requests"]:
        reasons.append("no request was sent: set a longer SOAK, more USERS, or a shorter WAIT")
    return reasons


def outcome(results: Results) -> str:
    if any(series["fails"] for series in results["series"]):
        return "not flat"
    return SHORT if any(series["outcome"] == SHORT for series in results["series"]) else "flat"


def headline(results: Results) -> str:
    good, bad = (results["requests"][kind]["requests"] for kind in ("good", "bad"))
    ends = {
        "flat": "Every series is flat.",
        "not flat": "Not every series is flat.",
        SHORT: "That is too short to judge a slope.",
    }
    return (
        f"In {results['minutes']:.3g} minutes, {results['clients']} clients sent {good:,} requests and {bad:,} bad "
        f"ones. {ends[outcome(results)]}"
    )


def number(value: float | None) -> str:
    """Return a figure with three digits; from 100 on with all digits before the point."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{float(f'{value:.3g}') + 0.0:g}"  # the sum turns -0 into 0


def cells(series: Results) -> list[str]:
    """Return a series' row of the table."""
    interval = series["interval_per_hour"]
    unit = f" {series['unit']}" if series["unit"] else ""
    return [
        series["name"],
        *(f"{number(series[key])}{unit}" if series[key] is not None else "" for key in ("start", "end")),
        number(series["slope_per_hour"]),
        f"{number(interval[0])} to {number(interval[1])}" if interval else "",
        series["outcome"],
    ]


def write(results: Results, reports: Path) -> str:
    """Write reports/<UTC time>-soak/, and return its path from the current folder."""
    target = reports / f"{results['run']}-soak"
    with complete_folder(target, LATEST) as work:
        write_json(results, work / "soak.json")
        charts = all_charts(results)
        write_charts(charts, work)
        content = page(
            "drills",
            "soak/soak.html.j2",
            inherits="loadtest",
            results=results,
            outcome=outcome(results),
            headline=headline(results),
            columns=COLUMNS,
            rows=[(series["fails"], cells(series)) for series in results["series"]],
            palettes=PALETTES,
            images=images(charts),
        )
        write_atomically(work / "soak.html", content)
    return os.path.relpath(target)


# --- charts -----------------------------------------------------------------------------------------------------------


def all_charts(results: dict[str, Any]) -> dict[str, Chart]:
    groups: dict[str, list[dict[str, Any]]] = {STACK: [s for s in results["series"] if not s["process"]]}
    for kind in BY_PROCESS:
        groups[kind.name] = [series for series in results["series"] if series["kind"] == kind.name]
    return {
        name: Chart(
            partial(draw, results, group),
            (9.6, 0.3 + HEIGHT * math.ceil(len(group) / 2)),
            (4.0, 0.3 + HEIGHT * len(group)),
        )
        for name, group in groups.items()
        if group
    }


def draw(results: dict[str, Any], group: list[dict[str, Any]], figure: Figure, palette: Palette) -> None:
    columns = 2 if figure.get_figwidth() > 6 else 1
    grid = figure.subplots(math.ceil(len(group) / columns), columns, sharex=True, squeeze=False)
    places = list(grid.flat)
    for axes, series in zip(places, group, strict=False):
        draw_series(results, series, axes, palette)
    for axes in places[len(group) :]:
        axes.set_axis_off()
    for axes in places[max(0, len(group) - columns) : len(group)]:
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("minutes")


def draw_series(results: dict[str, Any], series: dict[str, Any], axes: Axes, palette: Palette) -> None:
    """Draw the samples, those of the warm-up shaded, and the slope that was judged."""
    values = np.array([math.nan if value is None else value for value in series["values"]])
    minutes = np.arange(1, len(values) + 1) * results["sample_s"] / 60
    colour = palette.none if series["fails"] else palette.dynamic
    axes.axvspan(0, results["judged_from_s"] / 60, color=palette.ink, alpha=0.06, linewidth=0)
    axes.plot(minutes, values, color=colour, linewidth=1.2)
    if series["slope_per_hour"] is not None:
        ends = np.array([results["judged_from_s"] / 60, minutes[-1]])
        middle = float(np.nanmean(values[minutes >= ends[0]]))
        line = middle + series["slope_per_hour"] * (ends - ends.mean()) / 60
        axes.plot(ends, line, color=palette.ink, linewidth=0.9, linestyle="--")
    unit = f", {series['unit']}" if series["unit"] else ""
    axes.set_title(f"{series['process'] or series['kind']}{unit}", fontsize=9, loc="left", color=palette.ink)
    axes.set_title(series["outcome"], fontsize=8, loc="right", color=colour if series["fails"] else palette.quiet)
    axes.set_xlim(0, max(float(minutes[-1]), results["judged_from_s"] / 60) if len(minutes) else 1)
    counted = not series["unit"]
    scale(axes, values[np.isfinite(values)], 2.0 if counted else 0.0)
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=counted))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))


def scale(axes: Axes, values: np.ndarray[Any, Any], minimum: float) -> None:
    """Show at least `minimum` of the axis, and at least MINIMUM_SPAN of the level, so that a flat line looks flat."""
    if not len(values):
        return
    low, high = float(values.min()), float(values.max())
    span = max(high - low, MINIMUM_SPAN * high, minimum) * 1.2
    bottom = max(0.0, (low + high - span) / 2)
    axes.set_ylim(bottom, bottom + span)
