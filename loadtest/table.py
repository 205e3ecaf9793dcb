"""The verdict as a sentence and as a table, the same on the terminal and in the report."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadtest.statistics import NARROW, NOT_PROVEN, Results, heaviest, summary
from loadtest.windows import Window

WINDOWS_HEADER = f"{'round':>5}  {'mode':<10}{'requests/s':>11}{'p95 ms':>9}{'batch':>8}{'failed':>8}"


def label(mode: str, cores: int) -> str:
    """Return a mode's name as tables and charts show it."""
    return {"none": "no batching", "instances": f"{cores} instances", "dynamic": "dynamic batching"}[mode]


def sentence(results: Results) -> str:
    verdict, users, system = results["verdict"], results["settings"]["users"], results["system"]
    interval = verdict["ci95"]
    load = f"with {users} user{'s' if users > 1 else ''}"
    times = f"{verdict['throughput_ratio']:.2f} times as many requests of {system}"
    baseline = without_batching(results)
    if interval is None:
        return (
            f"Not proven: {load}, dynamic batching answered {times} as {baseline} in the only complete round, and one "
            "round has no interval."
        )
    low, high = (f"{bound:.2f}" for bound in interval)
    if verdict["outcome"] == NOT_PROVEN:
        return (
            f"Not proven: {load}, dynamic batching answered {times} as {baseline}, but the 95 % interval, {low} to "
            f"{high}, contains 1. {NARROW}"
        )
    dynamic, other = (results["modes"][mode]["p95_ms"] for mode in ("dynamic", verdict["baseline"]))
    return (
        f"{load.capitalize()}, dynamic batching answers {times} (95 % interval {low} to {high}) as {baseline}; 95 % "
        f"are answered within {dynamic:.0f} ms instead of {other:.0f} ms."
    )


def without_batching(results: Results) -> str:
    """Return the words for the baseline, and that it is the best of several modes."""
    is_instances = results["verdict"]["baseline"] == "instances"
    instances = f"{results['triton']['cores']} instances" if is_instances else "the same instances"
    return f"{instances} without batching" + (", the best mode without it" if len(results["modes"]) > 2 else "")


def left_out(results: Results) -> list[str]:
    """Return a sentence for each mode that was not measured."""
    return [f"The mode {mode} is left out: {reason}." for mode, reason in results["left_out"].items()]


def columns(results: Results) -> list[str]:
    """Return the header of the table: a column for each mode, and the ratio to the baseline."""
    cores, baseline = results["triton"]["cores"], results["verdict"]["baseline"]
    return ["", *(label(mode, cores) for mode in results["modes"]), f"dynamic / {label(baseline, cores)}"]


def rows(results: Results) -> list[list[str]]:
    """Return a row for each number: its label, its value in each mode, its ratio. results.json has every number."""
    modes, verdict = results["modes"], results["verdict"]

    def row(name: str, key: str, form: str, compare: bool = True) -> list[str]:
        values = [figures[key] for figures in modes.values()]
        dynamic, other = modes["dynamic"][key], modes[verdict["baseline"]][key]
        return [name, *(format(value, form) for value in values), f"{dynamic / other:.2f}" if compare and other else ""]

    ratios = [verdict["ratios"].get(mode, {}) for mode in modes]
    own_ratio = ["dynamic / this mode", *(f"{r['throughput_ratio']:.2f}" if r else "" for r in ratios), ""]
    own_interval = ["  95 % interval", *("-".join(f"{bound:.2f}" for bound in r.get("ci95") or ()) for r in ratios), ""]
    return [
        row("requests/s", "throughput_rps", ".1f"),
        *([own_ratio, own_interval] if len(modes) > 2 else []),
        row("latency p50, ms", "p50_ms", ".0f"),
        row("latency p95, ms", "p95_ms", ".0f"),
        row("latency p99, ms", "p99_ms", ".0f"),
        row(f"{results['noun']} per batch ({results['model']})", "mean_batch", ".2f"),
        row("waiting in Triton's queues, ms", "queue_ms", ".1f"),
        row("computing, ms", "compute_ms", ".1f"),
        row("Locust, cores", "cpu", ".2f", compare=False),
        row("requests measured", "requests", "d", compare=False),
        row("failed", "failures", "d", compare=False),
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
    for line in left_out(results):
        console.print(escape(line))


def window_line(window: Window) -> str:
    """Return the line of a window under WINDOWS_HEADER."""
    numbers = summary([window], heaviest([window]))
    p95 = "-" if numbers["p95_ms"] is None else f"{numbers['p95_ms']:.0f}"
    return (
        f"{window.round:>5}  {window.mode:<10}{numbers['throughput_rps']:>11.1f}{p95:>9}"
        f"{numbers['mean_batch']:>8.2f}{numbers['failures']:>8}"
    )
