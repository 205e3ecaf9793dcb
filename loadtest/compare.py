"""make loadtest: compare dynamic batching with none on the running server; print the table, write the report."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property

import gevent
import greenlet
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest import report
from loadtest import statistics as results
from loadtest.crowd.base import Crowd, LocalCrowd, pin
from loadtest.crowd.master import MasterCrowd
from loadtest.examples import Examples
from loadtest.switching import Switch, composing, plan, restore_after_kill
from loadtest.table import print_table
from loadtest.telemetry import Metrics
from loadtest.users import Job
from loadtest.windows import Experiment, Plan, Window
from loadtest.workload import Workload
from scripts.common.cli import err, out
from scripts.common.files import comparison_lock, exclusive
from scripts.common.ports import check_free
from scripts.common.settings import Settings, UserError
from scripts.common.triton import Triton, TritonError

INTERRUPTED = "interrupted"


@dataclass
class Comparison:
    settings: Settings
    windows: list[Window] = field(default_factory=list)
    stopped: str = ""  # why the rounds ended early
    server_version: str = ""
    run: str = field(default_factory=lambda: f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}")  # its name, in reports and metrics

    @cached_property
    def triton(self) -> Triton:
        return Triton(self.settings.url("TRITON_HTTP_PORT"), self.settings["TRITON_ADMIN_KEY"])

    @cached_property
    def workload(self) -> Workload:
        return Workload.of(self.settings)

    @cached_property
    def plan(self) -> Plan:
        s = self.settings
        return Plan(
            system=s["SYSTEM"],
            rounds=s.integer("ROUNDS", minimum=2),
            window_s=s.number("WINDOW", minimum=1) if s["WINDOW"] else None,
            warmup_s=s.number("WARMUP"),
            users=self.workload.users,
            spawn_rate=self.workload.spawn_rate,
        )

    @cached_property
    def examples(self) -> Examples:
        return Examples.of(self.settings, self.workload.texts)

    @cached_property
    def job(self) -> Job:
        return Job.of(self.settings, self.workload, self.examples)

    @cached_property
    def workers(self) -> int:
        """Processes beside this one that run the users; none if it does so itself."""
        workers = self.settings.integer("WORKERS") if self.settings["WORKERS"] else 0
        if workers > self.workload.users:
            raise UserError(f"WORKERS={workers}: each needs a user at least, and there are {self.workload.users} USERS")
        return workers

    @cached_property
    def least_ratio(self) -> float:
        return self.settings.number("MIN_RATIO") if self.settings["MIN_RATIO"] else 0.0

    @cached_property
    def metrics(self) -> Metrics:
        return Metrics(self.run, self.plan.system)

    def measure(self) -> None:
        """Fill `windows`. The server is as it was when this returns, also after an interrupt."""
        folder = self.settings.path("REPORTS")
        # Every setting is right before anything starts.
        _ = self.plan, self.workers, self.least_ratio, self.job
        pin(self.settings["LOADTEST_CPUS"])
        with exclusive(comparison_lock(self.settings), "another comparison is running against this stack", wait=False):
            if restored := restore_after_kill(self.triton, folder):
                err.print(f"[yellow]a comparison was killed here before:[/] restored {', '.join(restored)}")
            report.sweep(folder)
            self.server_version = self.triton.metadata()["version"]
            models = plan(composing(self.triton, self.plan.system), self.workload.max_batch)
            check_free(self.settings, ["LOADTEST_METRICS_PORT"])
            address, port = str(self.settings.bind_address()), self.settings.port("LOADTEST_METRICS_PORT")
            try:
                with (
                    progress_bar(2 * self.plan.rounds) as (show, say),
                    interruptible() as interrupt,
                    self.metrics.served(address, port),
                    self._crowd(lambda label: show(label, 0)) as crowd,
                    Switch(self.triton, models, folder, on_restore=interrupt.ignore) as switch,
                ):
                    self._run(crowd, switch, show, say)
            except (UserError, TritonError, KeyboardInterrupt) as reason:
                if not self.windows:
                    raise
                self.stopped = str(reason) or INTERRUPTED

    def _crowd(self, progress: Callable[[str], None]) -> Crowd:
        return MasterCrowd(self.job, self.workers, progress) if self.workers else LocalCrowd(self.job)

    def _run(
        self, crowd: Crowd, switch: Switch, show: Callable[[str, float], None], say: Callable[[str], None]
    ) -> None:
        experiment = Experiment(
            self.plan,
            crowd,
            self.triton,
            switch,
            self.metrics,
            lambda label, part: show(label, len(self.windows) + part),
        )
        say(f"{'round':>5}  {'mode':<8}{'requests/s':>11}{'p95 ms':>9}{'batch':>8}{'failed':>8}")

        def on_window(window: Window) -> None:
            self.windows.append(window)
            say(results.window_line(window))

        experiment.run(on_window)


def main() -> int:
    comparison = Comparison(Settings.load())
    comparison.measure()
    if not results.paired(comparison.windows):
        why = escape(comparison.stopped or "nothing was answered in both modes")
        err.print(f"[red]not proven:[/] {why}, before one round was complete: there is nothing to compare")
        return 130 if comparison.stopped == INTERRUPTED else 1
    found = report.results_of(comparison)
    folder = report.write(found, comparison)
    print_table(found, out)
    shown = os.path.relpath(folder)
    out.print(f"\nreport  {shown}/report.html  (numbers: {shown}/results.json)")
    out.print("The stack stays up: `make status` shows it, `make locust` loads it by hand, `make down` stops it.")
    for complaint in found["complaints"]:
        err.print(f"[red]not proven:[/] {escape(complaint)}")
    if comparison.stopped == INTERRUPTED:
        return 130
    return 1 if found["complaints"] else 0


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[tuple]:
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task("", total=total)

        def show(label: str, done: float) -> None:
            progress.update(task, description=label, completed=done)

        yield show, lambda line: progress.console.print(line)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """Ctrl-C and its like raise KeyboardInterrupt at the next wait, but not while the server is being put right."""

    def __init__(self) -> None:
        self.greenlet = greenlet.getcurrent()
        self.ignored = False
        self.came = False

    def ignore(self) -> None:
        self.ignored = True

    def __call__(self) -> None:
        self.came = True
        err.print("stopping: putting the server's configuration back")
        if not self.ignored:
            self.ignored = True
            gevent.kill(self.greenlet, KeyboardInterrupt)


@contextlib.contextmanager
def interruptible() -> Iterator[Interrupt]:
    interrupt = Interrupt()
    handlers = [gevent.signal_handler(number, interrupt) for number in SIGNALS]
    try:
        yield interrupt
    finally:
        for handler in handlers:
            handler.cancel()
        # gevent leaves the kernel's default behind, which would end us without a word while the report is written; and
        # whoever interrupted us before only waits for that.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN if interrupt.came else signal.default_int_handler)
