"""make drill SOAK=30: run the clients against a stack of its own, sample it, and report what is not flat."""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import psutil
from rich.markup import escape

from loadtest.drills.clients import ManyClients, Pace
from loadtest.drills.drill_stack import DrillStack, repository_of
from loadtest.drills.harness import counted
from loadtest.drills.soak.report import COLUMNS, Results, causes, cells, headline, results_of, write
from loadtest.drills.soak.series import (
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
from loadtest.measure.verdicts import EXIT_CODES, also, judge
from triton_transformers.cli import one_interrupt, out, print_table
from triton_transformers.load import RIGHT, Outcome
from triton_transformers.settings import Settings
from triton_transformers.triton import metrics_page

CLIENTS = 500
# Two cores answer these 25 requests per second with time to spare. Clients that think send less when the stack is slow,
# so that a busy machine delays requests and does not pile them up.
WAIT = (10.0, 30.0)
REPORT_EVERY_S = 60.0
SHARED_MEMORY = "/dev/shm/"
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
                stopped = f"after {run.seconds / 60:.1f} of {seconds / 60:g} minutes"
        results = results_of(pace, seconds / 60, clients, run.series, run.seconds, began)
        results |= {"stopped": stopped, "problems": [*run.watch.problems, *clients.problems]}
        results["verdict"] = judge(causes(results))
        show(results)
        out.print(f"\nreport  {write(results, settings.reports)}")
    return INTERRUPTED if stopped else EXIT_CODES[results["verdict"]["word"]]


def show(results: Results) -> None:
    """Print the table and the verdict."""
    out.print()
    rows = [[f"[red]{cell}[/]" if series["fails"] else cell for cell in cells(series)] for series in results["series"]]
    print_table(COLUMNS, rows, text_columns=(COLUMNS[0], COLUMNS[-1]))
    out.print(f"\n[bold]{escape(headline(results))}[/]")
    for line in also(results["verdict"]):
        out.print(escape(line))


# --- what each process of the stack uses, from /proc ------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """The memory, descriptors and threads of one process."""

    memory: float  # bytes
    descriptors: float
    threads: float


def usage_of(pid: int) -> Usage:
    """Return what a process uses. Raise OSError if it has ended.

    The memory is the private one, which only this process can free: without mapped files, which the kernel takes back
    as it likes, and without shared memory, which is counted once for all processes.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    lines = re.findall(r"^(RssAnon|VmSwap|Threads):\s*(\d+)", status, re.MULTILINE)
    fields = {name: int(value) for name, value in lines}
    if "RssAnon" not in fields:
        raise ProcessLookupError(f"process {pid} has ended")  # it has no memory left
    memory = (fields["RssAnon"] + fields["VmSwap"]) * 1024
    return Usage(memory, len(os.listdir(f"/proc/{pid}/fd")), fields["Threads"])


def name_of(command: list[str]) -> str:
    """Return the name of a program of the stack by its command line."""
    program = Path(command[0]).name
    if program == "triton_python_backend_stub":
        return Path(command[1]).parts[-3]  # <repository>/<model>/<version>/model.py
    if program.startswith("python"):
        return command[2].rpartition(".")[2] if command[1] == "-m" else Path(command[1]).name
    return Path(command[1]).name if program == "bash" else program


class Watch:
    """The processes of a stack. A process that ends, or that comes later, is a problem."""

    def __init__(self, processes: Callable[[], list[psutil.Process]]) -> None:
        self._processes = processes
        self._pids: dict[str, int] = {}
        for process in processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if command := process.cmdline():  # a process that has just ended has none
                    name = name_of(command)
                    self._pids[f"{name} {process.pid}" if name in self._pids else name] = process.pid
        self._regions: set[Path] = set()
        self.problems: list[str] = []

    @property
    def names(self) -> list[str]:
        return sorted(self._pids)

    def sample(self) -> dict[str, Usage]:
        """Return the usage of each process that still runs."""
        samples = {}
        for name, pid in list(self._pids.items()):
            try:
                samples[name] = usage_of(pid)
            except OSError:
                self.problems.append(f"{name} (process {pid}) ended during the soak")
                del self._pids[name]
        return samples

    def count(self) -> int:
        """Return the number of the stack's processes."""
        return len(self._processes())

    def shared_memory(self) -> int:
        """Return the bytes in /dev/shm that a process of the stack has mapped, now or before."""
        for pid in self._pids.values():
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{pid}/maps").read_text()
                self._regions |= {Path(path) for path in re.findall(rf"{SHARED_MEMORY}\S+", maps)}
        total = 0
        for region in self._regions:
            with contextlib.suppress(OSError):  # it was removed
                total += region.stat().st_blocks * 512
        return total
