"""The install: its progress lines while pip works, and the index that PyTorch comes from."""

import os
import pty
import re
import subprocess
import threading
import tomllib
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from scripts.common.ports import free_ports
from scripts.common.settings import ROOT
from scripts.make import install

pytestmark = pytest.mark.slow

# Stands in for pip: the lines that pip prints, and 3 MB in its temporary folder. If the test names the progress lines
# that it expects, each phase lasts until the test has seen its line.
FAKE_PYTHON = """#!/bin/bash
[[ "$3" == install ]] || exit 0
echo "${@:4}" >>FOLDER/calls
phase() { until [[ ! "${PHASES:-}" || -e FOLDER/seen-$1 ]]; do sleep 0.02; done; }
echo "Collecting torch==2.13.0 (from -r requirements.lock (line 99))"
echo "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (3 MB)"
head -c 3000000 /dev/zero >$TMPDIR/torch.whl
phase 0
echo "Processing /wheels/typing_extensions-4.15.0-py3-none-any.whl (from torch)"
echo "WARNING: a message of pip's" >&2
phase 1
echo "Installing collected packages: typing-extensions, torch"
mkdir -p FOLDER/lib/python3.11/site-packages/typing_extensions-4.15.0.dist-info
phase 2
exit ${PIP_EXIT_CODE:-0}
"""


@pytest.fixture
def venv(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text(FAKE_PYTHON.replace("FOLDER", str(tmp_path)))
    (tmp_path / "bin/python").chmod(0o755)
    return tmp_path


def run_install(venv, group, expected=(), **variables):
    """Return the exit code and the output at a terminal. Each phase of pip lasts until its expected line came twice."""
    if expected:
        variables["PHASES"] = "1"
    ours, terminal = pty.openpty()
    command = ["scripts/make/install.sh", str(venv), "requirements.lock", group]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | variables, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        text = b""
        try:
            while chunk := os.read(ours, 4096):
                text += chunk
                for phase, line in enumerate(expected):
                    if text.count(line.encode()) >= 2:
                        (venv / f"seen-{phase}").touch()
        except OSError:  # the other end is closed
            pass
    os.close(ours)
    return process.returncode, text.decode()


@contextmanager
def index(status):
    """Serve every page with this status; with None, accept connections and do not answer for a minute."""
    left = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if status is None:
                left.wait(60)
            self.send_response(status or 200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        left.set()
        server.shutdown()


def test_terminal_shows_a_line_that_moves(venv):
    expected = [
        "downloaded 3.0 MB, package 1: torch",
        "downloaded 3.0 MB, package 2: typing_extensions",
        "installed 1 of 2 packages",
    ]
    code, text = run_install(venv, "tools", expected=expected)
    assert code == 0, text
    lines = [line for line in re.split(r"\r(?:\x1b\[K)?", text) if line.startswith("  ")]
    assert all(sum(phase in line for line in lines) >= 2 for phase in expected)
    assert "\r\x1b[KWARNING: a message of pip's" in text


def test_log_file_gets_a_progress_line_every_ten_seconds(tmp_path, capsys, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(install, "time", SimpleNamespace(monotonic=lambda: clock.now))
    (tmp_path / "torch.whl").write_bytes(bytes(3_000_000))
    progress = install.Progress(tmp_path, tmp_path, 127)
    progress.read(["Collecting torch==2.13.0 (from -r requirements.lock (line 99))\n"])
    for _ in range(100):
        progress.show()
        clock.now += install.REFRESH_S
    line = "downloaded 3.0 MB, package 1 of 127: torch"
    assert capsys.readouterr().out.splitlines() == [f"  0:10 {line}", f"  0:20 {line}"]


def test_log_file_gets_the_messages_of_pip(venv, capfd):
    assert install.pip_install(venv, "torch", total=127) == 0
    assert capfd.readouterr().err == "WARNING: a message of pip's\n"


def test_failed_pip_fails_the_install(venv):
    code, text = run_install(venv, "tools", PIP_EXIT_CODE="1")
    assert code == 1
    assert "error: pip could not install requirements.lock: see its message above" in text


def test_only_torch_comes_from_its_index(venv):
    with index(200) as url:
        code, text = run_install(venv, "all", TORCH_INDEX=url, no_proxy="127.0.0.1")
    assert code == 0, text
    torch, everything = (venv / "calls").read_text().splitlines()
    assert re.search(rf"--no-deps .*--index-url {url} torch==2\.", torch)
    assert re.search(r"--constraint requirements\.lock aiohappyeyeballs==\S+ .* types-requests==\S+$", everything)
    assert "index-url" not in everything


def test_stack_has_its_groups_without_the_tools_of_development():
    lock, stack = (install.pins(str(ROOT / "requirements.lock"), group) for group in ("all", "stack"))
    assert set(stack) < set(lock)
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    names = {re.sub("[-_]+", "-", pin.partition("==")[0]).lower() for pin in stack}
    for name in ("tools", "local", "server", "onnx", "export", "loadtest", "gateway"):
        assert {re.split(r"[\[=]", pin)[0] for pin in groups[name] if isinstance(pin, str)} <= names
    assert not {"oci", "mypy", "ruff", "selenium"} & names


@pytest.mark.parametrize("status", [None, 403])
def test_failing_index_is_not_used(monkeypatch, status):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(install, "PROBE_S", 0.5)
    with index(status) as url:
        assert not install.answers(url)


def test_unreachable_index_falls_back_to_pypi_with_one_line(venv):
    url = f"http://127.0.0.1:{free_ports(1)[0]}/whl"
    code, text = run_install(venv, "all", TORCH_INDEX=url, no_proxy="127.0.0.1")
    assert code == 0, text
    assert f"TORCH_INDEX={url} does not answer: PyTorch comes from PyPI" in text
    assert len((venv / "calls").read_text().splitlines()) == 1
