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
from pathlib import Path

from triton_transformers.ports import free_ports
from triton_transformers.settings import DEFAULTS, NAMES, ROOT, Settings, UserError, command_environment


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


def environment(path: Path, **settings: str) -> dict[str, str]:
    """Return the environment in which every command uses the program's own stack."""
    names = [name for name in DEFAULTS if name.endswith("_PORT")]
    ports = dict(zip(names, map(str, free_ports(len(names))), strict=True))
    places = {"LOCAL_STATE": f"{path}/state", "MODEL_REPOSITORY": f"{path}/models", "REPORTS": f"{path}/reports"}
    return command_environment(**ports | places | {"RUNTIME": "local", "GRAFANA_HOME": "none"} | settings)


def with_names(variables: dict[str, str]) -> dict[str, str]:
    """Return the environment in which all variables that a program has set count as settings."""
    names = [name for name, value in variables.items() if os.environ.get(name) != value and name != NAMES]
    return variables | {NAMES: " ".join([variables.get(NAMES, ""), *names])}


@contextlib.contextmanager
def server(variables: dict[str, str], quiet: bool = False) -> Iterator[None]:
    try:
        command("up", variables, quiet)
        yield
    finally:
        command("down", variables, quiet)


def command(name: str, variables: dict[str, str], quiet: bool = False) -> None:
    """Run one of the stack's commands; if `quiet`, print nothing and raise its message if it fails."""
    call = [sys.executable, "-m", "scripts.stack", name]
    done = subprocess.run(call, cwd=ROOT, env=with_names(variables), capture_output=quiet, text=True)
    if done.returncode:
        message = done.stderr.strip() if quiet else "its message is above"
        raise UserError(f"`{name}` failed for the benchmark's own server; {message}")


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
