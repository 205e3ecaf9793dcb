"""The files of a search's report: tune.json, the winner's files, the figures, and tune.html with all of it."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from loadtest.measure.statistics import Results, half_width
from loadtest.measure.verdicts import PROVEN, also
from loadtest.tune import table
from loadtest.tune.goal import LATEST, WINNER
from loadtest.tune.table import AS_CONFIGURED, LIKELY, Arm, cut, number, winner_name
from monitoring.drawing.charts import PALETTES, Chart, Palette, images, write_charts
from triton_transformers.files import complete_folder, write_atomically, write_json
from triton_transformers.pages import page

Point = tuple[float, float]
Values = list[float]

# Candidates below this ratio would squeeze all others together: they are an arrow at the edge, with the number.
LOWEST_RATIO = 0.6
# A try that takes this many times the target is drawn as overloaded, for the same reason.
OVERLOADED = 8
# Characters of a candidate's label.
LABEL = 46
# Points of candidates that are neither the original nor the winner.
PALE = 0.35


def write(result: Results, reports: Path) -> Path:
    """Write reports/<UTC time>-<system>-tune/, and point reports/latest-tune at it if it is complete."""
    target = reports / f"{result['run']}-{result['system']}-tune"
    with complete_folder(target, LATEST) as work:
        write_json(result, work / "tune.json")
        if result["verdict"]["word"] == PROVEN:
            for name, text in result["files"].items():
                (file := work / WINNER / name).parent.mkdir(parents=True)
                write_atomically(file, text)
        charts = all_charts(result)
        write_charts(charts, work)
        write_atomically(work / "tune.html", html(result, charts))
    return target


def html(result: Results, charts: dict[str, Chart]) -> str:
    return page(
        "loadtest",
        "tune/tune.html.j2",
        results=result,
        sentence=table.sentence(result),
        goal_text=table.goal(result),
        also=also(result["verdict"]),
        columns=table.columns(result),
        rows=table.rows(result),
        confirmation=len(table.confirmation_rows(result)),
        failures=table.failures(result),
        notes=table.notes(result),
        palettes=PALETTES,
        images=images(charts),
    )


def all_charts(results: Results) -> dict[str, Chart]:
    rows = len(results["arms"]) + 2 * bool(results["confirmation"])
    draw = draw_latencies if "rate" in results["goal"] else draw_plane
    return {
        "latency": Chart(partial(draw, results), (9.6, 4.4), (4.0, 3.8)),
        "candidates": Chart(partial(draw_ratios, results), (9.6, 1.0 + 0.26 * rows), (4.0, 1.3 + 0.4 * rows)),
    }


def draw_plane(results: Results, figure: Figure, palette: Palette) -> None:
    """Draw the p95 at every rate that was tried, and where the original and the winner meet the target."""
    axes = figure.add_subplot()
    target = results["goal"].get("p95_ms") or results["goal"]["first_token_ms"]
    configurations = highlighted(results, palette)
    points: list[Point] = []
    rates: list[float] = []
    overloaded = False
    for probes, colour, alpha in [
        *((arm["probes"], palette.ink, PALE) for arm in results["arms"]),
        *((arm["probes"], colour, 0.7) for _, arm, colour in configurations),
    ]:
        measured = [(rate, p95) for rate, p95 in probes if p95 is not None and p95 <= OVERLOADED * target]
        too_fast = [rate for rate, p95 in probes if p95 is None or p95 > OVERLOADED * target]
        style: dict[str, Any] = {"color": colour, "alpha": alpha, "markeredgewidth": 0, "zorder": 2 + alpha}
        axes.plot(*columns(measured), "o", markersize=4, **style)
        axes.plot(too_fast, [0.98] * len(too_fast), "^", markersize=5, transform=axes.get_xaxis_transform(), **style)
        points += measured
        rates += [rate for rate, _ in measured] + too_fast
        overloaded |= bool(too_fast)
    axes.axhline(target, color=palette.ink, linewidth=0.9, linestyle=":")
    axes.annotate(
        f"p95 {target:g} ms", (1, target), (0, 3), xycoords=axes.get_yaxis_transform(), textcoords="offset points",
        ha="right", fontsize=8,
    )  # fmt: skip
    for _, arm, colour in configurations:
        draw_interval(axes, arm["values"], target, colour)
    latencies = [target, *(p95 for _, p95 in points)]
    axes.set_yscale("log")
    axes.set_ylim(min(latencies) * 0.8, max(latencies) * 1.5)
    # An interval of measurements that disagree would leave no room for the points.
    axes.set_xlim(*ends(rates))
    plain_ticks(axes)
    axes.set(xlabel="requests/s", ylabel="p95, milliseconds")
    handles = configuration_handles(results, palette, overloaded)
    if points:
        axes.step(*columns(pareto_front(points)), where="pre", color=palette.instances, linewidth=1.2)
        handles.append(Line2D([], [], color=palette.instances, linewidth=1.2, label="best of all (Pareto front)"))
    add_legend(figure, handles)


def draw_latencies(results: Results, figure: Figure, palette: Palette) -> None:
    """Draw the p95 of every round at the target rate, for the candidates in the order in which they were tried."""
    axes = figure.add_subplot()
    original, arms = results["original"], results["arms"]
    draw_rounds(axes, 0, original["values"], palette.none)
    for place, arm in enumerate(arms, 1):
        draw_rounds(axes, place, arm["values"], palette.ink, PALE)
    end = len(arms) + 1
    axes.set_xticks(range(0, end, math.ceil(end / (20 if is_wide(figure) else 8))))
    axes.set_xlim(-0.8, end - 0.2)
    if results["confirmation"]:
        width = max(3.0, end / (6 if is_wide(figure) else 3))  # for the text
        axes.axvspan(end, end + width, color=palette.ink, alpha=0.06, linewidth=0)
        axes.set_xlim(right=end + width)
        for share, (_, arm, colour) in zip((0.3, 0.7), highlighted(results, palette), strict=True):
            draw_rounds(axes, end + share * width, arm["values"], colour)
            draw_interval(axes, arm["values"], end + (share + 0.1) * width, colour, vertical=True)
        axes.annotate(
            "measured again", (end + width / 2, 1), (0, -10), xycoords=axes.get_xaxis_transform(),
            textcoords="offset points", ha="center", fontsize=8,
        )  # fmt: skip
    axes.set_yscale("log")
    shown = [original, *arms, *(arm for _, arm, _ in highlighted(results, palette))]
    measured = [value for arm in shown for value in arm["values"]] or [1.0, 1000.0]
    axes.set_ylim(min(measured) * 0.85, max(measured) * 1.25)
    plain_ticks(axes)
    axes.set_xlabel("candidate, in the order tried (0: as configured)")
    axes.set_ylabel(f"p95 at {results['goal']['rate']:g} requests/s, milliseconds")
    add_legend(figure, configuration_handles(results, palette))


def draw_ratios(results: Results, figure: Figure, palette: Palette) -> None:
    """Draw the ratio of each candidate to the best one before it, and of the winner to the original at the end."""
    axes = figure.add_subplot()
    wide = is_wide(figure)
    colours = outcome_colours(palette)
    rows: list[tuple[float, str, Arm, str]]
    rows = [(place, arm["label"], arm, colours[arm["outcome"]]) for place, arm in enumerate(results["arms"])]
    again = results["confirmation"]
    if again:
        place = len(rows) + 0.6
        colour = colours["better" if results["verdict"]["word"] == PROVEN else "not proven"]
        rows.append((place, f"{winner_name(results)}, measured again", again, colour))
        axes.axhline(place - 0.8, color=palette.ink, linewidth=0.7)
    axes.axvline(1, color=palette.ink, linewidth=0.9)
    edge = axes.get_yaxis_transform()
    for place, label, arm, colour in rows:
        if not wide:
            box = {"facecolor": palette.paper, "linewidth": 0, "pad": 1}
            axes.text(0, place - 0.3, cut(label, LABEL), transform=edge, fontsize=8, va="center", bbox=box)
        y, size = place if wide else place + 0.15, 7 if arm is again else 5
        if arm["ratio"] is None:
            axes.text(1.005, y, arm["outcome"], va="center", fontsize=8, color=colour)
        elif arm["ratio"] < LOWEST_RATIO:
            axes.plot(0.008, y, "<", color=colour, markersize=size, transform=edge)
            axes.text(0.02, y, number(arm["ratio"]), color=colour, va="center", fontsize=8, transform=edge)
        else:
            bounds = arm["ci95"] or []
            axes.plot(bounds, [y] * len(bounds), color=colour, linewidth=size / 2.5, solid_capstyle="butt")
            fill = palette.paper if arm.get("outcome") == LIKELY else colour
            axes.plot(arm["ratio"], y, "o", color=colour, markerfacecolor=fill, markersize=size)
    axes.set_xscale("log")
    axes.set_xlim(*ratio_limits([arm for _, _, arm, _ in rows]))
    axes.xaxis.set_major_locator(MaxNLocator(6 if wide else 4, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", which="minor", length=0)
    axes.set_yticks([place for place, *_ in rows] if wide else [], [cut(row[1], LABEL) for row in rows] if wide else [])
    axes.set_ylim(max([0, *(place for place, *_ in rows)]) + 0.6, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("ratio to the best before it; above 1 is better")
    present = {arm["outcome"] for arm in results["arms"] if arm["ratio"] is not None}
    fills = {LIKELY: palette.paper}
    add_legend(figure, [dot(c, name, fill=fills.get(name, "")) for name, c in colours.items() if name in present])


def highlighted(results: Results, palette: Palette) -> list[tuple[str, Arm, str]]:
    """Return the original and the winner: label, measurements (the fresh ones, if there are any) and colour."""
    winner, again = results["winner"], results["confirmation"] or {}
    shown = [("original", AS_CONFIGURED, results["original"], palette.none)]
    if winner:
        shown.append(("winner", winner_name(results), winner, palette.dynamic))
    return [(label, arm | {"values": again.get(key) or arm["values"]}, colour) for key, label, arm, colour in shown]


def outcome_colours(palette: Palette) -> dict[str, str]:
    return {
        "better": palette.dynamic,
        LIKELY: palette.dynamic,
        "not better": palette.none,
        "not proven": palette.quiet,
        "failed": palette.quiet,
    }


def configuration_handles(results: Results, palette: Palette, overloaded: bool = False) -> list[Line2D]:
    """Return the legend's entries for the original, the winner, all others, and tries that overloaded the server."""
    handles = [dot(colour, label) for label, _, colour in highlighted(results, palette)]
    if results["arms"]:
        handles.append(dot(palette.ink, "other candidates", alpha=PALE))
    if overloaded:
        handles.append(dot(palette.ink, "overloaded", marker="^", alpha=PALE))
    return handles


