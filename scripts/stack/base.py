"""The stack as every command sees it. `local` and `docker` beside this file hold what differs between the runtimes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from export.removal import removable, remove
from scripts.stack.neuron_cores import check_cores
from scripts.stack.systems import ModelControl, ServedSystems
from triton_transformers.certificate import expiry_warning
from triton_transformers.cli import err, out, without_codes
from triton_transformers.files import Measurement, exclusive
from triton_transformers.http import answers
from triton_transformers.model_config import check_edits, find_config, is_outdated, tuned_configs, with_steps
from triton_transformers.prometheus import Prometheus, PrometheusError
from triton_transformers.settings import Settings, UserError, restarting
from triton_transformers.tasks.command import first_command
from triton_transformers.triton import Triton, TritonError, batching, engines
from triton_transformers.triton_messages import reason

# Program -> the settings of its ports.
PORTS = {
    "gateway": ["GATEWAY_PORT", "GATEWAY_METRICS_PORT"],
    "triton": ["TRITON_HTTP_PORT", "TRITON_GRPC_PORT", "TRITON_METRICS_PORT"],
    "prometheus": ["PROMETHEUS_PORT"],
    "grafana": ["GRAFANA_PORT"],
    "traces": ["TRACE_PORT"],
    "jaeger": ["JAEGER_PORT"],
}
# Program with a web page -> the path that answers once the program is ready.
PROBES = {"gateway": "/health", "prometheus": "/-/ready", "grafana": "/api/health", "jaeger": "/"}
GATEWAY_SETTINGS = restarting("gateway")
COMPARISON_RUNS = "a comparison or a search is running against this stack"
WOULD_UNLOAD = f"{COMPARISON_RUNS}, and SYSTEMS lacks systems that the server would unload"
WOULD_DISTURB = f"{COMPARISON_RUNS}, and adding a system would disturb it"
WOULD_REFRESH = f"{COMPARISON_RUNS}: edited configurations wait for the next `make up`"
WOULD_RESTART = f"{COMPARISON_RUNS}, and this command would restart the stack"
# The state of a system that Triton does not know, and the reason to show.
NOT_LOADED = ("NOT LOADED", "`make up` loads it, or names the reason")
UP_OR_DOWN = "another `make up` or `make down` is at work here"


def certificate(settings: Settings) -> str:
    """Return the digest of the gateway's certificate, which a renewal changes; nothing without a certificate."""
    tls = settings.tls()
    return hashlib.sha256(tls[0].read_bytes()).hexdigest() if tls else ""


@dataclass(frozen=True)
class Process:
    """The state of one program."""

    state: str
    running: bool
    gave_up: bool  # it crashed and will not be restarted
    seconds: float
    crashes: int
    cause: str = ""  # of the crash, in one sentence, if it is known


