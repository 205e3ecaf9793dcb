"""The stack as processes under supervisord."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil
from rich.markup import escape

from export.removal import remove_all
from export.selection import all_in_place
from loadtest.server.machine import STACK_PROCESS
from scripts.stack.base import GATEWAY_SETTINGS, PORTS, WOULD_RESTART, Process, Stack
from scripts.stack.local import preflight, programs, shared_memory
from scripts.stack.local.supervisor import Supervisor
from triton_transformers.cli import call, err, out, without_codes
from triton_transformers.files import ANOTHER_COMPARISON, comparison_lock, exclusive, write_atomically
from triton_transformers.ports import check_free
from triton_transformers.settings import ROOT, SECRETS, UserError, command_environment, restarting
from triton_transformers.triton import Triton

SERVER_SETTINGS = restarting("stack", "local")
# The settings that the gateway reads. The last two are only for its links, so their change restarts nothing.
GATEWAY_READS = (*sorted({*SERVER_SETTINGS, *GATEWAY_SETTINGS} - {*SECRETS}), "LOCUST_PORT", "REPORTS")
# Jobs of Prometheus, and the settings of their ports.
METRICS = {"triton": "TRITON_METRICS_PORT", "gateway": "GATEWAY_METRICS_PORT", "loadtest": "LOADTEST_METRICS_PORT"}
# The folders below LOCAL_STATE that we write.
FOLDERS = (
    "bench",
    "debian",
    "grafana",
    "log",
    "peers",
    "prometheus",
    "run",
    "serving",
    "traces",
    "transformers",
    "triton",
)
MODULES = {
    "loadtest": "loadtest",
    "tune": "loadtest.tune",
    "locust": "loadtest.load.locust_page",
    "dashboards": "monitoring.drawing.page",
}
MONITORING = ROOT / "monitoring"
DRAIN = "serving.watchdog.drain"


@dataclass
class LocalStack(Stack):
    """The stack without Docker."""

    @cached_property
    def supervisor(self) -> Supervisor:
        return Supervisor(self.state)

    started_with = SERVER_SETTINGS

    @property
    def comparison_lock(self) -> Path:
        return comparison_lock(self.settings.replace(**self.recorded()["settings"]))

    # --- up and down ------------------------------------------------------------------------------------------------

    def running(self) -> bool:
        return self.supervisor.running()

    def check(self, systems: list[str]) -> None:
        preflight.check_device(self.settings)
        preflight.check_paths(self.settings)
        preflight.check_open_files()
        self.supervisor.check()
        preflight.make_folders(self.settings, "LOCAL_STATE", "REPORTS")
        self.check_gateway()
        expected = ["gateway", "triton", "prometheus", *(["traces"] if self.settings.traces() else [])]
        check_free(self.settings, [name for program in expected for name in PORTS[program]], self.supervisor.ports())
        _ = self.grafana  # raises if GRAFANA_HOME has no Grafana, or its port is taken
        if self.running() and (self.reason_to_restart() or self.changed_gateway()):
            self.check_no_comparison(WOULD_RESTART)

    def check_comparison(self) -> None:
        if self.running():
            self.check_no_comparison(ANOTHER_COMPARISON)
        check_free(self.settings, ["LOADTEST_METRICS_PORT"])

    def start(self, systems: list[str]) -> None:
        running = self.running()
        if running and not (reason := self.reason_to_restart()):
            if self.changed_gateway():
                self.check(systems)
                self.restart_gateway()
            self.write_targets()
            self.start_programs()
            return
        self.check(systems)
        if running:
            with self.no_comparison(WOULD_RESTART):
                out.print(f"{reason}: restarting the stack")
                self.stop()
        self.write_targets()
        self.start_with_settings()

    def reason_to_restart(self) -> str:
        """Return why all programs must restart, or nothing."""
        if not self.supervisor.answers():
            return f"{self.supervisor.socket} was deleted"
        changed = self.changed_settings()
        return f"settings changed ({', '.join(changed)})" if changed else ""

    def restart_gateway(self) -> None:
        """Stop the gateway, which start_programs() then starts with its new settings."""
        with self.no_comparison(WOULD_RESTART):
            out.print(f"settings changed ({', '.join(self.changed_gateway())}): restarting the gateway")
            self.supervisor.stop_program("gateway")
        self.write_gateway_settings()
        self.write_record(programs=self.programs())

    def write_gateway_settings(self) -> None:
        """Write the file that the gateway reads instead of .env, whose settings may not be in force yet."""
        path = self.record.with_name("gateway.env")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)  # it holds the keys
        quoted = {name: re.sub(r"(['\\])", r"\\\1", self.settings[name]) for name in GATEWAY_READS}
        path.write_text("".join(f"{name}='{value}'\n" for name, value in quoted.items()))

    def start_programs(self) -> None:
        for name in self.programs():
            self.supervisor.start_program(name)

    @cached_property
    def grafana(self) -> programs.Grafana | None:
        """Return the Grafana of GRAFANA_HOME, or one on the PATH that is new enough and whose port is free."""
        home = self.settings["GRAFANA_HOME"]
        if home == "none":
            return None
        grafana = programs.grafana(self.settings.grafana_home)
        if not grafana:
            return None
        too_old = grafana.release() < programs.MIN_GRAFANA
        if too_old and home:
            err.print(f"[yellow]{grafana.binary} is older than {programs.MIN_GRAFANA}:[/] panels may stay empty")
        try:
            if too_old and not home:
                raise UserError(f"{grafana.binary} is older than {programs.MIN_GRAFANA}")
            check_free(self.settings, PORTS["grafana"], self.supervisor.ports())
        except UserError as error:
            if home:
                raise
            err.print(f"[yellow]without Grafana:[/] {escape(str(error))}")
            return None
        return grafana

    def start_with_settings(self) -> None:
        self.sweep_stubs()
        home = programs.triton(self.state)
        prometheus = programs.prometheus(self.state)
        if prometheus is None:
            err.print(
                "[yellow]no Prometheus:[/] it is not on the PATH, and Debian's package cannot be downloaded here. The "
                "stack runs without it; the comparison does not need it"
            )
        for name in ("prometheus.yml", "rules"):
            link = self.state / "prometheus" / name
            link.unlink(missing_ok=True)
            link.symlink_to(MONITORING / "prometheus" / name)
        self.served.engines.mkdir(parents=True, exist_ok=True)
        grafana = self.grafana
        environment = {name: self.settings[name] for name in SERVER_SETTINGS} | {
            "SYSTEMS_FILE": str(self.served.path),
            "TRITON_ENGINE_CACHE": str(self.served.engines),
            "MODEL_REPOSITORY": str(self.settings.model_repository),
            "TRITON_HOME": str(home),
            "PROMETHEUS": str(prometheus or ""),
            "PROMETHEUS_FLAGS": programs.prometheus_flags(prometheus, self.state) if prometheus else "",
            "PROMETHEUS_URL": self.settings.url("PROMETHEUS_PORT"),
            "GRAFANA": str(grafana.binary) if grafana else "",
            "GRAFANA_COMMAND": grafana.command if grafana else "",
            "GRAFANA_HOME": str(grafana.home) if grafana else "",
            "GRAFANA_FILES": str(MONITORING / "grafana"),
            "GF_SECURITY_ADMIN_PASSWORD": self.settings.grafana_admin_password,
            # Triton's stub imports the packages of the first python3 on the PATH.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": programs.python_path(self.settings.transformers, self.state),
        }
        self.write_gateway_settings()
        available = {"gateway": True, "triton": True, "prometheus": prometheus, "grafana": grafana}
        available |= {"traces": self.settings.traces()}
        self.write_record(programs=[name for name, program in available.items() if program])
        self.supervisor.start(environment)
        self.start_programs()

    def write_targets(self) -> None:
        """Write the addresses that Prometheus scrapes; it reads a changed file by itself."""
        targets = [
            {"labels": {"job": job}, "targets": [f"{self.settings.address()}:{self.settings.value(port)}"]}
            for job, port in METRICS.items()
        ]
        (self.state / "prometheus").mkdir(exist_ok=True)
        write_atomically(self.state / "prometheus/targets.json", json.dumps(targets))

    def stop(self) -> None:
        if self.supervisor.answers() and "gateway" in self.programs():
            self.supervisor.stop_program("gateway")
        self.drain_triton()
        self.supervisor.stop()
        self.sweep_stubs()

    def drain_triton(self) -> None:
        """Wait until Triton has answered what it accepted. Its settings may differ from those of this command."""
        if not (supervisord := self.supervisor.process()):
            return
        environment = supervisord.environ()
        started_with = {name: environment[name] for name in SERVER_SETTINGS if name in environment}
        if Triton.from_settings(self.settings.replace(**started_with)).live():
            done = subprocess.run([sys.executable, "-m", DRAIN], env=environment, capture_output=True, text=True)
            if done.returncode:
                err.print(f"[yellow]{escape(done.stderr.strip())}[/]")

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
        for folder in FOLDERS:
            shutil.rmtree(self.state / folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # files that are not ours are in it, or it does not exist
            self.state.rmdir()
        out.print("removed the state of the stack and the assembled models")

    # --- one-shot programs ------------------------------------------------------------------------------------------

    def build(self) -> None:
        raise UserError("without Docker there are no images to build: set RUNTIME=docker")

    def models(self, systems: list[str]) -> None:
        if all_in_place(self.settings, systems):
            return
        # Another process, because PyTorch's memory must not stay with `make up`.
        pythonpath = programs.python_path(self.settings.transformers, self.state)
        own = {"SYSTEMS": " ".join(systems), "ADAPTERS": self.settings["ADAPTERS"]}
        environment = command_environment(**own) | {"PYTHONPATH": pythonpath}
        if code := call([sys.executable, "-m", "export"], environment):
            sys.exit(code)

    def models_lock(self) -> AbstractContextManager[None]:
        return exclusive(self.settings.model_repository, "another `make models` is at work here")

    def run(self, program: str) -> int:
        # A load generator leaves out the stack's processes when it looks for other programs.
        own = {STACK_PROCESS: str(self.supervisor.rpc.getPID())} if program in ("loadtest", "tune") else {}
        command = [sys.executable, "-m", MODULES[program]]
        if program == "tune" or (program == "loadtest" and self.settings.formats):  # the caller goes on
            return call(command, command_environment() | own)
        os.chdir(ROOT)
        os.execve(sys.executable, command, os.environ | own)

    # --- looking ----------------------------------------------------------------------------------------------------

    def programs(self) -> list[str]:
        return self.recorded().get("programs", ["triton"])  # its file may have been deleted

    def process(self, program: str) -> Process:
        info = self.supervisor.program(program)
        return Process(
            state=info["statename"].lower(),
            running=info["statename"] == "RUNNING",
            gave_up=info["statename"] in ("FATAL", "EXITED", "STOPPED"),
            seconds=info["now"] - info["start"],
            crashes=self.supervisor.crashes(program),
        )

    def not_live(self) -> str:
        """Return also a program that supervisord has just started, so that `make status` then shows all as running."""
        starting = (name for name in self.programs() if not self.process(name).running)
        return super().not_live() or next((f"{name} has just started" for name in starting), "")

    def full_shared_memory(self) -> str:
        return f"{shared_memory.occupancy()}. Delete what no program needs there, or end such a program"

    def log_tail(self, program: str, lines: int) -> str:
        return without_codes(self.supervisor.tail(program, lines))

    def log_command(self, follow: bool) -> list[str]:
        files = [path for name in PORTS if (path := self.state / f"log/{name}.log").exists()]
        if not files:
            out.print(f"no logs: nothing has run without Docker in {self.state} yet (`make up`)")
            return []
        return ["tail", "-n", "100", *(["-F"] if follow else []), *map(str, files)]
