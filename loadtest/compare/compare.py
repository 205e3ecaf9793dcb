"""make loadtest: compare the modes or the formats of a system on the running server, and write the report."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import gevent
import greenlet
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.load.examples import ABOUT, Examples, ask
from loadtest.load.locust_users import Job
from loadtest.load.telemetry import Metrics
from loadtest.load.users import Users
from loadtest.load.workload import Workload, worker_count
from loadtest.measure import statistics, verdicts
from loadtest.measure.statistics import Results
from loadtest.measure.verdicts import EXIT_CODES, Cause, Code, judge
from loadtest.measure.windows import Experiment, Plan, Window
from loadtest.reports import report
from loadtest.reports.report import COMPARED, GENERATING_HEADER, WINDOWS_HEADER, print_table, window_line
from loadtest.server.generating import Reader
from loadtest.server.machine import OtherPrograms, host, pin
from loadtest.server.switching import Capacity, Switch, Switched, composing, plan, plan_formats, restore_after_kill
from triton_transformers.answers import agreement
from triton_transformers.cli import err, out
from triton_transformers.files import ANOTHER_COMPARISON, Measurement, comparison_lock, exclusive
from triton_transformers.ports import check_free
from triton_transformers.prometheus import Prometheus
from triton_transformers.settings import Settings, UserError
from triton_transformers.tasks.examples import runs_rows_alone
from triton_transformers.tasks.task import PIPELINE
from triton_transformers.triton import Config, Triton, TritonError, engines, generates

INTERRUPTED = "interrupted"
# The name of a run: when it began.
RUN = "%Y%m%dT%H%M%SZ"
Note = Callable[[str, float | None], None]


@dataclass
class Comparison:
    settings: Settings
    windows: list[Window] = field(default_factory=list)
    engines: dict[str, set[str]] = field(default_factory=dict)  # of each model that reports one, over all windows
    stopped: str = ""  # why the rounds ended early
    server_version: str = ""
    cores: int = 0  # of the server
    left_out: dict[str, str] = field(default_factory=dict)  # mode -> why the server cannot be measured in it
    quality: dict[str, dict[str, float]] = field(default_factory=dict)  # format -> its answers beside the first one's
    run: str = field(default_factory=lambda: f"{datetime.now(UTC):{RUN}}")  # its name in reports and metrics

    @cached_property
    def triton(self) -> Triton:
        return Triton.from_settings(self.settings)

    @cached_property
    def workload(self) -> Workload:
        # Only the default number of users depends on the system.
        return Workload.from_settings(self.settings, not self.settings.users and self.generates)

    @cached_property
    def configs(self) -> dict[str, Config]:
        """Return the configuration of each of the system's models when the command begins.

        An earlier comparison that was killed may have left them in one of its modes.
        """
        return composing(self.triton, self.settings.system)

    @cached_property
    def generates(self) -> bool:
        """Return whether the system generates text."""
        return any(map(generates, self.configs.values()))

    @cached_property
    def is_pipeline(self) -> bool:
        return any(config.get("backend") == PIPELINE for config in self.configs.values())

    @cached_property
    def plan(self) -> Plan:
        s = self.settings
        return Plan(
            system=s.system,
            rounds=s.rounds,
            window_s=s.window,
            warmup_s=s.warmup,
            users=self.workload.users,
            spawn_rate=self.workload.spawn_rate,
            generates=self.generates,
            rate=self.workload.rate,
            may_be_slow=self.is_pipeline,
        )

    @cached_property
    def examples(self) -> Examples:
        return Examples.from_configs(self.configs, self.settings, self.workload.corpus.texts)

    @cached_property
    def job(self) -> Job:
        return Job.from_settings(self.settings, self.workload, self.examples)

    @cached_property
    def workers(self) -> int:
        return worker_count(self.settings, self.workload)

    @cached_property
    def metrics(self) -> Metrics:
        return Metrics(self.run, self.plan.system, self.modes)

    @property
    def modes(self) -> list[str]:
        """Return what is compared: the formats of FORMATS, or the modes."""
        return [mode for mode in self.settings.formats or self.settings.modes if mode not in self.left_out]

    def measure(self) -> None:
        """Fill `windows`, and restore the server's configuration whatever happens."""
        folder = self.settings.reports
        # Check every setting before anything starts.
        _ = self.plan, self.workers, self.settings.min_ratio, self.job
        with self.alone_on_the_server("comparison") as note:
            models = self.switched_models()
            check_free(self.settings, ["LOADTEST_METRICS_PORT"])
            address, port = str(self.settings.bind_address), self.settings.loadtest_metrics_port
            with (
                progress_bar(len(self.modes) * self.plan.rounds, note) as (show, log),
                interruptible() as interrupt,
                self.metrics.served(address, port),
            ):
                try:
                    with (
                        self.users(lambda label: show(label, 0)) as users,
                        Switch(self.triton, models, folder, on_restore=interrupt.ignore) as switch,
                    ):
                        self._compare_answers(switch, show)
                        self._run(users, switch, show, log)
                except (UserError, TritonError, KeyboardInterrupt) as reason:
                    if not self.windows:
                        raise
                    self.stopped = str(reason) or INTERRUPTED
                self.metrics.verdict(self.verdict())

    @contextlib.contextmanager
    def alone_on_the_server(self, kind: str) -> Iterator[Note]:
        """Hold the lock of comparisons and searches, and undo one that was killed.

        Yield a function that tells other commands what is being done, and for how many more seconds.
        """
        folder, lock = self.settings.reports, comparison_lock(self.settings)
        pin(self.settings.loadtest_cpus)

        def note(doing: str, seconds: float | None) -> None:
            Measurement(kind, self.settings.system, doing, time.time() + seconds if seconds else 0.0).write(lock)

        with exclusive(lock, ANOTHER_COMPARISON, wait=False), contextlib.ExitStack() as stack:
            note("", None)
            stack.callback(lock.write_text, "")
            if restored := restore_after_kill(self.triton, folder):
                err.print(f"[yellow]an earlier comparison or search was killed:[/] restored {', '.join(restored)}")
            report.remove_leftovers(folder)
            self.server_version = self.triton.metadata()["version"]
            yield note

    def users(self, progress: Callable[[str], None]) -> Users:
        if not self.workers:
            return Users(self.job)
        from loadtest.load.worker_users import WorkerUsers

        return WorkerUsers(self.job, self.workers, progress)

    def identity(self) -> Results:
        """Return what ran on which machine and server, as every report names it."""
        shown = report.shown(self.settings)
        return {
            "run": self.run,
            "date": f"{datetime.strptime(self.run, RUN):%Y-%m-%d %H:%M} UTC",
            "system": self.plan.system,
            "profile": shown["PROFILE"],
            "runtime": shown["RUNTIME"],
            "host": host(),
            "triton": {
                "version": self.server_version,
                "image": os.environ.get("TRITON_IMAGE_BUILT"),
                "cores": self.cores,
            },
        }

    def results(self) -> Results:
        """Return the content of results.json."""
        windows = self.complete_windows()
        model = statistics.heaviest(windows)
        shown = report.shown(self.settings)
        results = self.identity() | {
            "settings": {
                "workload": self.workload.name,
                "protocol": self.job.protocol,
                "users": self.workload.users,
                "workers": self.workers,
                "spawn_rate": self.workload.spawn_rate,
                "wait": list(self.workload.wait),
                "rate": self.plan.rate,
                "arrivals": self.job.arrivals if self.plan.rate else None,
                "max_batch": self.workload.max_batch,
                "rounds": self.plan.rounds,
                "window_s": self.plan.length_s,
                "window_requests": self.plan.window_requests,
                "warmup_s": self.plan.warmup_s,
                "seed": self.job.seed,
                self.examples.noun: self._sent(),
                **({"new_tokens": self.settings.tokens} if self.generates else {}),
                "min_ratio": self.settings.min_ratio or 0.0,
                "triton_cpus": shown["TRITON_CPUS"],
                "loadtest_cpus": shown["LOADTEST_CPUS"],
            },
            "command": report.command(self.settings),
            "engines": {model: ", ".join(sorted(names)) for model, names in sorted(self.engines.items())},
            "model": model,
            "formats": list(self.settings.formats),
            "quality": self.quality,
            "noun": self.examples.noun,
            "unit": self.examples.unit,
            "runs_rows_alone": self.is_pipeline and any(map(runs_rows_alone, self.configs.values())),
            "generates": self.generates,
            "modes": {
                mode: statistics.summary([window for window in windows if window.mode == mode], model)
                for mode in statistics.modes_of(windows, self.settings.formats)
            },
            "left_out": self.left_out,
            "windows": [statistics.window_record(w, model) for w in self.windows],
            "verdict": statistics.verdict(windows, model, self.settings.formats),
            "stopped": self.stopped,
            "slowest": self.slowest_requests,
        }
        batching = None
        if not self.settings.formats:  # formats batch as they are configured, or not at all
            remedy = statistics.more_batches(self.workload.users, self.plan.rate, self.generates)
            batching = statistics.batching_error(windows, model, self.examples.noun, remedy)
        return results | {"verdict": statistics.judged(results, batching)}

    def complete_windows(self) -> list[Window]:
        return [window for by_mode in statistics.complete_rounds(self.windows) for window in by_mode.values()]

    def verdict(self) -> Results:
        if self.complete_windows():
            verdict: Results = self.results()["verdict"]
            return verdict
        reason = self.stopped or f"no requests were answered in one of {', '.join(self.modes)}"
        return judge([Cause(Code.NO_ROUND, reason=reason)])

    @property
    def exit_code(self) -> int:
        return 130 if self.stopped == INTERRUPTED else EXIT_CODES[self.verdict()["word"]]

    @cached_property
    def slowest_requests(self) -> Results | None:
        """Return the slowest requests of the windows with dynamic batching; None without these, or without traces."""
        if self.settings.formats or not (folder := self.settings.traces()):
            return None
        from loadtest.compare import waterfalls

        last = self.windows[-1]
        arrived_at = last.began_at + last.end - last.start + waterfalls.ARRIVAL_S
        # The clock may have been set back since.
        time.sleep(min(max(0.0, arrived_at - time.time()), waterfalls.ARRIVAL_S))
        try:
            return waterfalls.slowest(folder, self.plan.system, self.windows)
        except Exception as error:  # the measurements matter more than any error here
            err.print(f"[yellow]the traces in {folder} could not be read:[/] {escape(repr(error))}")
            return None

    def note_engines(self, models: Collection[str]) -> None:
        """Keep the engine of each of these models, which another mode may replace."""
        for model, engine in engines(self.settings.url("TRITON_METRICS_PORT")).items():
            if model in models:
                self.engines.setdefault(model, set()).add(engine)

    def _compare_answers(self, switch: Switch, show: Callable[[str, float], None]) -> None:
        """Fill `quality`, with the requests of the users."""
        step = math.ceil(len(self.job.requests) / COMPARED)
        requests, url = self.job.requests[::step], self.settings.url("TRITON_HTTP_PORT")
        answers = {}
        for form in self.settings.formats:
            show(f"{form}: {len(requests)} requests, one at a time", 0)
            switch.to(form)
            try:
                answers[form] = [ask(url, self.plan.system, request, self.examples.outputs) for request in requests]
            except (OSError, ValueError) as error:
                raise UserError(f"FORMAT={form} refuses an example request: {error}. See `make logs`") from None
        for form in self.settings.formats[1:]:
            self.quality[form] = agreement(answers[self.settings.formats[0]], answers[form])

    def switched_models(self) -> list[Switched]:
        """Return the configurations of the modes; leave `instances` out if the server cannot run it."""
        configs = composing(self.triton, self.plan.system)
        capacity = Capacity.from_server(self.settings)
        self.cores = capacity.cores
        modes = self.modes
        if self.settings.formats:
            served = {form: composing(self.triton, name) for name, form in self.settings.variants().items()}
            return plan_formats(configs[self.plan.system], served)
        models = plan(configs, self.workload.max_batch, modes, self.cores)
        if "instances" in modes and (obstacle := capacity.obstacle(configs)):
            if len(modes) == 2:
                raise UserError(f"MODES={self.settings['MODES']}: instances cannot be measured, because {obstacle}")
            self.left_out["instances"] = obstacle
            models = plan(configs, self.workload.max_batch, self.modes)
        return models

    def _sent(self) -> dict[str, Any]:
        if self.examples.noun == "texts":
            corpus = self.workload.corpus
            return {"file": corpus.name, "count": len(corpus.texts), "sha256": corpus.sha256}
        about = ABOUT[self.examples.noun]
        return {"count": len(self.examples.requests), "sha256": self.examples.sha256, "about": about}

    def _run(
        self, users: Users, switch: Switch, show: Callable[[str, float], None], log: Callable[[str], None]
    ) -> None:
        generating = [model for model, config in self.configs.items() if generates(config)][:1]
        experiment = Experiment(
            self.plan,
            self.modes,
            self.left_out,
            users,
            self.triton,
            switch,
            self.metrics,
            OtherPrograms.from_environment(),
            lambda label, part: show(label, len(self.windows) + part),
            Reader(self.settings.url("TRITON_METRICS_PORT"), *generating) if generating else None,
        )
        log(self.plan.announcement(self.modes))
        log(GENERATING_HEADER if self.generates else WINDOWS_HEADER)

        def on_window(window: Window) -> None:
            self.windows.append(window)
            self.note_engines(switch.counted().values())
            log(window_line(window))

        experiment.run(on_window)


