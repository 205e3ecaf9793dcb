"""The result of the comparison with other servers: a row for each, on the terminal and in Markdown."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from textwrap import fill

from rich.markup import escape

from bench.peers.known_peers import Variant
from bench.peers.load import Window
from bench.token_rates import spread
from loadtest.host import host
from triton_transformers.cli import print_table

COLUMNS = ("cores", "server", "requests/s", "p50 ms", "p95 ms", "settings")
CELL_WIDTH = 40


@dataclass
class Row:
    """One server on some cores: its windows, or the sentence that explains why it has none."""

    cores: int
    name: str
    is_rival: bool
    variant: Variant = field(default_factory=dict)
    windows: list[Window] = field(default_factory=list)
    problem: str = ""

    @property
    def rate(self) -> float:
        return statistics.median(window.rate for window in self.windows) if self.windows else 0.0

    @property
    def cells(self) -> list[str]:
        if not self.windows:
            return [str(self.cores), self.name, "–", "–", "–", self.problem]
        rates = [window.rate for window in self.windows]
        p50, p95 = (statistics.median(getattr(window, key) for window in self.windows) for key in ("p50_ms", "p95_ms"))
        settings = "; ".join([*self.settings, *self.failures])
        return [str(self.cores), self.name, spread(rates, 0), f"{p50:.0f}", f"{p95:.0f}", settings]

    @property
    def settings(self) -> list[str]:
        return [", ".join(f"{name} {value}" for name, value in self.variant.items()) or "default"]

    @property
    def failures(self) -> list[str]:
        failed = sum(window.failures for window in self.windows)
        first = next((window.first_failure for window in self.windows if window.first_failure), "")
        return [f"{failed} requests failed, the first with: {first}"] if failed else []


def ordered(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row.cores, -row.rate))


def show(rows: list[Row]) -> None:
    """Print the table, and long settings or problems in several lines."""
    cells = [[escape(fill(cell, CELL_WIDTH)) for cell in row.cells] for row in ordered(rows)]
    print_table(COLUMNS, cells, text_columns=("server", "settings"))


def markdown(rows: list[Row]) -> str:
    lines = [list(COLUMNS), ["---"] * len(COLUMNS), *(row.cells for row in ordered(rows))]
    table = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |" for cells in lines)
    return f"{summary(rows)}\n\n{table}\n"


def summary(rows: list[Row]) -> str:
    """Return the machine, and for each number of cores the quotient of this project and the fastest rival."""
    lines = [f"CPU: {host()['cpu']}. Command: `make bench BENCH=peers`."]
    for cores in sorted({row.cores for row in rows}):
        own = next((row for row in rows if row.cores == cores and row.windows and not row.is_rival), None)
        rivals = [row for row in rows if row.cores == cores and row.windows and row.is_rival]
        if own and rivals:
            best = max(rivals, key=lambda row: row.rate)
            lines.append(
                f"{cores} core(s): {own.name} {own.rate:.0f} requests/s, {own.rate / best.rate:.1f} times the fastest "
                f"other server ({best.name}, {best.rate:.0f})."
            )
    return "\n".join(lines)
