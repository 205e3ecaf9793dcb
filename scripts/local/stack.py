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

from scripts.cli import err, out
from scripts.local import programs
from scripts.local.supervisor import Supervisor
from scripts.models.repository import assemble_all, remove_all
from scripts.ports import check_free
from scripts.settings import ROOT, UserError
from scripts.stack import Process, Stack

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
        if self.running():
            if self.recorded()["settings"] == started:
                for name in self.programs():
                    self.supervisor.start_program(name)
                return True
            out.print("settings changed: restarting the stack")
            self.stop()
        self.start_with(started)
        return False

    def start_with(self, started: dict[str, str]) -> None:
        check_free(self.settings, PORTS)
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
        for made in ("bench", "debian", "log", "prometheus", "run", "triton"):
            shutil.rmtree(self.state / made, ignore_errors=True)
        with contextlib.suppress(OSError):  # somebody else's files are in it, or it is not there
            self.state.rmdir()

    # --- one-shot programs ------------------------------------------------------------------------------------------

    def build(self) -> None:
        raise UserError("there are no images to build without Docker: say RUNTIME=docker")

    def models(self) -> None:
        assemble_all(self.settings)

    def loadtest(self) -> None:
        self.become("loadtest")

    def locust(self) -> None:
        self.become("loadtest.web")

    def become(self, module: str) -> None:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-m", module])

    # --- looking ----------------------------------------------------------------------------------------------------

    def programs(self) -> list[str]:
        return ["triton", "prometheus"] if self.recorded()["prometheus"] else ["triton"]

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
        files = [path for name in ("triton", "prometheus") if (path := self.state / f"log/{name}.log").exists()]
        if files:
            os.execvp("tail", ["tail", "-n", "100", *(["-F"] if follow else []), *map(str, files)])
