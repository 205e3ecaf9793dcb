"""The report's figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from loadtest.switching import MODES
from loadtest.windows import Window
from scripts.common.figures import Palette

LABELS = {"none": "no batching", "dynamic": "dynamic batching"}


@dataclass(frozen=True)
class Plot:
    draw: Callable[[Figure, Palette], None]
    size: tuple[float, float]


def all_plots(found: dict, windows: list[Window]) -> dict[str, Plot]:
    return {
        "throughput": Plot(partial(draw_throughput, windows), (9.6, 2.9)),
        "latency": Plot(partial(draw_latency, windows), (4.7, 3.1)),
        "batches": Plot(partial(draw_batches, found), (4.7, 3.1)),
        "time": Plot(partial(draw_time, found), (9.6, 2.2)),
    }


def draw_throughput(windows: list[Window], figure: Figure, palette: Palette) -> None:
    axes = figure.add_subplot()
    for window in windows:
        axes.axvspan(window.start, window.end, color=palette.of(window.mode), alpha=0.13, linewidth=0)
        count = max(1, round(window.end - window.start))
        edges = np.linspace(window.start, window.end, count + 1)
        answered, _ = np.histogram([s.at for s in window.samples if not s.error], edges)
        axes.stairs(answered / np.diff(edges), edges, color=palette.of(window.mode), linewidth=1.4)
    for mode in MODES:
        axes.plot([], [], color=palette.of(mode), linewidth=4, label=LABELS[mode])
    axes.set(ylabel="requests/s", xlabel="seconds since the start; between windows: switching and warming up")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    figure.legend(loc="outside upper right", ncols=2)


def draw_latency(windows: list[Window], figure: Figure, palette: Palette) -> None:
    axes = figure.add_subplot()
    for mode in MODES:
        latencies = np.sort([s.latency_ms for w in windows if w.mode == mode for s in w.samples if not s.error])
        if not len(latencies):
            continue
        share = np.arange(1, len(latencies) + 1) / len(latencies) * 100
        axes.plot(latencies, share, color=palette.of(mode), linewidth=1.6, label=LABELS[mode])
    axes.axhline(95, color=palette.ink, linewidth=0.7, linestyle=":")
    axes.set(xlabel="milliseconds", ylabel="% of requests answered within")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 101)
    axes.legend(loc="lower right")


def draw_batches(found: dict, figure: Figure, palette: Palette) -> None:
    """How many examples ran in batches of each size: what an example met, not what an execution was."""
    axes = figure.add_subplot()
    largest = 1
    for mode, offset in zip(MODES, (-0.22, 0.22), strict=True):
        batches = {int(size): n for size, n in found["modes"][mode]["models"][found["model"]]["batches"].items()}
        examples = sum(size * n for size, n in batches.items()) or 1
        largest = max(largest, *batches)
        axes.bar(
            [size + offset for size in batches],
            [size * n / examples * 100 for size, n in batches.items()],
            width=0.44,
            color=palette.of(mode),
            label=f"{LABELS[mode]}, mean {found['modes'][mode]['mean_batch']:.2f}",
        )
    axes.set(xlabel=f"{found['noun']} in the batch ({found['model']})", ylabel=f"% of {found['noun']}")
    axes.set_xlim(0, largest + 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="upper right")


def draw_time(found: dict, figure: Figure, palette: Palette) -> None:
    """Where a request's time in Triton goes, model by model: waiting in its queue, being computed."""
    axes = figure.add_subplot()
    bars = [(mode, name) for mode in MODES[::-1] for name in reversed(found["modes"][mode]["models"])]
    for y, (mode, name) in enumerate(bars):
        model = found["modes"][mode]["models"][name]
        axes.barh(y, model["queue_ms"], color=palette.of(mode), alpha=0.35, height=0.7)
        axes.barh(y, model["compute_ms"], left=model["queue_ms"], color=palette.of(mode), height=0.7)
        label = f" {model['queue_ms']:.1f} + {model['compute_ms']:.1f}"
        axes.text(model["queue_ms"] + model["compute_ms"], y, label, va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), [f"{name}, {LABELS[mode]}" for mode, name in bars])
    axes.set_xlabel("milliseconds a request: waiting in the queue (pale) + computing (full)")
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.12)
