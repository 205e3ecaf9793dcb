"""The stack as every command sees it. local and docker beside this file hold what differs between the runtimes."""

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
from scripts.common.settings import Settings, UserError
from scripts.common.triton import Triton, TritonError, reason
from scripts.stack.neuron_cores import check_cores

# The programs and their ports.
PORTS = {
    "triton": ["TRITON_HTTP_PORT", "TRITON_GRPC_PORT", "TRITON_METRICS_PORT"],
    "prometheus": ["PROMETHEUS_PORT"],
    "grafana": ["GRAFANA_PORT"],
}
# What those with a page answer once they are up.
PROBES = {"prometheus": "/-/ready", "grafana": "/api/health"}


@dataclass(frozen=True)
class Process:
    """How one program is. `lost`: it does not stay up, and nobody brings it back."""

    state: str
    running: bool
    lost: bool
    seconds: float
    crashes: int


@dataclass
class Stack(ABC):
    settings: Settings

    @cached_property
    def state(self) -> Path:
        return self.settings.path("LOCAL_STATE").absolute()

    @cached_property
    def triton(self) -> Triton:
        return Triton(self.settings.url("TRITON_HTTP_PORT"), self.settings["TRITON_ADMIN_KEY"])

    # --- what a runtime knows ---------------------------------------------------------------------------------------

    @abstractmethod
    def running(self) -> bool: ...

    @abstractmethod
    def start(self) -> bool:
        """Start what does not run; true if Triton itself went on running. Safe to repeat."""

    @abstractmethod
    def stop(self) -> None: ...

    @abstractmethod
    def programs(self) -> list[str]:
        """Those that should run now: triton, prometheus, ..."""

    @abstractmethod
    def process(self, program: str) -> Process: ...

    @abstractmethod
    def log_tail(self, program: str, lines: int) -> str: ...

    @abstractmethod
    def logs(self, follow: bool) -> None:
        """Print them. Does not return if there are any."""

    @abstractmethod
    def clean(self) -> None: ...

    @abstractmethod
    def build(self) -> None: ...

    @abstractmethod
    def models(self) -> None:
        """Assemble the model repository."""

    @abstractmethod
    def loadtest(self) -> None:
        """The comparison, in place of this process."""

    @abstractmethod
    def locust(self) -> None:
        """Locust's own page, in place of this process."""

    @abstractmethod
    def dashboards(self) -> None:
        """The dashboards as one page, in place of this process."""

    # --- up and down ------------------------------------------------------------------------------------------------

    def up(self) -> None:
        if self.settings["PROFILE"] == "neuron":
            check_cores(self.settings)
        self.state.mkdir(parents=True, exist_ok=True)
        with exclusive(self.state, "another `make up` or `make down` is at work here"):
            if self.start():
                self.wait(self.not_live)
                self.reload_edited()
            self.wait(self.not_ready)

    def down(self) -> None:
        self.state.mkdir(parents=True, exist_ok=True)
        with exclusive(self.state, "another `make up` or `make down` is at work here"):
            if not self.running():
                out.print("not running")
                return
            with err.status("stopping"):
                self.stop()
            out.print("stopped")

    def wait(self, missing: Callable[[], str]) -> None:
        """Until nothing is missing; a program that does not stay up ends the wait with what its log says."""
        deadline = time.monotonic() + self.settings.integer("READY_TIMEOUT", minimum=1)
        with err.status("waiting until the stack is ready"):
            while waiting := missing():
                for name in self.programs():
                    if self.process(name).lost:
                        raise UserError(f"{name} does not stay up. Its log ends:\n{self.log_tail(name, 15)}")
                if time.monotonic() > deadline:
                    raise UserError(f"not ready within READY_TIMEOUT: {waiting}. `make logs` shows more")
                time.sleep(0.2)

    def not_live(self) -> str:
        """Which program does not answer yet, or nothing."""
        if not self.triton.live():
            return "Triton does not answer yet"
        for name in self.programs():
            if name in PROBES and not answers(self.page(name) + PROBES[name]):
                return f"{name.capitalize()} does not answer yet"
        return ""

    def not_ready(self) -> str:
        """What is still missing before every system can be asked, or nothing."""
        if missing := self.not_live():
            return missing
        try:
            index = self.triton.index()
        except TritonError as error:
            if error.status == 403:
                raise UserError(
                    f"the server on {self.triton.url} does not take this TRITON_ADMIN_KEY: it was started with another"
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
        """Triton keeps the reason of a failed load at start-up only in its log."""
        found = re.findall(rf"load failed for model '{re.escape(model)}': (.*)", self.log_tail("triton", 400))
        return reason(found[-1].replace("\\n", "\n").rstrip('"')) if found else ""

    def reload_edited(self) -> None:
        """A config.pbtxt or weights that changed since they were loaded; Triton leaves the others as they are.

        Step by step: loading an ensemble reloads its steps too, but does not tell when one of them fails.
        """
        index = self.triton.index()
        for system in self.settings.words("SYSTEMS"):
            loaded = index.get(system, ("", ""))[0] == "READY"
            for model in reversed(self.triton.composing(system)) if loaded else [system]:
                try:
                    self.triton.load(model)
                except TritonError as error:
                    stays = ", the one before stays" if loaded else ""
                    more = " (`make logs` says why)" if "failed to poll" in str(error) else ""
                    raise UserError(f"model '{model}' did not load{stays}: {error}{more}") from None

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
        """Print how the stack is; true if everything that should run does."""
        if not self.running():
            out.print("not running: `make up` starts it")
            return True
        well = True
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("process", "state", "up", "crashes recovered"):
            table.add_column(column)
        for name in self.programs():
            process = self.process(name)
            well &= process.running
            age = _duration(int(process.seconds)) if process.running else "-"
            table.add_row(name, _colour(process.state, process.running), age, str(process.crashes))
        out.print(table)
        out.print()
        return self.print_models() and well

    def print_models(self) -> bool:
        try:
            index = self.triton.index()
        except TritonError as error:
            out.print(f"models      unknown: {error}")
            return False
        log = self.log_tail("triton", 10**6)
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("model", "state", "dynamic batching", "crashes recovered"):
            table.add_column(column)
        for model, (state, why) in sorted(index.items()):
            ready = state == "READY"
            batching = _batching(self.triton.config(model)) if ready else reason(why)
            revived = log.count(f"revive: model '{model}' is back")
            table.add_row(model, _colour(state.lower(), ready), escape(batching), str(revived))
        out.print(table)
        out.print()
        self.print_urls()
        return all(state == "READY" for state, _ in index.values())


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
