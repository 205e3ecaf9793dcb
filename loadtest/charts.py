"""The figures of a report."""

from __future__ import annotations

from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from loadtest.statistics import Results, latencies, timed_samples
from loadtest.table import label
from loadtest.windows import Window
from triton_transformers.figures import Chart, Palette

# The share of the space between two ticks that the bars of all modes fill together.
BARS = 0.84


def all_charts(results: Results, windows: list[Window]) -> dict[str, Chart]:
    draw, title = (draw_p95, "p95") if results["settings"]["rate"] else (draw_throughput, "throughput")
    charts = {
        title: Chart(partial(draw, results, windows), (9.6, 2.9), (4.0, 2.8)),
        "latency": Chart(partial(draw_latency, results, windows), (4.7, 3.1), (4.0, 2.8)),
    }
    if results["generates"]:
        return charts | {"tokens": Chart(partial(draw_token_times, results), (4.7, 3.1), (4.0, 2.8))}
    bars = len(results["modes"]) * len(results["modes"]["dynamic"]["models"])
    return charts | {
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
        if window.generated:
            rate = window.generated.tokens_per_second
            axes.hlines(rate, window.start, window.end, color=palette.colour_of(window.mode), linewidth=2)
            continue
        count = max(1, round(window.end - window.start))
        edges = np.linspace(window.start, window.end, count + 1)
        responses, _ = np.histogram([s.at for s in window.samples if not s.error], edges)
        axes.stairs(responses / np.diff(edges), edges, color=palette.colour_of(window.mode), linewidth=1.4)
    axes.set(ylabel="tokens/s" if results["generates"] else "requests/s", xlabel="seconds since the start")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    add_legend(results, figure, palette)


def any_overloaded(results: Results) -> bool:
    """Return whether a window was overloaded. On a linear axis its latency would hide all others."""
    return any(figures.get("overloaded_windows") for figures in results["modes"].values())


def draw_p95(results: Results, windows: list[Window], figure: Figure, palette: Palette) -> None:
    """Draw the 95th percentile of the requests that arrived in each second."""
    axes = figure.add_subplot()
    for window in windows:
        axes.axvspan(window.start, window.end, color=palette.colour_of(window.mode), alpha=0.13, linewidth=0)
        count = max(1, round(window.end - window.start))
        edges = np.linspace(window.start, window.end, count + 1)
        samples = timed_samples(window)
        seconds = np.digitize([s.arrived for s in samples], edges[1:-1])
        milliseconds = np.array([s.latency_ms for s in samples])
        values = [np.percentile(milliseconds[seconds == n], 95) if n in seconds else np.nan for n in range(count)]
        axes.stairs(values, edges, color=palette.colour_of(window.mode), linewidth=1.4, baseline=None)
    axes.set(ylabel="p95, milliseconds", xlabel="seconds since the start")
    scale_latency(axes, "y", results)
    axes.margins(x=0.01)
    add_legend(results, figure, palette)


def draw_latency(results: Results, windows: list[Window], figure: Figure, palette: Palette) -> None:
    axes = figure.add_subplot()
    for mode in results["modes"]:
        milliseconds = np.sort(latencies([w for w in windows if w.mode == mode]))
        if not len(milliseconds):
            continue
        share = np.arange(1, len(milliseconds) + 1) / len(milliseconds) * 100
        axes.plot(milliseconds, share, color=palette.colour_of(mode), linewidth=1.6)
    axes.axhline(95, color=palette.ink, linewidth=0.7, linestyle=":")
    axes.set(xlabel="milliseconds", ylabel="% answered within")
    scale_latency(axes, "x", results)
    axes.set_ylim(0, 101)
    add_legend(results, figure, palette)


def scale_latency(axes: Axes, name: str, results: Results) -> None:
    """Scale the axis x or y of latencies, which are far apart if a mode was overloaded."""
    if any_overloaded(results):
        axes.set(**{f"{name}scale": "log"})
        getattr(axes, f"{name}axis").set_major_formatter(StrMethodFormatter("{x:g}"))
    else:
        axes.set(**{f"{name}lim": (0, None)})


def draw_token_times(results: Results, figure: Figure, palette: Palette) -> None:
    """Draw how long a text's first token takes, and each later one."""
    kinds = {"first_token_ms": "to the first token", "output_token_ms": "per later token"}
    for axes, (key, name) in zip(figure.subplots(2), kinds.items(), strict=True):
        modes = list(reversed(results["modes"]))
        times = [results["modes"][mode][key] for mode in modes]
        bars = axes.barh(range(len(modes)), [time or 0 for time in times], height=0.6)
        for bar, mode in zip(bars, modes, strict=True):
            bar.set_color(palette.colour_of(mode))
        axes.bar_label(bars, ["not counted" if time is None else f" {time:,.1f}" for time in times], fontsize=8)
        axes.set_yticks(range(len(modes)), [label(mode, results) for mode in modes])
        axes.set_xlabel(f"milliseconds {name}")
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.2)


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
        axes.plot([], [], color=palette.colour_of(mode), linewidth=4, label=label(mode, results))
    figure.legend(loc="outside upper right", ncols=len(results["modes"]), handlelength=1.2, columnspacing=1.2)
