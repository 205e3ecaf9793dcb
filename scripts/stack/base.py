"""The stack as every command sees it. `local` and `docker` beside this file hold what differs between the runtimes."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from scripts.common.cli import err, out
from scripts.common.files import exclusive
from scripts.common.http import answers
from scripts.common.settings import PROFILES, Settings, UserError
from scripts.common.triton import Triton, TritonError, reason
from scripts.stack.neuron_cores import check_cores

# Program -> the settings of its ports.
PORTS = {
    "triton": ["TRITON_HTTP_PORT", "TRITON_GRPC_PORT", "TRITON_METRICS_PORT"],
    "prometheus": ["PROMETHEUS_PORT"],
    "grafana": ["GRAFANA_PORT"],
}
# Program with a web page -> the path that answers once the program is ready.
PROBES = {"prometheus": "/-/ready", "grafana": "/api/health"}
UP_OR_DOWN = "another `make up` or `make down` is at work here"


@dataclass(frozen=True)
class Process:
    """The state of one program."""

    state: str
    running: bool
    gave_up: bool  # it crashed and will not be restarted
    seconds: float
    crashes: int


@dataclass
class Stack(ABC):
    """Triton, Prometheus and Grafana: what a runtime must implement, and what follows from it."""

    settings: Settings

    @cached_property
    def state(self) -> Path:
        return self.settings.path("LOCAL_STATE").absolute()

    @cached_property
    def triton(self) -> Triton:
        return Triton(self.settings.url("TRITON_HTTP_PORT"), self.settings["TRITON_ADMIN_KEY"])

    # --- implemented by each runtime --------------------------------------------------------------------------------

    @abstractmethod
    def running(self) -> bool: ...

    @abstractmethod
    def start(self) -> bool:
        """Start what does not run. Return whether Triton was running and was left alone. Safe to repeat."""

    @abstractmethod
    def stop(self) -> None: ...

    @abstractmethod
    def programs(self) -> list[str]:
        """Return the programs that should run now: triton, prometheus, ..."""

    @abstractmethod
    def process(self, program: str) -> Process: ...

    @abstractmethod
    def log_tail(self, program: str, lines: int) -> str: ...

    @abstractmethod
    def show_logs(self, follow: bool) -> str:
        """Replace this process by one that prints the logs. Return, if there are none, why."""

    @abstractmethod
    def clean(self) -> None: ...

    @abstractmethod
    def build(self) -> None: ...

    @abstractmethod
    def models(self) -> None:
        """Assemble the model repository."""

    @abstractmethod
    def loadtest(self) -> None:
        """Replace this process by the comparison."""

    @abstractmethod
    def locust(self) -> None:
        """Replace this process by Locust's own page."""

    @abstractmethod
    def dashboards(self) -> None:
        """Replace this process by the one that draws the dashboards as one page."""

    # --- up and down ------------------------------------------------------------------------------------------------

    def up(self) -> None:
        if self.settings.choice("PROFILE", PROFILES) == "neuron":
            check_cores(self.settings)
        self.settings.shares_memory()
        self.state.mkdir(parents=True, exist_ok=True)
        with exclusive(self.state, UP_OR_DOWN):
            if self.start():
                self.wait(self.not_live)
                self.reload_edited()
            self.wait(self.not_ready)

    def down(self) -> None:
        self.state.mkdir(parents=True, exist_ok=True)
        with exclusive(self.state, UP_OR_DOWN):
            if not self.running():
                out.print("not running")
                return
            with err.status("stopping"):
                self.stop()
            out.print("stopped")

    def wait(self, missing: Callable[[], str]) -> None:
        """Wait until nothing is missing. Raise with the end of its log if a program crashed for good."""
        deadline = time.monotonic() + self.settings.integer("READY_TIMEOUT", minimum=1)
        with err.status("waiting until the stack is ready"):
            while waiting_for := missing():
                for name in self.programs():
                    if self.process(name).gave_up:
                        raise UserError(f"{name} does not stay up. Its log ends:\n{self.log_tail(name, 15)}")
                if time.monotonic() > deadline:
                    raise UserError(f"not ready within READY_TIMEOUT: {waiting_for}. `make logs` shows more")
                time.sleep(0.2)

    def not_live(self) -> str:
        """Return which program does not answer yet, or nothing."""
        if not self.triton.live():
            return "Triton does not answer yet"
        for name in self.programs():
            if name in PROBES and not answers(self.page(name) + PROBES[name]):
                return f"{name.capitalize()} does not answer yet"
        return ""

    def not_ready(self) -> str:
        """Return what does not answer yet, a program or a system, or nothing."""
        if missing := self.not_live():
            return missing
        try:
            index = self.triton.index()
        except TritonError as error:
            if error.status == 403:
                raise UserError(
                    f"the server on {self.triton.url} does not accept this TRITON_ADMIN_KEY, because it was started "
                    "with another: stop that server, or set its key in .env"
                ) from None
            return str(error)
        for system in self.settings.words("SYSTEMS"):
            state, why = index.get(system, ("not loaded", ""))
            why = reason(why) or self.load_failure(system)
            if state == "UNAVAILABLE" or (state == "not loaded" and why):
                raise UserError(f"model '{system}' did not load: {why}")
            if state != "READY":
                return f"model '{system}' is {state.lower()}"
        return ""

    def load_failure(self, model: str) -> str:
        """Return why a model failed to load at start-up; only Triton's log has it."""
        failures = re.findall(rf"load failed for model '{re.escape(model)}': (.*)", self.log_tail("triton", 400))
        return reason(failures[-1].replace("\\n", "\n").rstrip('"')) if failures else ""

    def reload_edited(self) -> None:
        """Load again the models of SYSTEMS; Triton reloads only those whose config.pbtxt or weights changed.

        Load the steps of an ensemble one by one: loading the ensemble reloads them too, but does not report when one
        of them fails.
        """
        index = self.triton.index()
        for system in self.settings.words("SYSTEMS"):
            loaded = index.get(system, ("", ""))[0] == "READY"
            for model in reversed(self.triton.composing(system)) if loaded else [system]:
                try:
                    self.triton.load(model)
                except TritonError as error:
                    previous = ", the previous version stays loaded" if loaded else ""
                    hint = " (`make logs` shows why)" if "failed to poll" in str(error) else ""
                    raise UserError(f"model '{model}' did not load{previous}: {error}{hint}") from None

    # --- looking ----------------------------------------------------------------------------------------------------

    def page(self, program: str) -> str:
        (port,) = PORTS[program]
        return self.settings.url(port)

    def print_urls(self) -> None:
        url = self.settings.url
        out.print(f"Triton      {url('TRITON_HTTP_PORT')}  (gRPC {self.settings.port('TRITON_GRPC_PORT')})")
        out.print(f"metrics     {url('TRITON_METRICS_PORT')}/metrics")
        for name in self.programs():
            if name in PROBES:
                out.print(f"{name.capitalize():<12}{self.page(name)}")

    def status(self) -> bool:
        """Print the state of every process and model. Return whether everything that should run does."""
        if not self.running():
            out.print(f"not running (RUNTIME={self.settings['RUNTIME']}): `make up` starts it")
            return True
        healthy = True
        table = _table("process", "state", "up", "crashes recovered")
        for name in self.programs():
            process = self.process(name)
            healthy &= process.running
            age = _duration(int(process.seconds)) if process.running else "-"
            table.add_row(name, _colour(process.state, process.running), age, str(process.crashes))
        out.print(table)
        out.print()
        return self.print_models() and healthy

    def print_models(self) -> bool:
        """Print the state of every model. Return whether all are ready."""
        try:
            index = self.triton.index()
        except TritonError as error:
            out.print(f"models      unknown: {error}")
            return False
        log = self.log_tail("triton", 10**6)
        table = _table("model", "state", "dynamic batching", "crashes recovered")
        for model, (state, why) in sorted(index.items()):
            ready = state == "READY"
            batching = _batching(self.triton.config(model)) if ready else reason(why)
            recovered = log.count(f"revive: model '{model}' is back")
            table.add_row(model, _colour(state.lower(), ready), escape(batching), str(recovered))
        out.print(table)
        out.print()
        self.print_urls()
        return all(state == "READY" for state, _ in index.values())

    def logs(self, follow: bool) -> None:
        out.print(f"no logs: {self.show_logs(follow)}")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column)
    return table


def _duration(seconds: int) -> str:
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def _batching(config: dict) -> str:
    if "ensemble_scheduling" in config:
        return "by its steps"
    return "on" if "dynamic_batching" in config else "off"


def _colour(text: str, good: bool) -> str:
    return f"[green]{text}[/]" if good else f"[red]{text}[/]"
