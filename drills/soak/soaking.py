"""make drill SOAK=30: run the clients against a stack of its own, sample it, and report what is not flat."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import numpy as np
from rich.markup import escape

from drills.clients import ManyClients, Pace
from drills.drill_stack import DrillStack, repository_of
from drills.harness import counted
from drills.soak.process_samples import Watch
from drills.soak.report import COLUMNS, Results, SoakRun, cells, headline, results_of, write
from drills.soak.series import (
    BY_PROCESS,
    LATENCY,
    MEMORY,
    METRICS,
    OF_THE_STACK,
    PROCESSES,
    SAMPLE_S,
    SHARED,
    Kind,
    Series,
)
from triton_transformers.cli import err, one_interrupt, out, print_table
from triton_transformers.load import RIGHT, Outcome
from triton_transformers.settings import Settings
from triton_transformers.triton import metrics_page

CLIENTS = 500
# Two cores answer these 25 requests per second with time to spare. Clients that think send less when the stack is slow,
# so that a busy machine delays requests and does not pile them up.
WAIT = (10.0, 30.0)
REPORT_EVERY_S = 60.0
INTERRUPTED = 130


def pace_of(settings: Settings) -> Pace:
    return Pace(settings.users or CLIENTS, settings.wait or WAIT, settings.seed)


class Soak:
    """The samples of a stack under load."""

    def __init__(self, stack: DrillStack) -> None:
        self._stack = stack
        self._seen = 0  # outcomes of earlier samples
        self.watch = Watch(stack.processes)
        kinds = [kind for kind in OF_THE_STACK if kind is not METRICS or "prometheus" in self.watch.names]
        self.by_process = [Series(kind, name) for kind in BY_PROCESS for name in self.watch.names]
        self.of_the_stack = {kind: Series(kind) for kind in kinds}
        self.seconds = 0.0

    @property
    def series(self) -> list[Series]:
        return [*self.by_process, *self.of_the_stack.values()]

    def sample_for(self, seconds: float, clients: ManyClients) -> None:
        """Take a sample every SAMPLE_S, and print a line of progress every minute. Stop if the clients stopped."""
        begin = time.monotonic()
        for number in range(1, int(seconds / SAMPLE_S) + 1):
            time.sleep(max(0.0, begin + number * SAMPLE_S - time.monotonic()))
            if clients.problems:
                return
            self.sample(clients.outcomes)
            self.seconds = number * SAMPLE_S
            if self.seconds % REPORT_EVERY_S == 0:
                out.print(self.progress(seconds, clients))

    def sample(self, outcomes: Sequence[Outcome]) -> None:
        new = outcomes[self._seen :]
        self._seen += len(new)
        usages = self.watch.sample()
        for series in self.by_process:
            usage = usages.get(series.process)
            series.add(getattr(usage, series.kind.name) if usage else math.nan)
        for kind, value in self._of_the_stack(new):
            self.of_the_stack[kind].add(value)

    def _of_the_stack(self, outcomes: Sequence[Outcome]) -> Iterator[tuple[Kind, float]]:
        yield SHARED, self.watch.shared_memory()
        yield PROCESSES, self.watch.count()
        milliseconds = [outcome.seconds * 1000 for outcome in outcomes if outcome.kind == RIGHT]
        yield LATENCY, float(np.percentile(milliseconds, 95)) if milliseconds else math.nan
        if METRICS in self.of_the_stack:
            page = metrics_page(self._stack.url("PROMETHEUS_PORT"))
            count = re.search(r"^prometheus_tsdb_head_series (\S+)", page, re.MULTILINE)
            yield METRICS, float(count[1]) if count else math.nan

    def progress(self, seconds: float, clients: ManyClients) -> str:
        figures = counted(clients.outcomes)
        failed = figures["failed_gateway"] + figures["failed_direct"]
        latest = {series.process: series.values[-1] for series in self.by_process if series.kind is MEMORY}
        ended = [name for name, memory in latest.items() if math.isnan(memory)]
        p95 = self.of_the_stack[LATENCY].values[-1]
        latency = "no right answer" if math.isnan(p95) else f"p95 {p95:.0f} ms"
        return (
            f"{self.seconds / 60:3.0f} of {seconds / 60:g} min: {figures['requests']:,} requests, {failed} failed, "
            f"{figures['wrong']} wrong, {figures['lost']} lost; {len(clients.refusals)} bad ones; "
            f"{latency}, memory {np.nansum(list(latest.values())):.0f} MiB"
            + (f"; ended: {', '.join(ended)}" if ended else "")
        )


def soak(settings: Settings) -> int:
    """Run the soak, print and write its results, and return the exit code."""
    pace, seconds = pace_of(settings), (settings.soak or 0.0) * 60
    began, stopped = datetime.now(UTC), ""
    with one_interrupt():
        with DrillStack(repository_of(settings), settings.local_state) as stack:
            run = Soak(stack)
            clients = ManyClients(pace, lambda: stack.clients(keep=True), stack.known)
            minimum, maximum = pace.wait
            try:
                out.print(
                    f"{pace.clients} clients for {seconds / 60:g} minutes; each thinks {minimum:g} to {maximum:g} s"
                )
                with clients:
                    run.sample_for(seconds, clients)
            except KeyboardInterrupt:
                stopped = f"stopped early, after {run.seconds / 60:.1f} of {seconds / 60:g} minutes"
        problems = [*run.watch.problems, *clients.problems]
        results = results_of(SoakRun(pace, seconds / 60, run.series, clients, run.seconds, began, problems, stopped))
        show(results)
        for complaint in results["complaints"]:
            err.print(f"[red]error:[/] {escape(complaint)}")
        folder = write(results, settings.reports)
        out.print(f"\nreport  {folder}/soak.html  (numbers: {folder}/soak.json)")
    return INTERRUPTED if stopped else 1 if results["complaints"] else 0


def show(results: Results) -> None:
    """Print the table, and one sentence."""
    out.print()
    rows = [[f"[red]{cell}[/]" if series["fails"] else cell for cell in cells(series)] for series in results["series"]]
    print_table(COLUMNS, rows, text_columns=(COLUMNS[0], COLUMNS[-1]))
    out.print(f"\n[bold]{headline(results)}[/]")
