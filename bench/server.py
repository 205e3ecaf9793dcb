"""A server for one benchmark, on free ports and under its own folder, so that a running stack is not disturbed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from scripts.stack.base import PORTS
from triton_transformers.ports import free_ports
from triton_transformers.settings import NAMES, ROOT, Settings, UserError, command_environment

PORT_NAMES = [name for names in PORTS.values() for name in names] + ["LOADTEST_METRICS_PORT"]


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
    """Return the environment in which every command uses the benchmark's own server."""
    ports = dict(zip(PORT_NAMES, map(str, free_ports(len(PORT_NAMES))), strict=True))
    places = {"LOCAL_STATE": f"{path}/state", "MODEL_REPOSITORY": f"{path}/models", "REPORTS": f"{path}/reports"}
    return command_environment(**ports | places | {"RUNTIME": "local", "GRAFANA_HOME": "none"} | settings)


@contextlib.contextmanager
def server(variables: dict[str, str], quiet: bool = False) -> Iterator[None]:
    try:
        command("up", variables, quiet)
        yield
    finally:
        command("down", variables, quiet)


def with_names(variables: dict[str, str]) -> dict[str, str]:
    """Return the environment in which all variables that a benchmark has set count as settings."""
    names = [name for name, value in variables.items() if os.environ.get(name) != value and name != NAMES]
    return variables | {NAMES: " ".join([variables.get(NAMES, ""), *names])}


def command(name: str, variables: dict[str, str], quiet: bool = False) -> None:
    """Run one of the stack's commands; if `quiet`, print nothing and raise its message if it fails."""
    call = [sys.executable, "-m", "scripts.stack", name]
    done = subprocess.run(call, cwd=ROOT, env=with_names(variables), capture_output=quiet, text=True)
    if done.returncode:
        message = done.stderr.strip() if quiet else "its message is above"
        raise UserError(f"`{name}` failed for the benchmark's own server; {message}")