@dataclass
class Stack(ABC):
    """The gateway, Triton, Prometheus and Grafana: what a runtime must implement, and what follows from it."""

    settings: Settings

    @cached_property
    def state(self) -> Path:
        return Path(os.path.abspath(self.settings.local_state))

    @cached_property
    def triton(self) -> Triton:
        return Triton.from_settings(self.settings)

    @cached_property
    def served(self) -> ServedSystems:
        return ServedSystems(self.state)

    @property
    def control(self) -> ModelControl:
        return ModelControl(
            self.triton,
            self.served,
            self.settings.model_repository,
            timeout=self.settings.ready_timeout,
            log=lambda: self.log_tail("triton", 200),
            cause=lambda: self.process("triton").cause,
            wait_until_live=lambda: self.wait(self.not_live),
            full_memory=self.full_shared_memory,
            assembled=self.assembled,
        )

    def assembled(self, system: str) -> list[str]:
        """Return the models of a system on disk. Raise UserError if a configuration is unreadable or not in force."""
        repository, profile = self.settings.model_repository, self.settings.profile
        models = with_steps(system, repository, profile)
        for model in models:
            check_edits(model, repository, profile)
        return models

    # --- implemented by each runtime --------------------------------------------------------------------------------

    # The settings of the running programs, except the gateway's own. A change of one restarts them.
    started_with: ClassVar[tuple[str, ...]]

    @abstractmethod
    def running(self) -> bool: ...

    @abstractmethod
    def check(self, systems: list[str]) -> None:
        """Raise UserError if this machine cannot serve these systems with the settings. Start and stop nothing."""

    @abstractmethod
    def start(self, systems: list[str]) -> None:
        """Start what does not run; restart what runs with other settings, and print that first. Safe to repeat."""

    @abstractmethod
    def stop(self) -> None: ...

    @property
    @abstractmethod
    def comparison_lock(self) -> Path:
        """Return the file whose lock a comparison against this stack holds."""

    @property
    def comparison_note(self) -> Path:
        """Return the file in which a comparison writes what it does."""
        return self.comparison_lock

    @abstractmethod
    def check_comparison(self) -> None:
        """Raise UserError if no comparison can start now, because another one runs or a port is taken."""

    @abstractmethod
    def programs(self) -> list[str]:
        """Return the programs that should run now: triton, prometheus, ..."""

    @abstractmethod
    def process(self, program: str) -> Process: ...

    @abstractmethod
    def full_shared_memory(self) -> str:
        """Return what fills the memory that Triton shares with its Python processes, and what to do."""

    @abstractmethod
    def log_tail(self, program: str, lines: int) -> str: ...

    @abstractmethod
    def log_command(self, follow: bool) -> list[str]:
        """Return the command that prints the logs. If there are none, print why and return nothing."""

    @abstractmethod
    def clean(self) -> None: ...

    @abstractmethod
    def build(self) -> None: ...

    @abstractmethod
    def models(self, systems: list[str]) -> None:
        """Assemble those of the systems that are not in place."""

    @abstractmethod
    def models_lock(self) -> AbstractContextManager[None]:
        """Return the lock that keeps other commands from assembling or removing systems."""

    @abstractmethod
    def run(self, program: str) -> int:
        """Run loadtest, tune, locust or dashboards. Return its exit code.

        Only after tune, or with FORMATS, may the caller go on.
        """

    # --- up and down ------------------------------------------------------------------------------------------------

    def up(self, systems: list[str], unload: Collection[str] = (), refresh: Collection[str] | None = None) -> None:
        """Start the stack, serve these systems and unload others. A running server keeps answering meanwhile.

        Refresh those of the loaded systems that `refresh` names, or all.
        """
        if self.settings.profile == "neuron":
            check_cores(self.settings, systems)
        with exclusive(self.state, UP_OR_DOWN):
            # A server that restarts loads the systems of this list. The systems that are not loaded yet must stay out
            # of it: this command loads them.
            served = self.served_now()
            self.served.write(name for name in served if name not in unload)
            self.served.request([*served, *systems])
            self.start(systems)
            self.wait(self.not_live)
            self.check_key()
            if unload:
                with self.no_comparison():
                    self.control.unload(unload)
            refreshed = systems if refresh is None else refresh
            try:
                self.check_no_comparison()
            except UserError:
                out.print(WOULD_REFRESH)
                refreshed = ()
            else:
                # Unload what interrupted commands left on the server.
                if leftover := {*self.served.unfinished()}.difference(systems, self.control.listed()):
                    self.control.unload(sorted(leftover))
            self.control.serve(systems, refreshed)

    def unload(self, systems: Collection[str]) -> None:
        """Unload systems of the running server."""
        if systems:
            self.check_key()
            with exclusive(self.state, UP_OR_DOWN), self.no_comparison():
                self.control.unload(systems)

    def remove(self, system: str) -> tuple[str, ...]:
        """Unload a system, delete its files, and return the names of its models."""
        repository = self.settings.model_repository
        removable(system, repository)  # before the wait for other commands, which may change the record
        with exclusive(self.state, UP_OR_DOWN) if self.state.is_dir() else nullcontext(), self.models_lock():
            record = removable(system, repository)
            if self.running():
                self.check_key()
                with self.no_comparison():
                    # Each by its name: if one did not load, the system is unknown and the others are loaded.
                    self.control.unload(record.models)
            size = remove(record, repository)
        out.print(f"{system}: removed, {decimal(size)}")
        return record.models

    def refresh(self, system: str) -> None:
        """Let the running server load what changed of a system. It keeps answering meanwhile."""
        with exclusive(self.state, UP_OR_DOWN):
            self.check_key()
            with self.no_comparison():
                self.control.serve([system], [system])

    def served_now(self) -> list[str]:
        """Return the systems that the running server serves."""
        return self.control.listed() if self.running() else []

    def down(self) -> None:
        # Without the folder nothing was started here, and a read-only checkout could not create it.
        with exclusive(self.state, UP_OR_DOWN) if self.state.is_dir() else nullcontext():
            if not self.running():
                out.print("not running")
                return
            with err.status("stopping"):
                self.stop()
            out.print("stopped")

    def no_comparison(self, conflict: str = COMPARISON_RUNS) -> AbstractContextManager[None]:
        """Hold the lock of comparisons; raise UserError if one is running."""
        return exclusive(self.comparison_lock, conflict, wait=False)

    def check_no_comparison(self, conflict: str = COMPARISON_RUNS) -> None:
        with self.no_comparison(conflict):
            pass

    # --- the settings of the running programs -----------------------------------------------------------------------

    @property
    def record(self) -> Path:
        """Return the file that holds the settings of the running programs."""
        return self.state / "run/started.json"

    def recorded(self) -> dict[str, Any]:
        try:
            return json.loads(self.record.read_text())
        except (OSError, ValueError):
            return {"settings": {}}

    def write_record(self, **facts: Any) -> None:
        self.record.parent.mkdir(parents=True, exist_ok=True)
        self.record.touch(mode=0o600)  # it holds the admin key
        settings = {name: self.settings[name] for name in (*self.started_with, *GATEWAY_SETTINGS)}
        facts |= {"certificate": certificate(self.settings)}
        self.record.write_text(json.dumps({"settings": settings, **facts}))

    def changed_settings(self, record: dict[str, Any] | None = None) -> list[str]:
        """Return the names of the settings that differ from those of the running programs, except the gateway's own."""
        before = (record or self.recorded())["settings"]
        return [name for name in self.started_with if self.settings[name] != before.get(name)]

    def changed_gateway(self, record: dict[str, Any] | None = None) -> list[str]:
        """Return the names of the gateway's own settings that differ; a renewed certificate counts as one."""
        record = record or self.recorded()
        changed = [name for name in GATEWAY_SETTINGS if self.settings[name] != record["settings"].get(name)]
        renewed = "TLS_CERT" not in changed and certificate(self.settings) != record.get("certificate", "")
        return changed + ["TLS_CERT"] * renewed

    def check_gateway(self) -> None:
        """Raise UserError if the gateway would refuse these settings."""
        self.settings.gateway_keys()
        if tls := self.settings.tls():
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*tls, password="")
            except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
                raise UserError(
                    f"TLS_CERT={self.settings['TLS_CERT']}, TLS_KEY={self.settings['TLS_KEY']}: these are not a "
                    f"certificate and its key, both PEM, the key without a password ({error})"
                ) from None

    def wait(self, missing: Callable[[], str]) -> None:
        """Wait until nothing is missing. Raise with the end of its log if a program crashed for good."""
        deadline = time.monotonic() + self.settings.ready_timeout
        with err.status("waiting until the stack is ready"):
            while waiting_for := missing():
                for name in self.programs():
                    if (process := self.process(name)).gave_up:
                        cause = process.cause or f"Its log ends:\n{self.log_tail(name, 15)}"
                        raise UserError(f"{name} does not stay up. {cause}")
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

    def check_key(self) -> None:
        """Raise UserError if the server does not accept our key for model control."""
        try:
            self.triton.index()
        except TritonError as error:
            if error.status != 403:
                raise
            raise UserError(
                f"the server on {self.triton.url} does not accept this TRITON_ADMIN_KEY, because it was started "
                "with another: stop that server, or set its key in .env"
            ) from None

    # --- looking ----------------------------------------------------------------------------------------------------

    def page(self, program: str) -> str:
        return self.settings.url(PORTS[program][0])

    def print_urls(self) -> None:
        url = self.settings.url
        if "gateway" in self.programs():
            out.print(f"[bold]Page        {url('GATEWAY_PORT')}[/]  (open it in a browser: try each system, or chat)")
            out.print(f"OpenAI API  {url('GATEWAY_PORT')}/v1")
            if warning := expiry_warning(self.settings):
                out.print(f"            [yellow]{escape(warning)}[/]")
            if not self.settings.api_keys:
                out.print("            loopback only: set API_KEYS and GATEWAY_BIND to open it")
            elif not (address := self.settings.bind("GATEWAY_PORT")).is_loopback:
                out.print(f"            open to other machines on {address}, with a key of API_KEYS")
                if not self.settings.tls_cert:
                    out.print("            without TLS: keys and texts travel unencrypted (TLS_CERT, TLS_KEY)")
        out.print(f"Triton      {url('TRITON_HTTP_PORT')}  (gRPC {self.settings.triton_grpc_port})")
        out.print(f"metrics     {url('TRITON_METRICS_PORT')}/metrics")
        for name in self.programs():
            if name in ("prometheus", "grafana", "jaeger"):
                out.print(f"{name.capitalize():<12}{self.page(name)}")
            if name == "traces":
                out.print(f"traces      {self.state / name}")

    def print_first_request(self, system: str) -> None:
        """Print what a person does next with an assembled system: a command to paste, and the page's address."""
        settings, url, is_running = self.settings, self.settings.url("GATEWAY_PORT"), self.running()
        out.print()
        if is_running:
            own = engines(settings.url("TRITON_METRICS_PORT"))
            models = with_steps(system, settings.model_repository, settings.profile)
            if names := dict.fromkeys(own[model] for model in models if model in own):
                out.print(f"{system} runs on {' and '.join(names)}")
        else:
            out.print(f"The stack is not running: `make up` starts it with {system}, too")
        command = first_command(system, settings.model_repository, settings.profile, url, bool(settings.api_keys))
        if not command:
            out.print(f"`make smoke SYSTEMS={system}` sends {system} test requests; docs/models.md has its tensors")
            return
        files = " and ".join(sorted(set(re.findall(r"base64 -w0 ([\w.]+)", command))))
        if files:
            out.print(f"Put a file of yours as {files} into this folder first.")
        if settings.api_keys:
            out.print("Set API_KEY to one of the keys first.")
        out.print(f"{'Try it' if is_running else 'Then try it'} on the page, {url}, or paste:\n")
        out.print(command, markup=False)

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
            # The clock may have been set back since the start.
            age = str(timedelta(seconds=max(0, int(process.seconds)))) if process.running else "-"
            table.add_row(name, _colour(process.state, process.running), age, str(process.crashes))
        out.print(table)
        record = self.recorded()
        if record["settings"] and (changed := self.changed_settings(record) + self.changed_gateway(record)):
            out.print(
                f"[yellow]The stack runs with other values of {', '.join(changed)}.[/] Give each command those values "
                "or keep them in .env, or run `make up` to restart the stack with the present ones"
            )
        self.print_alerts()
        out.print()
        return self.print_models() and healthy

    def print_alerts(self) -> None:
        """Print the alerts that fire. The table of processes shows a Prometheus that does not answer."""
        with contextlib.suppress(PrometheusError):
            for name, summary in Prometheus(self.page("prometheus"), timeout=2).firing_alerts():
                out.print(f"[red]alert {name}:[/] {escape(summary)} (docs/monitoring.md#{name.lower()})")

    def print_models(self) -> bool:
        """Print the state of every model, and what reloads them. Return whether all are ready."""
        if measurement := Measurement.read(self.comparison_note):
            out.print(f"[yellow]{escape(str(measurement))}[/]")
        try:
            index = self.triton.index()
        except TritonError as error:
            out.print(f"models      unknown: {escape(str(error))}")
            return False
        index = dict.fromkeys(self.served.requested() or (), NOT_LOADED) | index
        log = self.log_tail("triton", 10**6)
        engine = engines(self.settings.url("TRITON_METRICS_PORT"))
        table = _table("model", "state", "engine", "batching", "crashes\nrecovered")
        for model, (state, why) in sorted(index.items()):
            ready = state == "READY"
            ready_engine = engine.get(model, "") if ready else ""
            batches = batching(self.triton.config(model), ready_engine) if ready else reason(why)
            recovered = log.count(f"watchdog: model '{model}' is back")
            table.add_row(model, _colour(state.lower(), ready), ready_engine, escape(batches), str(recovered))
        out.print(table)
        self.print_configurations(index)
        for path in (damaged := self.served.damaged()):
            state = f"[red]{escape(str(path))} is missing or damaged:[/]"
            out.print(f"{state} it lists the served systems. `make up` writes it again")
        out.print()
        self.print_urls()
        return not damaged and all(state == "READY" for state, _ in index.values())

    def print_configurations(self, models: Iterable[str]) -> None:
        """Print which models have another configuration than config.pbtxt."""
        repository = self.settings.model_repository
        for model in sorted(models):
            path = find_config(model, repository, self.settings.profile)
            if path and path.parent.name == "configs":
                tuned = " of `make tune`" if path in tuned_configs(repository / model) else ""
                edited = ", and config.pbtxt was changed since" if tuned and is_outdated(path) else ""
                out.print(f"{model} uses configs/{path.name}{tuned}, not config.pbtxt{edited}")

    def logs(self, follow: bool) -> None:
        if not (command := self.log_command(follow)):
            return
        if follow:
            os.execvp(command[0], command)
        # The reader may close the pipe, as `head` does.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
            for line in process.stdout or ():
                sys.stdout.write(without_codes(line))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        # rich wraps the long reason of a failed load at 80 columns; it must not wrap the names.
        table.add_column(column, no_wrap=column in ("model", "state", "engine"))
    return table


def _colour(text: str, good: bool) -> str:
    return f"[green]{text}[/]" if good else f"[red]{text}[/]"