def main() -> int:
    comparison = Comparison(Settings.load())
    comparison.measure()
    if not comparison.complete_windows():
        err.print(escape(verdicts.sentence(comparison.verdict(), "there is nothing to compare.")))
        return comparison.exit_code
    results = comparison.results()
    prometheus = Prometheus(comparison.settings.url("PROMETHEUS_PORT"))
    with err.status("drawing the report"):
        dashboard = report.drawn_dashboard(prometheus, results, comparison.windows)
    print_table(results, out)  # before the report, which a full disk prevents
    with err.status("writing the report"):
        folder = report.write(results, comparison.windows, comparison.settings.reports, dashboard)
    path = os.path.relpath(folder)
    out.print(f"\nreport  {path}/report.html  (numbers: {path}/results.json)")
    out.print("The stack stays up: `make status` shows it, `make locust` loads it by hand, `make down` stops it.")
    return comparison.exit_code


@contextlib.contextmanager
def progress_bar(
    total: int, note: Note = lambda doing, seconds: None
) -> Iterator[tuple[Callable[[str, float], None], Callable[[str], None]]]:
    """Show a progress bar; yield a function that updates it and one that prints a line above it."""
    began = time.monotonic()
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task("", total=total)

        def show(label: str, done: float) -> None:
            progress.update(task, description=label, completed=done)
            known = done > total / 20  # earlier, an estimate says little
            note(label, (time.monotonic() - began) * (total / done - 1) if known else None)

        yield show, lambda line: progress.console.print(line)


# --- Ctrl-C: stop at the next wait, but never while the server's configuration is restored ----------------------------

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """Raises KeyboardInterrupt in the greenlet that created it, at its next wait, until ignore() is called."""

    def __init__(self) -> None:
        self.greenlet = greenlet.getcurrent()
        self.ignored = self.received = False

    def ignore(self) -> None:
        self.ignored = True

    def __call__(self) -> None:
        self.received = True
        err.print("stopping: restoring the server's configuration")
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
        # gevent restores SIG_DFL, which would kill the process while it writes the report. After a first signal the
        # user only waits for that report, so later signals are ignored.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN if interrupt.received else signal.default_int_handler)
