"""The report of a comparison: its sentence and table, its figures, and its files."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadtest.load.arrivals import Sample
from loadtest.load.telemetry import LAST_SCRAPE_S
from loadtest.measure import verdicts
from loadtest.measure.statistics import (
    THROUGHPUT_RATIO,
    Results,
    heaviest,
    latencies,
    summary,
    throughput,
    timed_samples,
    write_csv,
)
from loadtest.measure.verdicts import Code
from loadtest.measure.windows import Window
from loadtest.server.machine import is_busy
from monitoring.drawing.charts import PALETTES, Chart, Palette, images, write_charts
from monitoring.drawing.draw import draw
from monitoring.drawing.evaluate import BATCHING, Range, load
from triton_transformers.files import WRITING, complete_folder, write_atomically, write_json
from triton_transformers.pages import page
from triton_transformers.prometheus import Prometheus, PrometheusError
from triton_transformers.settings import DEFAULTS, MODES, TABLE, Settings

# Requests whose answers are compared between formats, sent one at a time: the slowest formats answer a few per second.
COMPARED = 64
WINDOWS_HEADER = f"{'round':>5}  {'mode':<10}{'requests/s':>11}{'p95 ms':>9}{'batch':>8}{'failed':>8}"
# The same for a system that generates text.
GENERATING_HEADER = f"{'round':>5}  {'mode':<10}{'tokens/s':>11}{'p95 ms':>9}{'together':>10}{'failed':>8}"


# The modes whose colours the formats have, in their order.
FORMAT_COLOURS = ("none", "dynamic", "instances")


def colours(results: Results) -> dict[str, str]:
    """Return the mode whose colour each of the modes or formats has."""
    return dict(zip(results["modes"], FORMAT_COLOURS if results["formats"] else results["modes"], strict=False))


def label(mode: str, results: Results) -> str:
    """Return a mode's name as tables and charts show it."""
    if results["formats"]:
        return mode
    if results["generates"]:
        return {"none": "one at a time", "dynamic": "together"}[mode]
    instances = f"{results['triton']['cores']} instances"
    return {"none": "no batching", "instances": instances, "dynamic": "dynamic batching"}[mode]


def sentence(results: Results) -> str:
    """Return the headline: what the verdict is, what was measured, and what to do if that is not proven."""
    return verdicts.sentence(results["verdict"], measured(results))


def measured(results: Results) -> str:
    return measured_at_a_rate(results) if results["settings"]["rate"] else measured_with_users(results)


def measured_with_users(results: Results) -> str:
    verdict, users, system = results["verdict"], results["settings"]["users"], results["system"]
    load = f"with {users} user{'s' if users > 1 else ''}, {subject(results)}"
    baseline = without_batching(results) if results["formats"] else f"the same server with {without_batching(results)}"
    own, other = (results["modes"][verdict[key]]["p95_ms"] for key in ("subject", "baseline"))
    if Code.THINKING_USERS.name in [cause["code"] for cause in verdict["causes"][:1]]:
        return (
            f"{load} answered 95 % of their requests of {system} within {own:.0f} ms, and {baseline} within "
            f"{other:.0f} ms."
        )
    did, what = ("generated", "tokens") if results["generates"] else ("answered", "requests")
    return (
        f"{load} {did} {verdict[THROUGHPUT_RATIO]:.2f} times as many {what} of {system}{interval_of(verdict)} as "
        f"{baseline}. p95: {own:.0f} ms instead of {other:.0f} ms."
    )


