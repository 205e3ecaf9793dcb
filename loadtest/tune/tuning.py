"""The command `make tune`: read the settings, search, and write the report."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import psutil

from loadtest.compare.compare import INTERRUPTED, Comparison, interruptible, progress_bar
from loadtest.load.users import Users
from loadtest.measure.statistics import geometric_mean, mean_known
from loadtest.measure.verdicts import EXIT_CODES, PROVEN, Cause, Code, busy_machine, judge
from loadtest.reports import report as reports
from loadtest.server.machine import OtherPrograms
from loadtest.server.switching import Capacity, Switch, Switched
from loadtest.tune import report, table
from loadtest.tune.goal import REPORT_S, Goal
from loadtest.tune.knobs import Candidate, all_knobs, changed_fields, configure
from loadtest.tune.running_server import LONG_TRY_S, Answers, RunningServer
from loadtest.tune.search import (
    BETTER,
    NOT_COMPARED,
    NOT_CONFIRMED,
    NOTHING_BETTER,
    TOO_BUSY,
    Arm,
    Budget,
    BudgetSpent,
    CandidateFailed,
    Log,
    Measured,
    Search,
)
from loadtest.tune.winner import winner_files
from triton_transformers.cli import err, out
from triton_transformers.settings import Settings, UserError
from triton_transformers.triton import Config, TritonError, engines

# How often the best rate is held for longer at the end, and the seconds that must be left for that.
HOLDS, HOLD_S = 2, 35.0
# Seconds in which other programs are watched before the search.
LOOK_S = 2.0
# The cause of the verdict for each way in which a search ends without a better configuration.
CODES = {NOTHING_BETTER: Code.NOTHING_BETTER, NOT_CONFIRMED: Code.NOT_CONFIRMED, TOO_BUSY: Code.REPEATS_DISAGREE}


class Tuning:
    def __init__(self, settings: Settings) -> None:
        self.budget = Budget(settings.minutes * 60)
        self.settings = settings
        # Any RATE makes the load an open loop. A search for the highest rate then sets others.
        self.subject = Comparison(settings if settings.rate else settings.replace(RATE="1"))
        self.stopped = ""
        self.engines: dict[str, str] = {}
        self.held = ""  # a note: how the best configuration held its rate

    @cached_property
    def goal(self) -> Goal:
        return Goal.from_settings(self.settings)

    @cached_property
    def configs(self) -> dict[str, Config]:
        """Return the configurations that the user has; a comparison that was killed is undone before."""
        return self.subject.configs

    def run(self) -> None:
        """Search, and restore the server's configuration whatever happens."""
        folder = self.settings.reports
        _ = self.goal  # an invalid setting fails before anything starts
        with self.subject.alone_on_the_server("search") as note:
            # From here on `subject` may read the server's configurations, which it does once.
            self.engines = engines(self.settings.url("TRITON_METRICS_PORT"))
            self.subject.cores = Capacity.from_server(self.settings).cores
            self.knobs = all_knobs(self.configs, self.subject.cores, self.engines)
            if not self.knobs:
                raise UserError(
                    f"'{self.subject.plan.system}' has nothing to tune: docs/sizing.md lists what is searched"
                )
            if self.goal.first_token_ms and not self.subject.generates:
                raise UserError(f"P95_FIRST_TOKEN: '{self.subject.plan.system}' generates no text: set P95 instead")
            models = [Switched(name, config, {}, batches=True) for name, config in self.configs.items()]
            try:
                with (
                    progress_bar(1, lambda label, seconds: note("", seconds)) as (show, log),
                    interruptible() as interrupt,
                    self.subject.users(lambda label: show(label, 0)) as users,
                    Switch(self.subject.triton, models, folder, on_restore=interrupt.ignore) as switch,
                ):
                    self._search(users, switch, show, log)
            except BudgetSpent:
                minutes = self.settings["MINUTES"]
                raise UserError(f"MINUTES={minutes}: not even one measurement fits: set more MINUTES") from None
            except (UserError, TritonError, CandidateFailed, OSError, KeyboardInterrupt) as reason:
                if not hasattr(self, "search") or not self.search.original.values:
                    raise UserError(str(reason)) if isinstance(reason, CandidateFailed) else reason from None
                self.stopped = str(reason) or INTERRUPTED

    def _search(
        self, users: Users, switch: Switch, show: Callable[[str, float], None], log: Callable[[str], None]
    ) -> None:
        url, system = self.settings.url("TRITON_HTTP_PORT"), self.subject.plan.system
        others = OtherPrograms.from_environment()
        answers = Answers(url, system, self.subject.examples.requests, self.subject.generates)
        self.server = RunningServer(
            goal=self.goal,
            users=users,
            switch=switch,
            triton=self.subject.triton,
            system=system,
            configure=lambda candidate: configure(self.configs, self.knobs, candidate),
            capacity=lambda: Capacity.from_server(self.settings),
            answers=answers,
            random=random.Random(self.subject.job.seed),
            budget=self.budget,
            others=others,
        )
        measurements = Log(
            self.settings.reports / f".tune-{self.subject.triton.name}.json",
            self._identity(),
            self.server.measure,
            self.server.heaviest_first,
        )
        if self.settings.resume:
            measurements.resume()
        self.server.load(Candidate())
        self._look_at_the_machine(log)
        budget = self.budget

        def describe(label: str) -> None:
            left = max(0, int(budget.seconds - budget.elapsed))
            show(f"{label}, {left // 60}:{left % 60:02} left", min(1.0, budget.elapsed / budget.seconds))

        def on_measured(candidate: Candidate, measured: Measured) -> None:
            if not err.is_terminal:  # a log has no line at the bottom that shows the progress
                log(table.measured_line(budget.elapsed, candidate.label, measured, self.goal.larger_is_better))

        self.search = Search(
            self.knobs,
            measurements.measure,
            self.goal.larger_is_better,
            budget,
            measurements.order,
            self._same,
            describe,
            lambda arm: log(table.arm_line(self._arm(arm))),
            on_measured,
        )
        log(table.arms_header(self.goal.larger_is_better))
        workload = self.subject.workload
        users.start(workload.users, workload.spawn_rate or workload.users)
        while users.running < workload.users:
            users.check()
            time.sleep(0.05)
        self.search.run()
        if not self.search.original.values:
            raise BudgetSpent
        if self.search.outcome != NOT_COMPARED:
            measurements.delete()
        self._hold(describe)

    def _look_at_the_machine(self, log: Callable[[str], None]) -> None:
        """Raise UserError if the time is too short for a verdict here; print a warning if the machine is busy."""
        time.sleep(max(0.0, LOOK_S - (time.monotonic() - self.server.others.opened)))
        if busy := busy_machine(self.server.others.cores(), psutil.cpu_count() or 1, "now, ", ""):
            log(f"[yellow]doubtful:[/] {busy}. {busy.remedy}")
        # The server answers at least one request after the other, and with every core at most about so many at once.
        alone, load_s = 1 / self.server.answers.seconds, self.budget.longest_load
        minutes = self.settings.minutes
        if minutes < self.goal.minutes(self.subject.cores * alone, load_s) and not self.settings.resume:
            raise UserError(
                f"MINUTES={minutes:g}: a verdict takes more, because a request alone takes {1000 / alone:.0f} ms here, "
                f"and to load a configuration {load_s:.0f} s: set MINUTES={self.goal.minutes(alone, load_s)}"
            )

    def _hold(self, show: Callable[[str], None]) -> None:
        """Measure for longer whether the best configuration holds the rate that short tries found."""
        best = self.search.confirmed if self.search.outcome == BETTER else self.search.original
        if self.goal.rate or not best or self.search.outcome == TOO_BUSY or self.budget.left < HOLD_S:
            return
        rate = geometric_mean(best.values)
        show(f"{rate:.0f} requests/s for longer")
        try:
            p95s = [self.server.p95_for_long(best.candidate, rate) for _ in range(HOLDS)]
            shown = " and ".join(f"{p95:.0f}" for p95 in p95s)
            seen = f"the p95 was {shown} ms" if max(p95s) < math.inf else "the server did not always keep up"
        except CandidateFailed as error:
            seen = str(error)
        except BudgetSpent:
            return
        self.held = f"at {rate:.0f} requests/s, {HOLDS} times for {LONG_TRY_S:.0f} s, {seen}"

    def _same(self, one: Candidate, other: Candidate) -> bool:
        return configure(self.configs, self.knobs, one) == configure(self.configs, self.knobs, other)

    def _identity(self) -> dict[str, Any]:
        """Return what the measurements of a search depend on, for RESUME."""
        s = self.settings
        return {
            "goal": dataclasses.asdict(self.goal),
            "configuration": self.configs,
            "server": [self.subject.server_version, self.subject.cores],
            "load": [s[name] for name in ("WORKLOAD", "PROTOCOL", "USERS", "ARRIVALS", "TOKENS", "LOADTEST_CPUS")],
        }

    # --- the result ---------------------------------------------------------------------------------------------------

    def result(self) -> dict[str, Any]:
        """Return the content of tune.json."""
        search, shown = self.search, reports.shown(self.settings)
        best = search.best if search.best is not search.original else None
        confirmed = search.confirmed if search.confirmed and search.confirmed.ratio else None
        fields = self._changed_fields(best.candidate) if best else {}
        files, diff, obstacles = self.files(fields)
        workload = self.subject.workload
        return self.subject.identity() | {
            "engines": {model: engine for model, engine in sorted(self.engines.items()) if model in self.configs},
            "noun": self.subject.examples.noun,
            "goal": {name: value for name, value in dataclasses.asdict(self.goal).items() if value},
            "new_tokens": self.settings.tokens if self.subject.generates else None,
            "command": reports.command(self.settings, "tune"),
            "settings": {
                "workload": workload.name,
                "protocol": self.subject.job.protocol,
                "arrivals": self.subject.job.arrivals,
                "users": workload.users,
                "workers": self.subject.workers,
                "seed": self.subject.job.seed,
                "minutes": self.settings.minutes,
                "triton_cpus": shown["TRITON_CPUS"],
                "loadtest_cpus": shown["LOADTEST_CPUS"],
            },
            "arms": [self._arm(arm) for arm in search.arms],
            "original": {
                "label": search.original.label,
                "values": search.original.values,
                "probes": search.original.probes,
                "disturbed": search.disturbed,
            },
            "winner": {
                "label": best.candidate.label,
                "changes": best.candidate.as_changes(),
                "values": confirmed.values if confirmed else best.values,
                "probes": best.probes + (confirmed.probes if confirmed else []),
            }
            if best
            else None,
            "confirmation": {
                "original": confirmed.base_values,
                "winner": confirmed.values,
                "ratio": confirmed.ratio,
                "ci95": confirmed.ci95,
            }
            if confirmed
            else None,
            "outcome": search.outcome,
            "disagreement": {"label": search.disagreement[0].label, "values": search.disagreement[1]}
            if search.disagreement
            else None,
            "other_cores": mean_known(self.server.other_cores),
            "measurements": [
                {"label": candidate.label, "value": measured.value, "is_bound": measured.is_bound}
                for candidate, measured in search.measurements
            ],
            "uncounted": search.uncounted,
            "verdict": self.verdict(),
            "notes": self.notes() + obstacles,
            "configs": fields,
            "diff": diff,
            "files": files,
            "seconds": round(self.budget.elapsed, 1),
            "stopped": self.stopped,
            "resumed": self.settings.resume,
        }

    @staticmethod
    def _arm(arm: Arm) -> dict[str, Any]:
        own = [change for change in arm.candidate.changes if change not in arm.base.changes]
        shown = ("label", "values", "base_values", "ratio", "ci95", "outcome", "reason", "is_bound", "probes")
        changes = {"changes": Candidate(tuple(own)).as_changes(), "base": arm.base.as_changes()}
        return {name: getattr(arm, name) for name in shown} | changes

    def _changed_fields(self, candidate: Candidate) -> dict[str, dict[str, Any]]:
        configured = configure(self.configs, self.knobs, candidate)
        fields = {name: changed_fields(self.configs[name], config) for name, config in configured.items()}
        return {name: changed for name, changed in fields.items() if changed}

    def files(self, fields: dict[str, dict[str, Any]]) -> tuple[dict[str, str], str, list[str]]:
        """Return the winner's files and what differs in them, or nothing and why they cannot be written."""
        try:
            repository = self.settings.model_repository
            return *winner_files(fields, self.configs, repository, self.settings.profile), []
        except (UserError, OSError) as error:
            return {}, "", [str(error)]

    def notes(self) -> list[str]:
        """Return what to know about the configuration that the verdict names as the best."""
        notes = [self.held] * bool(self.held)
        if disturbed := self.search.disturbed:
            first = ", ".join(map(table.number, disturbed))
            notes.append(f"your configuration first reached {first}, which differs from the rest and does not count")
        if unfinished := self.search.uncounted - len(disturbed):
            notes.append(f"{unfinished} of the measurements had no other one beside them in time, and do not count")
        best = self.search.best.candidate if self.search.outcome == BETTER else Candidate()
        for candidate, name in {best: "the winner", Candidate(): "your configuration"}.items():
            if self.goal.rate and self.server.is_overloaded(candidate):
                problem = f"does not keep up with {self.goal.rate:g} requests/s"
                notes.append(f"{name} {problem}: its latency grows as long as the load lasts")
        system = self.subject.plan.system
        configured = configure(self.configs, self.knobs, best)
        before, after = (configs[system].get("max_batch_size", 0) for configs in (self.configs, configured))
        if after < before:
            notes.append(f"requests of more than {after} {self.subject.examples.noun} will be refused")
        return notes

    def verdict(self) -> dict[str, Any]:
        search, again = self.search, self.search.confirmed
        causes: list[Cause | None] = [
            Cause(Code.STOPPED, reason=self.stopped) if self.stopped else None,
            Cause(Code.WINNER_FAILED, reason=again.reason) if again and again.reason else None,
            busy_machine(mean_known(self.server.other_cores), psutil.cpu_count() or 1, "on average, ", ""),
        ]
        if self.server.client_bound:
            causes.append(Cause(Code.LOCUST_BOUND, effect="the server was not always the limit"))
        if search.outcome == BETTER and again:
            ratios = [math.exp(difference) for difference in search.differences(again)]
            return judge(causes, again.ratio, ratios, again.ci95, more="Set more MINUTES.")
        if search.outcome == NOT_COMPARED:
            needed_s = self.budget.needed(len(search.original.values)) + self.budget.longest_load + REPORT_S
            minutes = max(self.goal.minutes(math.inf), math.ceil(1.2 * needed_s / 60))
            causes.append(Cause(Code.TIME_OVER, minutes=minutes))
        else:
            causes.append(Cause(CODES[search.outcome]))
        return judge(causes)


def main() -> int:
    tuning = Tuning(Settings.load())
    tuning.run()
    result = tuning.result()
    table.print_result(result, out)  # before the report, which a full disk prevents
    folder = report.write(result, tuning.settings.reports)
    out.print(f"\nreport  {os.path.relpath(folder)}/tune.html  (numbers: tune.json)")
    if result["verdict"]["word"] == PROVEN and not tuning.settings.apply:
        out.print("APPLY=1 also writes and loads the new configuration.")
    return 130 if tuning.stopped == INTERRUPTED else EXIT_CODES[result["verdict"]["word"]]
