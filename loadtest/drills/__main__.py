"""Run drills against a stack of their own, or with SOAK many clients, print the table and write it.

python -m loadtest.drills [--list] [NAME ...]
"""

from __future__ import annotations

import argparse
import math
from datetime import UTC, datetime
from pathlib import Path
from textwrap import fill

import psutil
from rich.markup import escape

from loadtest.drills import attacks, commands, crashes, shortages
from loadtest.drills.drill_stack import DrillStack, repository_of
from loadtest.drills.harness import DRILLS, Drill, Result, result
from loadtest.drills.soak.soaking import soak
from loadtest.measure.verdicts import busy_machine
from loadtest.server.machine import host
from triton_transformers.cli import one_interrupt, out, print_table, run
from triton_transformers.files import write_atomically, write_json
from triton_transformers.settings import Settings, UserError

MODULES = (crashes, commands, shortages, attacks)  # their import adds the drills
COLUMNS = ("drill", "what is done", "requests", "failed", "wrong", "lost", "recovery", "bound", "held")
CELL_WIDTH = 40


def chosen(names: list[str]) -> list[Drill]:
    """Return the named drills, or all."""
    if unknown := [name for name in names if name not in DRILLS]:
        raise UserError(f"no drill {', '.join(unknown)}; make drill LIST=1 lists them")
    return [DRILLS[name] for name in names] if names else list(DRILLS.values())


def row(result: Result) -> list[str]:
    """Return the cells of a drill's row in the table."""
    if result.not_run:
        return [result.name, result.done, *[""] * 5, str(result.bound), f"not run: {result.not_run}"]
    recovery = f"{result.recovery_s:.1f} s" if math.isfinite(result.recovery_s) else "none"
    failed = f"{result.failed_gateway} / {result.failed_direct}"
    figures = [str(result.requests), failed, str(result.wrong), str(result.lost), recovery, str(result.bound)]
    return [result.name, result.done, *figures, "yes" if result.held else "NO"]


def markdown(results: list[Result]) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS), *map(row, results)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def write(results: list[Result], reports: Path) -> Path:
    folder = reports / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-drill"
    folder.mkdir(parents=True)
    machine = host()
    content = {
        "host": f"{machine['cpu']}, {machine['cores']} cores",
        "drills": [result.as_json() for result in results],
    }
    write_json(content, folder / "drill.json")
    write_atomically(folder / "drill.md", markdown(results))
    return folder


def report(result: Result) -> None:
    """Print one line of progress, and what went wrong."""
    cells = row(result)
    out.print(f"{cells[-1][:7]:<8}{result.name}: {result.done}; failed {cells[3]}, recovery {cells[6]}")
    if result.broken:
        errors = sorted(result.errors.items(), key=lambda item: -item[1])[:6]
        for line in filter(None, [result.problem, *(f"{count} x {text}" for text, count in errors)]):
            out.print(f"        [red]{escape(line)}[/]")
        if busy := busy_machine(result.other_cores, psutil.cpu_count() or 1, "before the fault, ", ""):
            out.print(f"        [yellow]{busy}[/]")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.drills", description=__doc__)
    parser.add_argument("--list", action="store_true", help="list the drills")
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    drills = chosen(arguments.names)
    if arguments.list:
        for drill in drills:
            out.print(f"{drill.name:<28}{drill.done}")
        return 0
    settings = Settings.load()
    if settings.soak:
        if arguments.names:
            raise UserError("DRILL and SOAK are both set: run one after the other")
        return soak(settings)
    results: list[Result] = []
    with one_interrupt(), DrillStack(repository_of(settings), settings.local_state) as stack:
        for drill in drills:
            results.append(result(drill, stack))
            report(results[-1])
    out.print()
    rows = [[escape(fill(cell, CELL_WIDTH, break_on_hyphens=False)) for cell in row(one)] for one in results]
    print_table(COLUMNS, rows, text_columns=(*COLUMNS[:2], *COLUMNS[-2:]))
    out.print("\nfailed, and its bound: through the gateway / directly to Triton")
    out.print(f"report  {write(results, settings.reports)}")
    return 1 if any(one.broken for one in results) else 0


if __name__ == "__main__":
    run(main)
