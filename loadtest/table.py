"""The verdict as a sentence and as a table, the same on the terminal and in the report."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from loadtest.statistics import NARROW, NOT_PROVEN, Results, heaviest, summary
from loadtest.windows import Window

WINDOWS_HEADER = f"{'round':>5}  {'mode':<8}{'requests/s':>11}{'p95 ms':>9}{'batch':>8}{'failed':>8}"


def sentence(results: Results) -> str:
    verdict, users, system = results["verdict"], results["settings"]["users"], results["system"]
    ratio, interval = verdict["throughput_ratio"], verdict["ci95"]
    load = f"With {users} user{'s' if users > 1 else ''}"
    if interval is None:
        return (
            f"Not proven: too few rounds. {load}, the only complete round measured {ratio:.2f} times the requests of "
            f"{system} with dynamic batching, and one round has no interval."
        )
    bounds = f"95 % interval {interval[0]:.2f} to {interval[1]:.2f}"
    if verdict["outcome"] == NOT_PROVEN:
        return (
            f"Not proven: too few rounds. {load}, dynamic batching served {ratio:.2f} times the requests of {system}, "
            f"but the interval contains 1 ({bounds}). {NARROW}"
        )
    p95 = {mode: f"{results['modes'][mode]['p95_ms']:.0f}" for mode in results["modes"]}
    return (
        f"{load}, dynamic batching serves {ratio:.2f} times the requests of {system} ({bounds}); "
        f"95 % are answered within {p95['dynamic']} ms instead of {p95['none']} ms."
    )


def rows(results: Results) -> list[tuple[str, str, str, str]]:
    """Return (label, none, dynamic, dynamic / none) of each row; results.json has every number."""
    none, dynamic = results["modes"]["none"], results["modes"]["dynamic"]

    def row(label: str, key: str, form: str, compare: bool = True) -> tuple[str, str, str, str]:
        a, b = none[key], dynamic[key]
        return label, format(a, form), format(b, form), f"{b / a:.2f}" if compare and a else ""

    return [
        row("requests/s", "throughput_rps", ".1f"),
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
    table.add_column("")
    for column in ("no batching", "dynamic batching", "ratio"):
        table.add_column(column, justify="right")
    for row in rows(results):
        table.add_row(*row)
    console.print()
    console.print(table)
    console.print()
    console.print(f"[bold]{sentence(results)}[/]")


def window_line(window: Window) -> str:
    """Return the line of a window under WINDOWS_HEADER."""
    numbers = summary([window], heaviest([window]))
    p95 = "-" if numbers["p95_ms"] is None else f"{numbers['p95_ms']:.0f}"
    return (
        f"{window.round:>5}  {window.mode:<8}{numbers['throughput_rps']:>11.1f}{p95:>9}"
        f"{numbers['mean_batch']:>8.2f}{numbers['failures']:>8}"
    )