def dot(colour: str, label: str, marker: str = "o", alpha: float = 1, fill: str = "") -> Line2D:
    style: dict[str, Any] = {"color": colour, "markerfacecolor": fill or colour, "alpha": alpha}
    return Line2D([], [], linestyle="", marker=marker, markersize=5, label=label, **style)


def add_legend(figure: Figure, handles: list[Line2D]) -> None:
    if handles:
        count = len(handles) if is_wide(figure) else 2
        figure.legend(handles=handles, loc="outside upper right", ncols=count, handlelength=1.2, columnspacing=1.2)


def is_wide(figure: Figure) -> bool:
    return figure.get_figwidth() > 6


def ends(values: list[float]) -> tuple[float, float]:
    """Return the ends of an axis that has all values and a little room."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = 0.04 * (high - low) or 0.1 * high
    return low - room, high + room


def columns(points: list[Point]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def pareto_front(points: list[Point]) -> list[Point]:
    """Return the points that no other beats in both rate and latency, by rising rate."""
    front: list[Point] = []
    for rate, p95 in sorted(points, key=lambda point: (-point[0], point[1])):
        if not front or p95 < front[-1][1]:
            front.append((rate, p95))
    return front[::-1]


def draw_interval(axes: Axes, values: Values, at: float, colour: str, vertical: bool = False) -> None:
    """Draw the mean of a configuration's rounds with its 95 % interval, if there are at least two."""
    logs = [math.log(value) for value in values]
    if len(logs) < 2:
        return
    middle, half = sum(logs) / len(logs), half_width(logs)
    low, mean, high = (math.exp(value) for value in (middle - half, middle, middle + half))
    error = [[mean - low], [high - mean]]
    bar: dict[str, Any] = {"fmt": "none", "ecolor": colour, "capsize": 6, "capthick": 2, "elinewidth": 2, "zorder": 4}
    x, y = (at, mean) if vertical else (mean, at)
    axes.errorbar(x, y, xerr=None if vertical else error, yerr=error if vertical else None, **bar)
    # The edge sets the diamond off from the tries around it.
    axes.plot(x, y, "D", color=colour, markeredgecolor=axes.get_facecolor(), markersize=8, zorder=5)


def draw_rounds(axes: Axes, place: float, values: Values, colour: str, alpha: float = 0.8) -> None:
    """Draw a configuration's p95 in each round."""
    style: dict[str, Any] = {"color": colour, "alpha": alpha, "markersize": 5, "markeredgewidth": 0}
    axes.plot([place] * len(values), values, "o", **style)


def ratio_limits(arms: list[Arm]) -> tuple[float, float]:
    """Return the ends of the axis, which contain 1, the ratios and, within reason, the intervals."""
    ratios = [arm["ratio"] for arm in arms if arm["ratio"]]
    bounds = [bound for arm in arms for bound in arm["ci95"] or ()]
    low, high = min([0.93, *ratios, *bounds]), max([1.07, *ratios])
    return max(low, LOWEST_RATIO) * 0.98, min(max([high, *bounds]), high * 1.5) * 1.02


def plain_ticks(axes: Axes) -> None:
    """Label a logarithmic axis with plain numbers: 50, 100, 200."""
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="y", which="minor", length=0)
