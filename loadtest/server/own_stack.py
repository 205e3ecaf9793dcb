"""A stack of a program's own, for benchmarks, drills and tests: on free ports and in a folder of its own.

A running stack is not disturbed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import psutil

from triton_transformers.ports import free_ports
from triton_transformers.settings import DEFAULTS, NAMES, ROOT, Settings, UserError, command_environment
from triton_transformers.triton import Triton, engines, metrics_page


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Make a folder for checkpoints, the model repository and reports; remove it at the end."""
    path = Settings.load().local_state / "bench"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def with_names(variables: dict[str, str]) -> dict[str, str]:
    """Return the environment in which all variables that a program has set count as settings."""
    names = [name for name, value in variables.items() if os.environ.get(name) != value and name != NAMES]
    return variables | {NAMES: " ".join([variables.get(NAMES, ""), *names])}


class OwnStack:
    """A stack of a program's own in a folder, with these settings. If `quiet`, its commands print nothing."""

    def __init__(self, folder: Path, quiet: bool = False, **settings: str) -> None:
        self.folder = folder
        self.quiet = quiet
        names = [name for name in DEFAULTS if name.endswith("_PORT")]
        ports = dict(zip(names, map(str, free_ports(len(names))), strict=True))
        places = {"LOCAL_STATE": f"{folder}/state", "MODEL_REPOSITORY": f"{folder}/models"}
        places |= {"REPORTS": f"{folder}/reports", "RUNTIME": "local", "GRAFANA_HOME": "none"}
        # The environment in which every command uses this stack.
        self.variables = command_environment(**ports | places | settings)

    @property
    def state(self) -> Path:
        return Path(self.variables["LOCAL_STATE"])

    @property
    def models(self) -> Path:
        return Path(self.variables["MODEL_REPOSITORY"])

    def port(self, name: str) -> int:
        return int(self.variables[name])

    def url(self, port: str) -> str:
        return f"http://127.0.0.1:{self.port(port)}"

    @cached_property
    def triton(self) -> Triton:
        return Triton(self.url("TRITON_HTTP_PORT"), self.variables["TRITON_ADMIN_KEY"])

    def metrics(self) -> str:
        """Return Triton's page of metrics."""
        return metrics_page(self.url("TRITON_METRICS_PORT"))

    def encoder_engine(self) -> str:
        """Return the engine that the model `encoder` runs on."""
        return engines(self.url("TRITON_METRICS_PORT"))["encoder"]

    def leader(self) -> psutil.Process:
        """Return supervisord's process, whose children are the programs of the stack."""
        return psutil.Process(int((self.state / "run/supervisord.pid").read_text()))

    def command(self, name: str, **settings: str) -> None:
        """Run one of the stack's commands. Raise its message if it fails."""
        call = [sys.executable, "-m", "scripts.stack", name]
        variables = with_names(self.variables | settings)
        done = subprocess.run(call, cwd=ROOT, env=variables, capture_output=self.quiet, text=True)
        if done.returncode:
            message = done.stderr.strip() if self.quiet else "its message is above"
            raise UserError(f"`{name}` failed for the benchmark's own server; {message}")

    @contextlib.contextmanager
    def serving(self, **settings: str) -> Iterator[None]:
        """Serve until the end of the block."""
        try:
            self.command("up", **settings)
            yield
        finally:
            self.command("down", **settings)


class Make(subprocess.Popen[str]):
    """A `make` in a process group of its own, so that it can get Ctrl-C alone. Its output is in one pipe."""

    def __init__(self, target: str, environment: dict[str, str]) -> None:
        super().__init__(
            # A shell that runs its caller in the background ignores SIGINT, and children inherit that. `env` restores
            # it, because preexec_fn needs a fork, in which the threads of gRPC may crash.
            ["env", "--default-signal=INT", "make", *target.split()],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def end(self, number: int, timeout: float | None = None) -> str:
        """Send a signal to the whole group, as a terminal does; return what the command printed."""
        os.killpg(self.pid, number)
        return self.communicate(timeout=timeout)[0]