def measured_at_a_rate(results: Results) -> str:
    verdict, modes = results["verdict"], results["modes"]
    load = f"at {results['settings']['rate']:g} requests per second"
    own, other = (f"{modes[verdict[key]]['p95_ms']:.0f} ms" for key in ("subject", "baseline"))
    names = {verdict["subject"]: subject(results), verdict["baseline"]: without_batching(results)}
    answered = f"answered 95 % of the requests of {results['system']} within"
    if overloaded := " and ".join(names.pop(mode) for mode in verdict["overloaded"]):
        grows = "the server does not keep up: the latency grows as long as the load lasts."
        within = [f" With {name}, it {answered} {modes[mode]['p95_ms']:.0f} ms." for mode, name in names.items()]
        return f"{load} with {overloaded}, {grows}{''.join(within)}"
    return (
        f"{load}, {subject(results)} {answered} {own} instead of {other} with {without_batching(results)}: "
        f"{verdict[verdict['headline']]:.2f} times as fast{interval_of(verdict)}."
    )


def interval_of(verdict: Results) -> str:
    return " (95 % interval {:.2f} to {:.2f})".format(*verdict["ci95"]) if verdict["ci95"] else ""


def subject(results: Results) -> str:
    """Return what the sentence is about."""
    if results["formats"]:
        return f"FORMAT={results['verdict']['subject']}"
    return "batching" if results["generates"] else "dynamic batching"


def without_batching(results: Results) -> str:
    """Return how the server was configured in the baseline, and that it is the best of several modes."""
    if results["formats"]:
        return f"FORMAT={results['verdict']['baseline']}"
    if results["generates"]:
        return "one text at a time"
    baseline = "dynamic batching off"
    if results["verdict"]["baseline"] == "instances":
        baseline += f" and one instance for each of its {results['triton']['cores']} cores"
    return baseline + (", the best of the other modes" if len(results["modes"]) > 2 else "")


def explanation(results: Results) -> str:
    """Return what the modes are, and what they have in common."""
    if results["formats"]:
        return (
            f"Every format runs on this server as `make add` configures it, with the same users and {results['noun']}. "
            f"Its answers to at most {COMPARED} requests, sent one at a time, are compared with those of "
            f"{results['formats'][0]}."
        )
    if results["generates"]:
        return (
            "Every mode runs on this server with the same model, users and texts. One at a time: the model generates "
            "one text after the other. Together: as configured, a text runs together with the others that are there."
        )
    cores, modes = results["triton"]["cores"], results["modes"]
    parts = [
        f"Every mode runs on this server with the same models, users and {results['noun']}.",
        "No batching: the configured instances run each request by itself." if "none" in modes else "",
        f"{cores} instances: the same with one instance for each core of the server, with one thread each."
        if "instances" in modes
        else "",
        "Dynamic batching: the configured instances run requests that wait together.",
        f"The pipeline of {results['system']} runs each row of a batch alone, because together their answers would "
        "change (batch_size=1 in its config.pbtxt): at best, a batch lets them run side by side."
        if results["runs_rows_alone"]
        else "",
    ]
    return " ".join(filter(None, parts))


def left_out(results: Results) -> list[str]:
    """Return a sentence for each mode that was not measured."""
    return [f"The mode {mode} is left out: {reason}." for mode, reason in results["left_out"].items()]


def columns(results: Results) -> list[str]:
    """Return the header of the table: a column for each mode."""
    return ["", *(label(mode, results) for mode in results["modes"])]


