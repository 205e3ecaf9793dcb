"""The stack as processes under supervisord."""

from __future__ import annotations

import contextlib
import json
import os
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
from scripts.stack.local import preflight, programs
from scripts.stack.local.supervisor import Supervisor

# A change of one of these restarts the running programs.
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
    "TRITON_SHARED_MEMORY",
    "TRITON_LOG_VERBOSE",
    "PROMETHEUS_RETENTION",
    "GRAFANA_PORT",
    "GRAFANA_ADMIN_PASSWORD",
    "GRAFANA_HOME",
)
MONITORING = ROOT / "monitoring"


@dataclass
class LocalStack(Stack):
    """The stack without Docker."""

    @cached_property
    def supervisor(self) -> Supervisor:
        return Supervisor(self.state)

    @property
    def record(self) -> Path:
        """Return the file that holds the settings of the running programs."""
        return self.state / "run/started.json"

    # --- up and down ------------------------------------------------------------------------------------------------

    def running(self) -> bool:
        return self.supervisor.running()

    def start(self) -> bool:
        settings = {name: self.settings[name] for name in SERVER_SETTINGS}
        running = self.running()
        if running and self.recorded()["settings"] == settings:
            self.write_targets()
            for name in self.programs():
                self.supervisor.start_program(name)
            return True
        # Check the new settings while the stack still runs with the old ones.
        preflight.check_device(self.settings)
        preflight.check_paths(self.state, self.settings.path("MODEL_REPOSITORY"))
        before = (running and self.recorded()["settings"]) or {}
        ours = {int(before[name]) for names in PORTS.values() for name in names if name in before}
        check_free(self.settings, PORTS["triton"] + PORTS["prometheus"], ours)
        grafana = self.find_grafana(ours)
        if running:
            self.stop_for(settings, before)
        self.write_targets()
        self.start_with(settings, grafana)
        return False

    def stop_for(self, settings: dict[str, str], before: dict[str, str]) -> None:
        """Stop the programs, which other settings need, unless a comparison is measuring them."""
        changed = ", ".join(name for name in settings if settings[name] != before.get(name))
        conflict = "a comparison is running against this stack, which other settings would restart"
        with exclusive(comparison_lock(Settings(self.settings | before)), conflict, wait=False):
            out.print(f"settings changed ({changed}): restarting the stack")
            self.stop()

    def find_grafana(self, ours: set[int]) -> programs.Grafana | None:
        """Return the Grafana of GRAFANA_HOME, or one on the PATH that is new enough and whose port is free."""
        home = self.settings["GRAFANA_HOME"]
        if home == "none":
            return None
        grafana = programs.grafana(self.settings.path("GRAFANA_HOME") if home else None)
        if not grafana:
            return None
        too_old = grafana.release() < programs.MIN_GRAFANA
        if too_old and home:
            err.print(f"[yellow]{grafana.binary} is older than {programs.MIN_GRAFANA}:[/] panels may stay empty")
        try:
            if too_old and not home:
                raise UserError(f"{grafana.binary} is older than {programs.MIN_GRAFANA}")
            check_free(self.settings, PORTS["grafana"], ours)
        except UserError as error:
            if home:
                raise
            err.print(f"[yellow]without Grafana:[/] {escape(str(error))}")
            return None
        return grafana

    def start_with(self, settings: dict[str, str], grafana: programs.Grafana | None) -> None:
        self.sweep_stubs()
        home = programs.triton(self.state)
        prometheus = programs.prometheus(self.state)
        if prometheus is None:
            err.print(
                "[yellow]no Prometheus:[/] it is not on the PATH, and Debian's package cannot be downloaded here. The "
                "stack runs without it; the comparison does not need it"
            )
        self.configure_prometheus()
        environment = settings | {
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
        available = {"triton": True, "prometheus": prometheus, "grafana": grafana}
        self.record.parent.mkdir(exist_ok=True)
        self.record.touch(mode=0o600)  # it holds the admin key
        self.record.write_text(
            json.dumps({"settings": settings, "programs": [name for name, found in available.items() if found]})
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
        """Write the addresses that Prometheus scrapes; it reads a changed file by itself."""
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
        """Kill Python processes that outlived this stack's Triton, and remove the shared memory they leave."""
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if len(line) > 2 and line[0].startswith(f"{self.state}/") and line[0].endswith("_backend_stub"):
                with contextlib.suppress(psutil.Error):
                    process.kill()
                Path("/dev/shm", line[2]).unlink(missing_ok=True)

    def clean(self) -> None:
        self.down()
        remove_all(self.settings)
        for folder in ("bench", "debian", "grafana", "log", "prometheus", "run", "transformers", "triton"):
            shutil.rmtree(self.state / folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # files that are not ours are in it, or it does not exist
            self.state.rmdir()

    # --- one-shot programs ------------------------------------------------------------------------------------------

    def build(self) -> None:
        raise UserError("without Docker there are no images to build: set RUNTIME=docker")

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
        return self.recorded().get("programs", ["triton"])  # earlier releases recorded no programs

    def process(self, program: str) -> Process:
        info = self.supervisor.program(program)
        return Process(
            state=info["statename"].lower(),
            running=info["statename"] == "RUNNING",
            gave_up=info["statename"] in ("FATAL", "EXITED", "STOPPED"),
            seconds=info["now"] - info["start"],
            crashes=self.supervisor.crashes(program),
        )

    def log_tail(self, program: str, lines: int) -> str:
        return self.supervisor.tail(program, lines)

    def show_logs(self, follow: bool) -> str:
        files = [path for name in PORTS if (path := self.state / f"log/{name}.log").exists()]
        if files:
            os.execvp("tail", ["tail", "-n", "100", *(["-F"] if follow else []), *map(str, files)])
        return f"nothing has run without Docker in {self.state} yet (`make up`)"
