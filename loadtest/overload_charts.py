"""The figure of an overload: latency, refusals and recovery over time."""

from __future__ import annotations

from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from loadtest.statistics import Results
from triton_transformers.figures import Chart, Palette


def all_charts(results: Results) -> dict[str, Chart]:
    return {"overload": Chart(partial(draw_overload, results), (9.6, 5.4), (4.0, 5.4))}


def draw_overload(results: Results, figure: Figure, palette: Palette) -> None:
    """Draw latency above, and what became of the requests below, from the overload until the server has recovered."""
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    draw_latency(results, above, palette)
    draw_requests(results, below, palette)
    for axes in (above, below):
        axes.axvspan(0, results["settings"]["window_s"], color=palette.ink, alpha=0.06, linewidth=0)
        if axes.get_legend_handles_labels()[0]:
            columns = 5 if figure.get_figwidth() > 6 else 2
            axes.legend(loc="lower right", bbox_to_anchor=(1, 1), fontsize=8, ncols=columns)
    below.set_xlabel("seconds; shaded: the overload")


def draw_latency(results: Results, axes: Axes, palette: Palette) -> None:
    window_s, seconds = results["settings"]["window_s"], results["timeline"]
    for key, label, style in (("accepted_p95_ms", "answers, p95", "-"), ("accepted_p50_ms", "p50", "--")):
        points = [(second["second"] + 0.5, second[key]) for second in seconds if second[key] is not None]
        axes.plot(*zip(*points, strict=True) if points else ([], []), style, color=palette.dynamic, label=label)
    single = [(window_s + at, latency) for at, latency in results["single_requests"] if latency is not None]
    axes.plot(
        *zip(*single, strict=True) if single else ([], []), "o", color=palette.instances, markersize=3,
        label="single requests",
    )  # fmt: skip
    axes.axhline(results["settings"]["target_ms"], color=palette.ink, linewidth=0.9, linestyle=":", label="target")
    axes.axhline(
        results["as_fast_ms"], color=palette.instances, linewidth=0.9, linestyle=":", label="as fast as before"
    )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_ylabel("milliseconds")


def draw_requests(results: Results, axes: Axes, palette: Palette) -> None:
    kinds = {
        "in_time": ("answered in time", palette.dynamic),
        "late": ("answered late", palette.none),
        "refused": ("refused", palette.quiet),
        "failed": ("failed or not sent", palette.ink),
    }
    kinds = {key: kind for key, kind in kinds.items() if any(second[key] for second in results["timeline"])}
    middles = [second["second"] + 0.5 for second in results["timeline"]]
    below = [0.0] * len(middles)
    for key, (label, colour) in kinds.items():
        heights = [second[key] for second in results["timeline"]]
        axes.bar(middles, heights, 1.0, below, color=colour, label=label, linewidth=0)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set_ylabel("requests/s")