def rows(results: Results) -> list[list[str]]:
    """Return a row for each number: its label, and its value in each mode. results.json has every number."""
    modes = results["modes"]

    def row(name: str, key: str, form: str) -> list[str]:
        values = [figures[key] for figures in modes.values()]
        return [name, *("-" if value is None else format(value, form) for value in values)]

    p50, p95, p99 = (row(f"latency {p}, ms", f"{p}_ms", ".0f") for p in ("p50", "p95", "p99"))
    locust = [
        row("Locust, cores", "cpu", ".2f"),
        row("other programs, cores", "other_cores", ".2f"),
        row("requests measured", "requests", "d"),
        row("failed", "failures", "d"),
    ]
    requests = row("requests/s", "throughput_rps", ".2f" if results["generates"] else ".1f")
    units = [row(f"{unit}/s", "units_per_second", ".1f")] if (unit := results["unit"]) else []
    latency = [p50, p95, p99]
    if results["settings"]["rate"]:
        requests[0] = "answered, requests/s"
        kept_up = [
            f"{figures['windows_kept_up']} of {figures['windows_kept_up'] + figures['overloaded_windows']}"
            for figures in modes.values()
        ]
        first = [p95, *ratio_rows(results), ["windows that kept up", *kept_up], requests, *units]
        latency = [p50, p99]
        locust.append(row("not sent, all users busy", "given_up", "d"))
    elif results["generates"]:
        first = [row("tokens/s", "tokens_per_second", ".1f"), *ratio_rows(results), requests]
    else:
        first = [requests, *ratio_rows(results), *units]
    if results["generates"]:
        return [
            *first,
            *token_rows(results, row),
            *latency,
            row("texts together (tokens per step)", "tokens_per_step", ".2f"),
            *locust,
        ]
    return [
        *first,
        *quality_rows(results),
        *latency,
        row(f"{results['noun']} per batch ({results['model']})", "mean_batch", ".2f"),
        row("waiting in Triton's queues, ms", "queue_ms", ".1f"),
        row("computing, ms", "compute_ms", ".1f"),
        *locust,
    ]


def ratio_rows(results: Results) -> list[list[str]]:
    """Return the ratio of each mode and its interval, as the sentence has them of one mode."""
    verdict = results["verdict"]
    # The latency of an overloaded mode depends on how long the windows are, and so would its ratio.
    in_all_ratios = verdict["baseline" if results["formats"] else "subject"]
    ratios = [
        {} if in_all_ratios in verdict["overloaded"] or figures.get("overloaded") else verdict["ratios"].get(mode, {})
        for mode, figures in results["modes"].items()
    ]
    this = "this format" if results["formats"] else "this mode"
    other = next(iter(results["formats"]), "together" if results["generates"] else "dynamic")
    this_first = bool(results["formats"]) != bool(results["settings"]["rate"])
    name = f"{this} / {other}" if this_first else f"{other} / {this}"
    return [
        [
            f"p95, {name}" if results["settings"]["rate"] else name,
            *(f"{ratio[verdict['headline']]:.2f}" if ratio else "" for ratio in ratios),
        ],
        ["  95 % interval", *("-".join(f"{bound:.2f}" for bound in ratio.get("ci95") or ()) for ratio in ratios)],
    ]


def token_rows(results: Results, row: Callable[[str, str, str], list[str]]) -> list[list[str]]:
    """Return the times of tokens: percentiles of the texts that users streamed, else the means of the backend."""
    times = (("time to first token", "first_token", ".0f"), ("time per output token", "output_token", ".1f"))
    if has_streams(results):
        return [row(f"{name} p{p}, ms", f"{key}_p{p}_ms", form) for name, key, form in times for p in (50, 95)]
    return [row(f"{name}, mean, ms", f"{key}_ms", form) for name, key, form in times]


def has_streams(results: Results) -> bool:
    return all("output_token_p95_ms" in figures for figures in results["modes"].values())


def quality_rows(results: Results) -> list[list[str]]:
    """Return a row for each measure of the formats' answers beside those of the first one; none for modes."""
    own = [results["quality"].get(mode, {}) for mode in results["modes"]]
    names = {
        "cosine_min": ("smallest cosine of an answer", ".4f"),
        "cosine_mean": ("mean cosine", ".4f"),
        "equal_labels": ("equal labels", ".1%"),
    }
    return [
        [name, *(format(measured[key], form) if measured else "" for measured in own)]
        for key, (name, form) in names.items()
        if any(key in measured for measured in own)
    ]


