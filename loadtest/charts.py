"""The figures of a report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from loadtest.statistics import Results
from loadtest.table import label
from loadtest.windows import Window
from scripts.common.figures import Palette

# The share of the space between two ticks that the bars of all modes fill together.
BARS = 0.84


@dataclass(frozen=True)
class Chart:
    """A figure, and its size in inches on a wide page and on a phone."""

    draw: Callable[[Figure, Palette], None]
    wide: tuple[float, float]
    narrow: tuple[float, float]


def all_charts(results: Results, windows: list[Window]) -> dict[str, Chart]:
    bars = len(results["modes"]) * len(results["modes"]["dynamic"]["models"])
    return {
        "throughput": Chart(partial(draw_throughput, results, windows), (9.6, 2.9), (4.0, 2.8)),
        "latency": Chart(partial(draw_latency, results, windows), (4.7, 3.1), (4.0, 2.8)),
        "batches": Chart(partial(draw_batches, results), (4.7, 3.1), (4.0, 2.8)),
        "time": Chart(partial(draw_time, results), (9.6, 0.9 + 0.3 * bars), (4.0, 1.2 + 0.3 * bars)),
    }


def offsets(results: Results) -> list[tuple[str, float]]:
    """Return each mode with the place of its bar beside a tick; bars are BARS / modes wide."""
    modes = list(results["modes"])
    return [(mode, BARS * ((number + 0.5) / len(modes) - 0.5)) for number, mode in enumerate(modes)]


def draw_throughput(results: Results, windows: list[Window], figure: Figure, palette: Palette) -> None:
    axes = figure.add_subplot()
    for window in windows:
        axes.axvspan(window.start, window.end, color=palette.colour_of(window.mode), alpha=0.13, linewidth=0)
        count = max(1, round(window.end - window.start))
        edges = np.linspace(window.start, window.end, count + 1)
        responses, _ = np.histogram([s.at for s in window.samples if not s.error], edges)
        axes.stairs(responses / np.diff(edges), edges, color=palette.colour_of(window.mode), linewidth=1.4)
    axes.set(ylabel="requests/s", xlabel="seconds since the start")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    add_legend(results, figure, palette)


def draw_latency(results: Results, windows: list[Window], figure: Figure, palette: Palette) -> None:
    axes = figure.add_subplot()
    for mode in results["modes"]:
        latencies = np.sort([s.latency_ms for w in windows if w.mode == mode for s in w.samples if not s.error])
        if not len(latencies):
            continue
        share = np.arange(1, len(latencies) + 1) / len(latencies) * 100
        axes.plot(latencies, share, color=palette.colour_of(mode), linewidth=1.6)
    axes.axhline(95, color=palette.ink, linewidth=0.7, linestyle=":")
    axes.set(xlabel="milliseconds", ylabel="% answered within")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 101)
    add_legend(results, figure, palette)


def draw_batches(results: Results, figure: Figure, palette: Palette) -> None:
    """Draw the share of examples by the size of the batch that each ran in."""
    axes = figure.add_subplot()
    largest = 1
    for mode, offset in offsets(results):
        batches = {int(size): n for size, n in results["modes"][mode]["models"][results["model"]]["batches"].items()}
        examples = sum(size * n for size, n in batches.items()) or 1
        largest = max([largest, *batches])
        axes.bar(
            [size + offset for size in batches],
            [size * n / examples * 100 for size, n in batches.items()],
            width=BARS / len(results["modes"]),
            color=palette.colour_of(mode),
        )
    axes.set(xlabel=f"{results['noun']} in the batch ({results['model']})", ylabel=f"% of {results['noun']}")
    axes.set_xlim(0, largest + 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    add_legend(results, figure, palette)


def draw_time(results: Results, figure: Figure, palette: Palette) -> None:
    """Draw where a request spends its time in Triton: in each model's queue (pale) and being computed (full)."""
    axes = figure.add_subplot()
    names = list(reversed(results["modes"]["dynamic"]["models"]))
    height = BARS / len(results["modes"]) * 0.9
    for mode, offset in offsets(results):
        for y, name in enumerate(names):
            model = results["modes"][mode]["models"][name]
            queue, compute = model["queue_ms"], model["compute_ms"]
            axes.barh(y - offset, queue, color=palette.colour_of(mode), alpha=0.35, height=height)
            axes.barh(y - offset, compute, left=queue, color=palette.colour_of(mode), height=height)
            axes.text(queue + compute, y - offset, f" {queue:.1f} + {compute:.1f}", va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("milliseconds per request: waiting + computing")
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.2)
    add_legend(results, figure, palette)


def add_legend(results: Results, figure: Figure, palette: Palette) -> None:
    (axes,) = figure.axes
    for mode in results["modes"]:
        axes.plot([], [], color=palette.colour_of(mode), linewidth=4, label=label(mode, results["triton"]["cores"]))
    figure.legend(loc="outside upper right", ncols=len(results["modes"]), handlelength=1.2, columnspacing=1.2)
