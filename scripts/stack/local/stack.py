"""The local stack: processes under supervisord, everything they make under LOCAL_STATE."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil
from rich.markup import escape

from scripts.common.cli import err, out
from scripts.common.files import comparison_lock, exclusive, write_atomically
from scripts.common.ports import check_free
from scripts.common.settings import ROOT, Settings, UserError
from scripts.models.assemble import remove_all
from scripts.stack.base import PORTS, Process, Stack
from scripts.stack.local import programs
from scripts.stack.local.supervisor import Supervisor

# The settings that the running programs were started with; a change of one restarts them.
SERVER_SETTINGS = (
    "SYSTEMS",
    "PROFILE",
    "MODEL_REPOSITORY",
    "TRANSFORMERS",
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
    "GRAFANA_PORT",
    "GRAFANA_ADMIN_PASSWORD",
    "GRAFANA_HOME",
)


MONITORING = ROOT / "monitoring"
COMPARING = "a comparison is running against this stack, which other settings would restart"


@dataclass
class LocalStack(Stack):
    @cached_property
    def supervisor(self) -> Supervisor:
        return Supervisor(self.state)

    @property
    def record(self) -> Path:
        return self.state / "run/started.json"

    # --- up and down ------------------------------------------------------------------------------------------------

    def running(self) -> bool:
        return self.supervisor.running()

    def start(self) -> bool:
        started = {name: self.settings[name] for name in SERVER_SETTINGS}
        running = self.running()
        self.write_targets()
        if running and self.recorded()["settings"] == started:
            for name in self.programs():
                self.supervisor.start_program(name)
            return True
        # What is wrong with the new settings is said while the stack still runs with the old.
        before = (running and self.recorded()["settings"]) or {}
        for path in (self.state, self.settings.path("MODEL_REPOSITORY")):
            if not re.fullmatch(r"[\w./+@-]+", str(path)):
                raise UserError(f"'{path}': Triton starts its Python backends through a shell that splits such a path")
        ours = {int(before[name]) for names in PORTS.values() for name in names if name in before}
        check_free(self.settings, PORTS["triton"] + PORTS["prometheus"], ours)
        grafana = self.find_grafana(ours)
        if running:
            changed = ", ".join(name for name in started if started[name] != before.get(name))
            with exclusive(comparison_lock(Settings(self.settings | before)), COMPARING, wait=False):
                out.print(f"settings changed ({changed}): restarting the stack")
                self.stop()
        self.start_with(started, grafana)
        return False

    def find_grafana(self, ours: set[int]) -> programs.Grafana | None:
        """One that was asked for; or one that is here by chance, if it will do."""
        home = self.settings["GRAFANA_HOME"]
        if home == "none":
            return None
        found = programs.grafana(self.settings.path("GRAFANA_HOME") if home else None)
        if not found:
            return None
        old = found.release() < programs.LEAST_GRAFANA
        if old and home:
            err.print(f"[yellow]{found.binary} is older than {programs.LEAST_GRAFANA}:[/] panels may stay empty")
        try:
            if old and not home:
                raise UserError(f"{found.binary} is older than {programs.LEAST_GRAFANA}")
            check_free(self.settings, PORTS["grafana"], ours)
        except UserError as error:
            if home:
                raise
            err.print(f"[yellow]without Grafana:[/] {escape(str(error))}")
            return None
        return found

    def start_with(self, started: dict[str, str], grafana: programs.Grafana | None) -> None:
        self.sweep_stubs()
        home = programs.triton(self.state)
        prometheus = programs.prometheus(self.state)
        if prometheus is None:
            err.print(
                "[yellow]no Prometheus:[/] it is neither on the PATH nor to be had from Debian's packages here; "
                "the stack runs without it, and the comparison does not need it"
            )
        self.configure_prometheus()
        environment = started | {
            "MODEL_REPOSITORY": str(self.settings.path("MODEL_REPOSITORY")),
            "TRITON_HOME": str(home),
            "PROMETHEUS": str(prometheus or ""),
            "PROMETHEUS_FLAGS": programs.prometheus_flags(prometheus, self.state) if prometheus else "",
            "PROMETHEUS_URL": self.settings.url("PROMETHEUS_PORT"),
            "GRAFANA": str(grafana.binary) if grafana else "",
            "GRAFANA_COMMAND": grafana.command if grafana else "",
            "GRAFANA_HOME": str(grafana.home) if grafana else "",
            "GRAFANA_FILES": str(MONITORING / "grafana"),
            "GF_SECURITY_ADMIN_PASSWORD": self.settings["GRAFANA_ADMIN_PASSWORD"],
            "PATH": programs.path_with_this_python(),
            "PYTHONPATH": programs.python_path(self.settings["TRANSFORMERS"], self.state),
        }
        if libraries := programs.library_path(self.state):
            environment["LD_LIBRARY_PATH"] = libraries
        there = {"triton": True, "prometheus": prometheus, "grafana": grafana}
        self.record.parent.mkdir(exist_ok=True)
        self.record.touch(mode=0o600)  # it holds the admin key
        self.record.write_text(
            json.dumps({"settings": started, "programs": [name for name, found in there.items() if found]})
        )
        self.supervisor.start(environment)
        for name in self.programs():
            self.supervisor.start_program(name)

    def recorded(self) -> dict:
        try:
            return json.loads(self.record.read_text())
        except (OSError, ValueError):
            return {"settings": None, "programs": ["triton"]}

    def configure_prometheus(self) -> None:
        for name in ("prometheus.yml", "rules"):
            link = self.state / "prometheus" / name
            link.unlink(missing_ok=True)
            link.symlink_to(MONITORING / "prometheus" / name)

    def write_targets(self) -> None:
        """Prometheus reads them again by itself."""
        targets = [
            {"labels": {"job": job}, "targets": [f"{self.settings.address()}:{self.settings.port(port)}"]}
            for job, port in (("triton", "TRITON_METRICS_PORT"), ("loadtest", "LOADTEST_METRICS_PORT"))
        ]
        (self.state / "prometheus").mkdir(exist_ok=True)
        write_atomically(self.state / "prometheus/targets.json", json.dumps(targets))

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

    def clean(self) -> None:
        self.down()
        remove_all(self.settings)
        for made in ("bench", "debian", "grafana", "log", "prometheus", "run", "transformers", "triton"):
            shutil.rmtree(self.state / made, ignore_errors=True)
        with contextlib.suppress(OSError):  # somebody else's files are in it, or it is not there
            self.state.rmdir()

    # --- one-shot programs ------------------------------------------------------------------------------------------

    def build(self) -> None:
        raise UserError("there are no images to build without Docker: say RUNTIME=docker")

    def models(self) -> None:
        self.become("scripts.models", PYTHONPATH=programs.python_path(self.settings["TRANSFORMERS"], self.state))

    def loadtest(self) -> None:
        self.become("loadtest")

    def locust(self) -> None:
        self.become("loadtest.locust_page")

    def dashboards(self) -> None:
        self.become("scripts.dashboards.render.page")

    def become(self, module: str, **environment: str) -> None:
        os.chdir(ROOT)
        os.execve(sys.executable, [sys.executable, "-m", module], os.environ | environment)

    # --- looking ----------------------------------------------------------------------------------------------------

    def programs(self) -> list[str]:
        return self.recorded().get("programs", ["triton"])  # one that an earlier release started does not say

    def process(self, program: str) -> Process:
        info = self.supervisor.program(program)
        return Process(
            state=info["statename"].lower(),
            running=info["statename"] == "RUNNING",
            lost=info["statename"] in ("FATAL", "EXITED", "STOPPED"),
            seconds=info["now"] - info["start"],
            crashes=self.supervisor.crashes(program),
        )

    def log_tail(self, program: str, lines: int) -> str:
        return self.supervisor.tail(program, lines)

    def logs(self, follow: bool) -> None:
        files = [path for name in PORTS if (path := self.state / f"log/{name}.log").exists()]
        if files:
            os.execvp("tail", ["tail", "-n", "100", *(["-F"] if follow else []), *map(str, files)])