def print_table(results: Results, console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, column in enumerate(columns(results)):
        # One word per line, so that the table of three modes fits a terminal of 80 columns.
        table.add_column(column.replace(" ", "\n", 1), justify="right" if number else "left", vertical="bottom")
    for row in rows(results):
        table.add_row(*row)
    console.print()
    console.print(table)
    console.print()
    console.print(f"[bold]{escape(sentence(results))}[/]")
    for line in [*verdicts.also(results["verdict"]), explanation(results), *left_out(results)]:
        console.print(escape(line))


def window_line(window: Window) -> str:
    """Return the line of a window under WINDOWS_HEADER or GENERATING_HEADER."""
    numbers = summary([window], heaviest([window]))
    p95 = "-" if numbers["p95_ms"] is None else f"{numbers['p95_ms']:.0f}"
    together = f"{numbers['tokens_per_step']:>10.2f}" if window.generated else f"{numbers['mean_batch']:>8.2f}"
    overloaded = "  does not keep up" if numbers.get("overloaded") else ""
    line = f"{window.round:>5}  {window.mode:<10}{throughput(window):>11.1f}{p95:>9}{together}{numbers['failures']:>8}"
    others = f"  others took {window.other_cores:.1f} cores" if is_busy(window.other_cores, os.cpu_count() or 1) else ""
    return line + overloaded + others


# --- figures ----------------------------------------------------------------------------------------------------------

# The share of the space between two ticks that the bars of all modes fill together.
BARS = 0.84


def all_charts(results: Results, windows: list[Window]) -> dict[str, Chart]:
    title = "p95" if results["settings"]["rate"] else "throughput"
    charts = {
        title: Chart(partial(draw_over_time, results, windows), (9.6, 2.9), (4.0, 2.8)),
        "latency": Chart(partial(draw_latency, results, windows), (4.7, 3.1), (4.0, 2.8)),
    }
    if results["generates"]:
        return charts | {"tokens": Chart(partial(draw_token_times, results), (4.7, 3.1), (4.0, 2.8))}
    bars = len(results["modes"]) * len(models_of(results))
    return charts | {
        "batches": Chart(partial(draw_batches, results), (4.7, 3.1), (4.0, 2.8)),
        "time": Chart(partial(draw_time, results), (9.6, 0.9 + 0.3 * bars), (4.0, 1.2 + 0.3 * bars)),
    }


def models_of(results: Results) -> list[str]:
    """Return the models of all modes."""
    return list(dict.fromkeys(name for figures in results["modes"].values() for name in figures["models"]))


def offsets(results: Results) -> list[tuple[str, float]]:
    """Return each mode with the place of its bar beside a tick; bars are BARS / modes wide."""
    modes = list(results["modes"])
    return [(mode, BARS * ((number + 0.5) / len(modes) - 0.5)) for number, mode in enumerate(modes)]


def draw_over_time(results: Results, windows: list[Window], figure: Figure, palette: Palette) -> None:
    """Draw the throughput in each second; in an open loop the 95th percentile of the requests that arrived in it."""
    axes, is_open = figure.add_subplot(), bool(results["settings"]["rate"])
    for window in windows:
        colour = palette.colour_of(colours(results)[window.mode])
        axes.axvspan(window.start, window.end, color=colour, alpha=0.13, linewidth=0)
        if window.generated and not is_open:
            axes.hlines(window.generated.tokens_per_second, window.start, window.end, color=colour, linewidth=2)
            continue
        edges = np.linspace(window.start, window.end, max(1, round(window.end - window.start)) + 1)
        if is_open:
            values = p95_by_second(timed_samples(window), edges)
        else:
            values = np.histogram([s.at for s in window.samples if not s.error], edges)[0] / np.diff(edges)
        axes.stairs(values, edges, color=colour, linewidth=1.4, baseline=None if is_open else 0)
    unit = "p95, milliseconds" if is_open else "tokens/s" if results["generates"] else "requests/s"
    axes.set(ylabel=unit, xlabel="seconds since the start")
    if is_open:
        scale_latency(axes, "y", results)
    else:
        axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    add_legend(results, figure, palette)


def p95_by_second(samples: list[Sample], edges: Any) -> list[Any]:
    seconds = np.digitize([s.arrived for s in samples], edges[1:-1])
    milliseconds = np.array([s.latency_ms for s in samples])
    numbers = range(len(edges) - 1)
    return [np.percentile(milliseconds[seconds == n], 95) if n in seconds else np.nan for n in numbers]


def draw_latency(results: Results, windows: list[Window], figure: Figure, palette: Palette) -> None:
    axes = figure.add_subplot()
    for mode in results["modes"]:
        milliseconds = np.sort(latencies([w for w in windows if w.mode == mode]))
        if not len(milliseconds):
            continue
        share = np.arange(1, len(milliseconds) + 1) / len(milliseconds) * 100
        axes.plot(milliseconds, share, color=palette.colour_of(colours(results)[mode]), linewidth=1.6)
    axes.axhline(95, color=palette.ink, linewidth=0.7, linestyle=":")
    axes.set(xlabel="milliseconds", ylabel="% answered within")
    scale_latency(axes, "x", results)
    axes.set_ylim(0, 101)
    add_legend(results, figure, palette)


def scale_latency(axes: Axes, name: str, results: Results) -> None:
    """Scale the axis x or y of latencies. An overloaded mode would hide all others on a linear axis."""
    if any(figures.get("overloaded_windows") for figures in results["modes"].values()):
        axes.set(**{f"{name}scale": "log"})
        getattr(axes, f"{name}axis").set_major_formatter(StrMethodFormatter("{x:g}"))
    else:
        axes.set(**{f"{name}lim": (0, None)})


def draw_token_times(results: Results, figure: Figure, palette: Palette) -> None:
    """Draw how long a text's first token takes, and each later one."""
    which, name = ("_p95_ms", "p95") if has_streams(results) else ("_ms", "mean")
    kinds = {f"first_token{which}": f"to the first token, {name}", f"output_token{which}": f"per later token, {name}"}
    for axes, (key, name) in zip(figure.subplots(2), kinds.items(), strict=True):
        modes = list(reversed(results["modes"]))
        times = [results["modes"][mode][key] for mode in modes]
        bars = axes.barh(range(len(modes)), [time or 0 for time in times], height=0.6)
        for bar, mode in zip(bars, modes, strict=True):
            bar.set_color(palette.colour_of(colours(results)[mode]))
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
        figures = results["modes"][mode]
        batches = {int(size): n for size, n in figures["models"][figures["model"]]["batches"].items()}
        examples = sum(size * n for size, n in batches.items()) or 1
        largest = max([largest, *batches])
        axes.bar(
            [size + offset for size in batches],
            [size * n / examples * 100 for size, n in batches.items()],
            width=BARS / len(results["modes"]),
            color=palette.colour_of(colours(results)[mode]),
        )
    axes.set(xlabel=f"{results['noun']} in the batch ({results['model']})", ylabel=f"% of {results['noun']}")
    axes.set_xlim(0, largest + 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    add_legend(results, figure, palette)


def draw_time(results: Results, figure: Figure, palette: Palette) -> None:
    """Draw where a request spends its time in Triton: in each model's queue (pale) and being computed (full)."""
    axes = figure.add_subplot()
    names = models_of(results)[::-1]
    height = BARS / len(results["modes"]) * 0.9
    for mode, offset in offsets(results):
        for name, model in results["modes"][mode]["models"].items():
            y = names.index(name)
            queue, compute = model["queue_ms"], model["compute_ms"]
            axes.barh(y - offset, queue, color=palette.colour_of(colours(results)[mode]), alpha=0.35, height=height)
            axes.barh(y - offset, compute, left=queue, color=palette.colour_of(colours(results)[mode]), height=height)
            axes.text(queue + compute, y - offset, f" {queue:.1f} + {compute:.1f}", va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("milliseconds per request: waiting + computing")
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.2)
    add_legend(results, figure, palette)


def add_legend(results: Results, figure: Figure, palette: Palette) -> None:
    (axes,) = figure.axes
    for mode in results["modes"]:
        axes.plot([], [], color=palette.colour_of(colours(results)[mode]), linewidth=4, label=label(mode, results))
    figure.legend(loc="outside upper right", ncols=len(results["modes"]), handlelength=1.2, columnspacing=1.2)


# --- files: results.json, requests.csv, the figures as PNG, and report.html with all of it ----------------------------

LATEST = "latest"


def shown(settings: Settings) -> dict[str, str]:
    return {name: settings[name] for name, row in TABLE.items() if row.shown}


def command(settings: Settings, target: str = "loadtest") -> str:
    """Return the command that repeats a measurement: the shown settings that differ from their defaults."""
    changed = [f"{name}={shlex.quote(value)}" for name, value in shown(settings).items() if value != DEFAULTS[name]]
    return " ".join([f"make {target}", *changed])


def remove_leftovers(reports: Path) -> None:
    """Delete the half-written reports of comparisons that were killed."""
    for leftover in reports.glob(f".*{WRITING}"):
        shutil.rmtree(leftover, ignore_errors=True)


def write(results: Results, windows: list[Window], reports: Path, dashboard: Markup) -> Path:
    """Write reports/<UTC time>-<system>/, and point reports/latest at it if it is complete."""
    target = reports / f"{results['run']}-{results['system']}"
    with complete_folder(target, LATEST) as work:
        write_json(results, work / "results.json")
        write_csv(windows, work / "requests.csv")
        charts = all_charts(results, windows)
        write_charts(charts, work)
        write_atomically(work / "report.html", html(results, charts, dashboard))
    return target


def html(results: Results, charts: dict[str, Chart], dashboard: Markup) -> str:
    return page(
        "loadtest",
        "reports/report.html.j2",
        results=results,
        sentence=sentence(results),
        also=verdicts.also(results["verdict"]),
        colours=colours(results),
        columns=columns(results),
        rows=rows(results),
        explanation=" ".join([explanation(results), *left_out(results)]),
        palettes=PALETTES,
        images=images(charts),
        dashboard=dashboard,
    )


def drawn_dashboard(prometheus: Prometheus, results: Results, windows: list[Window]) -> Markup:
    """Return the charts that Prometheus recorded of this comparison, or the reason why there are none."""
    last, run = windows[-1], results["run"]
    start, end = windows[0].began_at, last.began_at + last.end - last.start + LAST_SCRAPE_S
    try:
        if run not in prometheus.label_values("run", "loadtest_measured_seconds_total", start, end):
            raise PrometheusError(f"the Prometheus on {prometheus.url} did not record this comparison")
        charts = draw(prometheus, charts_only(load(BATCHING), colours(results)), Range(start, end), {"run": run})
        caption = f"The shaded times are the measured windows of each {'format' if results['formats'] else 'mode'}."
        return Markup("<p class=note>{}</p>\n{}").format(caption, charts)
    except Exception as error:  # the measurements matter more than any error here
        return Markup("<p class=note>Not drawn: {}.</p>").format(error)


def charts_only(dashboard: dict[str, Any], like: dict[str, str]) -> dict[str, Any]:
    """Return the dashboard with only its charts over time that the report has not drawn itself.

    The dashboard knows the modes alone. `like` names the mode whose colour each mode or format gets.

    Its other panels repeat the report's numbers, computed differently: Prometheus divides the requests of all windows
    by their seconds, where the report takes the mean over rounds.
    """
    named = {colour: mode for mode, colour in like.items()}

    def renamed(text: str) -> str:
        return re.sub("|".join(MODES), lambda match: named.get(match[0], match[0]), text)

    windows = [window | {"expr": renamed(window["expr"])} for window in dashboard["annotations"]["list"]]
    charts = [panel for panel in dashboard["panels"] if panel["type"] == "timeseries"]
    for override in (override for chart in charts for override in chart["fieldConfig"]["overrides"]):
        override["matcher"]["options"] = renamed(override["matcher"]["options"])
    panels = [chart for chart in charts if chart["title"] != "Requests/s over time"]
    return dashboard | {"annotations": {"list": windows}, "panels": panels}
