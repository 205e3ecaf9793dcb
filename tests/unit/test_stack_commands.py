"""`make status`, `logs` and `down` while nothing runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from scripts.common.settings import ROOT, Settings
from scripts.stack.local.stack import LocalStack


@pytest.mark.parametrize("target", ["status", "logs", "down"])
@pytest.mark.parametrize("runtime", ["docker", "local"])
def test_without_packages_the_stack_is_not_running(tmp_path, target, runtime):
    """Report only this runtime: a stack of the other one may have run."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "scripts/make", tmp_path / "scripts/make")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", target, f"RUNTIME={runtime}"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "not running: 'make up' starts the stack\n")


def test_status_and_logs_of_a_stopped_stack(tmp_path, capsys):
    stack = LocalStack(Settings(Settings.load() | {"LOCAL_STATE": str(tmp_path), "RUNTIME": "local"}))
    assert stack.status()
    stack.logs(follow=False)
    assert capsys.readouterr().out.splitlines() == [
        "not running (RUNTIME=local): `make up` starts it",
        f"no logs: nothing has run without Docker in {tmp_path} yet (`make up`)",
    ]


def test_docker_commands_import_only_the_tools_group():
    """A host with Docker installs no other package."""
    script = """
import importlib.metadata, sys, tomllib
group = tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["tools"]
tools = {line.partition("==")[0] for line in group} | {"markdown-it-py", "mdurl", "Pygments", "pygments"}
for module, packages in importlib.metadata.packages_distributions().items():
    if not tools & set(packages) and module not in sys.modules:
        sys.modules[module] = None  # importing it raises ImportError
import scripts.models.package, scripts.stack.__main__, scripts.stack.docker.stack
import scripts.stack.generate, scripts.stack.smoke
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
