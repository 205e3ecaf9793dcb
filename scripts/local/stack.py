"""Bringing the local stack up, watching it, taking it down."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil
from rich.markup import escape
from rich.table import Table

from scripts.cli import err, out
from scripts.files import exclusive
from scripts.local import ports, programs
from scripts.local.supervisor import Supervisor
from scripts.settings import ROOT, Settings, UserError
from scripts.triton import Triton, TritonError, answers, reason

# The settings that the running programs were started with; a change of one restarts them.
SERVER_SETTINGS = (
    "SYSTEMS",
    "PROFILE",
    "MODEL_REPOSITORY",
    "BIND_ADDRESS",
    "TRITON_HTTP_PORT",
    "TRITON_GRPC_PORT",
    "TRITON_METRICS_PORT",
    "PROMETHEUS_PORT",
    "TRITON_ADMIN_KEY",
    "TRITON_CPUS",
    "TRITON_SHM_BYTES",
    "TRITON_LOG_VERBOSE",
    "PROMETHEUS_RETENTION",
)
PORTS = ["TRITON_HTTP_PORT", "TRITON_GRPC_PORT", "TRITON_METRICS_PORT", "PROMETHEUS_PORT"]


@dataclass
class Stack:
    settings: Settings

    @cached_property
    def state(self) -> Path:
        return self.settings.path("LOCAL_STATE").absolute()

    @cached_property
    def supervisor(self) -> Supervisor:
        return Supervisor(self.state)

    @cached_property
    def triton(self) -> Triton:
        return Triton(self.settings.url("TRITON_HTTP_PORT"), self.settings["TRITON_ADMIN_KEY"])

    @property
    def record(self) -> Path:
        return self.state / "run/started.json"

    # --- up ---------------------------------------------------------------------------------------------------------

    def up(self) -> None:
        self.state.mkdir(parents=True, exist_ok=True)
        with exclusive(self.state, "another `make up` or `make down` is at work here"):
            self._up()

    def _up(self) -> None:
        started = {name: self.settings[name] for name in SERVER_SETTINGS}
        if self.supervisor.running():
            if self.recorded()["settings"] == started:
                for name in self.programs():
                    self.supervisor.start_program(name)
                self.wait(self.not_live)
                self.reload_edited()
                self.wait(self.not_ready)
                return
            out.print("settings changed: restarting the stack")
            self.stop()
        self.start(started)
        self.wait(self.not_ready)

    def start(self, started: dict[str, str]) -> None:
        ports.check_free(self.settings, PORTS)
        for path in (self.state, self.settings.path("MODEL_REPOSITORY")):
            if not re.fullmatch(r"[\w./+@-]+", str(path)):
                raise UserError(f"'{path}': Triton starts its Python backends through a shell that splits such a path")
        self.sweep_stubs()
        home = programs.triton(self.state)
        prometheus = programs.prometheus(self.state)
        if prometheus is None:
            err.print(
                "[yellow]no Prometheus:[/] it is neither on the PATH nor to be had from Debian's packages here; "
                "the stack runs without it, and the comparison does not need it"
            )
        self.write_targets()
        environment = started | {
            "MODEL_REPOSITORY": str(self.settings.path("MODEL_REPOSITORY")),
            "TRITON_HOME": str(home),
            "PROMETHEUS": str(prometheus or ""),
            "PATH": programs.path_with_this_python(),
        }
        if libraries := programs.library_path(self.state):
            environment["LD_LIBRARY_PATH"] = libraries
        self.record.parent.mkdir(exist_ok=True)
        self.record.touch(mode=0o600)  # it holds the admin key
        self.record.write_text(json.dumps({"settings": started, "prometheus": prometheus is not None}))
        self.supervisor.start(environment)
        for name in self.programs():
            self.supervisor.start_program(name)

    def programs(self) -> list[str]:
        return ["triton", "prometheus"] if self.has_prometheus() else ["triton"]

    def recorded(self) -> dict:
        try:
            return json.loads(self.record.read_text())
        except (OSError, ValueError):
            return {"settings": None, "prometheus": False}

    def write_targets(self) -> None:
        folder = self.state / "prometheus"
        (folder / "targets").mkdir(parents=True, exist_ok=True)
        config = folder / "prometheus.yml"
        config.unlink(missing_ok=True)
        config.symlink_to(ROOT / "monitoring/prometheus/prometheus.yml")
        for job, port in (("triton", "TRITON_METRICS_PORT"), ("prometheus", "PROMETHEUS_PORT")):
            target = f"{self.settings.address()}:{self.settings.port(port)}"
            (folder / f"targets/{job}.json").write_text(json.dumps([{"targets": [target]}]))

    def wait(self, missing: Callable[[], str]) -> None:
        """Until nothing is missing; a program that does not stay up ends the wait with what its log says."""
        deadline = time.monotonic() + self.settings.integer("READY_TIMEOUT", least=1)
        with err.status("waiting until the stack is ready"):
            while waiting := missing():
                for name in self.programs():
                    if self.supervisor.program(name)["statename"] in ("FATAL", "EXITED", "STOPPED"):
                        tail = self.supervisor.tail(name, 15)
                        raise UserError(f"{name} does not stay up. Its log ends:\n{tail}")
                if time.monotonic() > deadline:
                    raise UserError(f"not ready within READY_TIMEOUT: {waiting}. `make logs` shows more")
                time.sleep(0.2)

    def not_live(self) -> str:
        """Which program does not answer yet, or nothing."""
        if not self.triton.live():
            return "Triton does not answer yet"
        if self.has_prometheus() and not answers(f"{self.settings.url('PROMETHEUS_PORT')}/-/ready"):
            return "Prometheus does not answer yet"
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
        found = re.findall(rf"load failed for model '{re.escape(model)}': (.*)", self.supervisor.tail("triton", 400))
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

    # --- down -------------------------------------------------------------------------------------------------------

    def down(self) -> None:
        if not self.state.exists():
            out.print("not running")
            return
        with exclusive(self.state, "another `make up` or `make down` is at work here"):
            if not self.supervisor.running():
                out.print("not running")
                return
            with err.status("stopping"):
                self.stop()
            out.print("stopped")

    def stop(self) -> None:
        self.supervisor.stop()
        self.sweep_stubs()

    def sweep_stubs(self) -> None:
        """Python processes of this stack's Triton that outlived it, and the shared memory they leave."""
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if len(line) > 2 and line[0].startswith(f"{self.state}/") and line[0].endswith("_backend_stub"):
                with contextlib.suppress(psutil.Error):
                    process.kill()
                Path("/dev/shm", line[2]).unlink(missing_ok=True)

    # --- looking ----------------------------------------------------------------------------------------------------

    def print_urls(self) -> None:
        url = self.settings.url
        out.print(f"Triton      {url('TRITON_HTTP_PORT')}  (gRPC {self.settings.port('TRITON_GRPC_PORT')})")
        out.print(f"metrics     {url('TRITON_METRICS_PORT')}/metrics")
        if self.has_prometheus():
            out.print(f"Prometheus  {url('PROMETHEUS_PORT')}")

    def has_prometheus(self) -> bool:
        return self.recorded()["prometheus"]

    def status(self) -> bool:
        """Print how the stack is; true if everything that should run does."""
        if not self.supervisor.running():
            out.print("not running: `make up` starts it")
            return True
        well = True
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("process", "state", "up", "crashes recovered"):
            table.add_column(column)
        for name in self.programs():
            info = self.supervisor.program(name)
            running = info["statename"] == "RUNNING"
            well &= running
            age = _duration(info["now"] - info["start"]) if running else "-"
            table.add_row(name, _colour(info["statename"].lower(), running), age, str(self.supervisor.crashes(name)))
        out.print(table)
        out.print()
        return self.print_models() and well

    def print_models(self) -> bool:
        try:
            index = self.triton.index()
        except TritonError as error:
            out.print(f"models      unknown: {error}")
            return False
        log = self.supervisor.tail("triton", 10**6)
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

    def logs(self) -> list[Path]:
        return [path for name in ("triton", "prometheus") if (path := self.state / f"log/{name}.log").exists()]

    def clean(self) -> None:
        self.down()
        for made in ("bench", "debian", "log", "prometheus", "run", "triton"):
            shutil.rmtree(self.state / made, ignore_errors=True)
        with contextlib.suppress(OSError):  # somebody else's files are in it, or it is not there
            self.state.rmdir()


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
