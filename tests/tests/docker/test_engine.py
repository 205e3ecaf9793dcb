"""`make test-docker` installs and starts an engine only with consent, and stops only the engine that it started."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

from triton_transformers.settings import ROOT

pytestmark = pytest.mark.slow

SCRIPTS = ("run.sh", "common.sh", "stop-engine.sh")
# A stand-in for each program that run.sh calls. The engine is a `sleep` of that name; $ENGINE exists while it answers.
STAND_INS = {
    "bin/docker": '[ -e "$ENGINE" ]',
    "tests/docker/engine.sh": """
        mkdir -p "$DOCKER_STATE"; touch "$ENGINE"
        cp "$(command -v sleep)" "$DOCKER_STATE/dockerd"
        setsid "$DOCKER_STATE/dockerd" 120 >/dev/null 2>&1 </dev/null &
        until [[ $(ps -o comm= -p $!) == dockerd ]]; do sleep 0.02; done
        echo $! >"$DOCKER_STATE/dockerd.pid" """,
    "tests/docker/base-images.sh": "true",
    ".venv/bin/python": 'echo "$@"; exit "${TESTS_FAIL:-0}"',
}


@pytest.fixture
def checkout(tmp_path) -> Path:
    for name, script in STAND_INS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    for name in SCRIPTS:
        shutil.copy(ROOT / "tests/docker" / name, tmp_path / "tests/docker")
    return tmp_path


def run(checkout: Path, stdin: int = subprocess.DEVNULL, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "INSTALL_DOCKER")} | {
        "PATH": f"{checkout}/bin:{os.environ['PATH']}",
        "DOCKER_STATE": str(checkout / "state"),
        "ENGINE": str(checkout / "answers"),
    }
    return subprocess.run(
        [checkout / "tests/docker/run.sh"],
        env=environment | settings,
        stdin=stdin,
        capture_output=True,
        text=True,
        timeout=60,
    )


def engines(checkout: Path) -> list[psutil.Process]:
    program = str(checkout / "state/dockerd")
    return [p for p in psutil.process_iter(["cmdline", "status"]) if (p.info["cmdline"] or [""])[0] == program]


def test_without_consent_nothing_is_installed(checkout):
    done = run(checkout)
    assert (done.returncode, done.stdout) == (1, "")
    assert "No Docker engine answers. Start it, or let the tests install and start it: make test-docker" in done.stderr
    assert not (checkout / "state").exists()
    master, terminal = os.openpty()
    os.write(master, b"\n")
    done = run(checkout, stdin=terminal)
    os.close(master)
    os.close(terminal)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Install Docker on this machine (apt, as root) and start it? [y/N]" in done.stderr


@pytest.mark.parametrize("settings", [{"INSTALL_DOCKER": "1"}, {"CI": "true", "TESTS_FAIL": "3"}])
def test_started_engine_is_stopped_at_the_end(checkout, settings):
    done = run(checkout, **settings)
    assert done.returncode == int(settings.get("TESTS_FAIL", "0")), done.stderr
    (tests,) = done.stdout.splitlines()
    assert tests.startswith("-m tests.rerun tests/docker ")
    assert engines(checkout) == []
    assert not (checkout / "state/dockerd.pid").exists()


def test_running_engine_is_not_stopped(checkout):
    (checkout / "state").mkdir()
    (checkout / "answers").touch()
    shutil.copy(shutil.which("sleep"), checkout / "state/dockerd")
    (checkout / "tests/docker/engine.sh").write_text("#!/bin/bash\n")
    with subprocess.Popen([checkout / "state/dockerd", "120"]) as engine:
        (checkout / "state/dockerd.pid").write_text(f"{engine.pid}\n")
        assert run(checkout).returncode == 0
        assert engine.poll() is None
        engine.kill()
