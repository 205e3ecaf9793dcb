"""The verdict as a sentence and as a table, the same on the terminal and in the report."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


def sentence(found: dict) -> str:
    verdict, settings = found["verdict"], found["settings"]
    ratio, interval = verdict["throughput_ratio"], verdict["ci95"]
    users = f"{settings['users']} user{'s' if settings['users'] > 1 else ''}"
    if interval is None:
        certain = "one round only, so no interval"
    else:
        certain = f"95 % interval {interval[0]:.2f} to {interval[1]:.2f}"
    if interval and interval[0] <= 1 <= interval[1]:
        return (
            f"With {users}, dynamic batching makes no difference to {found['system']} that these rounds could show: "
            f"{ratio:.2f} times the throughput ({certain}; more ROUNDS or a longer WINDOW narrow it)."
        )
    p95 = {mode: f"{found['modes'][mode]['p95_ms']:.0f}" for mode in found["modes"]}
    return (
        f"With {users}, dynamic batching serves {ratio:.2f} times the requests of {found['system']} ({certain}); "
        f"95 % are answered within {p95['dynamic']} ms instead of {p95['none']} ms."
    )


def rows(found: dict) -> list[tuple[str, str, str, str]]:
    """(what, none, dynamic, dynamic / none) of the table; every figure is in results.json."""
    none, dynamic = found["modes"]["none"], found["modes"]["dynamic"]

    def row(label: str, key: str, form: str, compare: bool = True) -> tuple[str, str, str, str]:
        a, b = none[key], dynamic[key]
        return label, format(a, form), format(b, form), f"{b / a:.2f}" if compare and a else ""

    return [
        row("requests/s", "throughput_rps", ".1f"),
        row("latency p50, ms", "p50_ms", ".0f"),
        row("latency p95, ms", "p95_ms", ".0f"),
        row("latency p99, ms", "p99_ms", ".0f"),
        row(f"{found['noun']} a batch ({found['model']})", "mean_batch", ".2f"),
        row("waiting in Triton's queues, ms", "queue_ms", ".1f"),
        row("computing, ms", "compute_ms", ".1f"),
        row("Locust, cores", "cpu", ".2f", compare=False),
        row("requests measured", "requests", "d", compare=False),
        row("failed", "failures", "d", compare=False),
    ]


def print_table(found: dict, console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for column in ("no batching", "dynamic batching", "ratio"):
        table.add_column(column, justify="right")
    for row in rows(found):
        table.add_row(*row)
    console.print()
    console.print(table)
    console.print()
    console.print(f"[bold]{sentence(found)}[/]")
