"""The charts of a soak: a small chart for each series, by kind."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from drills.soak.series import BY_PROCESS
from triton_transformers.figures import Chart, Palette

STACK = "stack"
HEIGHT = 1.35  # of a small chart, in inches
# The part of the axis that is shown, at least, as a share of the highest value.
MINIMUM_SPAN = 0.1


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
