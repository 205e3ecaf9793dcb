"""The install: its progress lines while uv works, the settings of pip, and the index that PyTorch comes from."""

import os
import pty
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from scripts.make import install
from triton_transformers.ports import free_ports
from triton_transformers.settings import ROOT

pytestmark = pytest.mark.slow

# Stands in for uv: the lines that uv prints. If the test names the progress lines that it expects, each phase lasts
# until the test has seen its line.
FAKE_UV = """#!/bin/bash
[[ $1 != --version ]] || exec echo UV_VERSION
[[ $1 != cache ]] || exec echo FOLDER/cache
echo "${@:3}" >>FOLDER/calls
env | grep -E '^(UV_|SSL_|ALL_PROXY)' >FOLDER/environment
phase() { until [[ ! "${PHASES:-}" || -e FOLDER/seen-$1 ]]; do sleep 0.02; done; }
{
  echo "Using Python 3.11.2 environment at: FOLDER"
  echo "Resolved 2 packages in 776ms"
  echo "Downloading torch (200.0MiB)"
  echo "Downloading numpy (1000.0KiB)"
  phase 0
  echo " Downloaded numpy"
  echo "warning: a message of uv's"
  phase 1
  echo " Downloaded torch"
  echo "Prepared 2 packages in 6.99s"
  echo "Installed 2 packages in 223ms"
  phase 2
  echo "Bytecode compiled 14457 files in 14.60s"
  echo " + numpy==1.26.4"
  echo " + torch==2.13.0+cpu"
} >&2
exit ${UV_EXIT_CODE:-0}
"""


@pytest.fixture
def venv(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    version = install.pin_of(str(ROOT / "requirements.lock"), "uv").replace("==", " ")
    (tmp_path / "bin/uv").write_text(FAKE_UV.replace("FOLDER", str(tmp_path)).replace("UV_VERSION", version))
    (tmp_path / "bin/uv").chmod(0o755)
    return tmp_path


def run_install(venv, group, expected=(), **variables):
    """Return the exit code and the output at a terminal. Each phase of uv lasts until its expected line came twice."""
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
        "downloaded 0 of 211 MB, now torch, numpy",
        "downloaded 1 of 211 MB, now torch",
        "installed 2 packages, compiling their modules",
    ]
    code, text = run_install(venv, "tools", expected=expected)
    assert code == 0, text
    lines = [line for line in re.split(r"\r(?:\x1b\[K)?", text) if line.startswith("  ")]
    assert all(sum(phase in line for line in lines) >= 2 for phase in expected)
    assert "\r\x1b[Kwarning: a message of uv's" in text
    assert "numpy==" not in text


def test_log_file_gets_a_progress_line_for_each_state_and_every_minute(capsys, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(install, "time", SimpleNamespace(monotonic=lambda: clock.now))
    progress = install.Progress()
    for line in ("Downloading torch (200.0MiB)\n", "Installed 2 packages in 223ms\n"):
        progress.read([line])
        for _ in range(400):
            progress.show()
            clock.now += install.REFRESH_S
    downloading, compiling = "downloaded 0 of 210 MB, now torch", "installed 2 packages, compiling their modules"
    assert capsys.readouterr().out.splitlines() == [
        f"  0:10 {downloading}",
        f"  1:10 {downloading}",
        f"  1:40 {compiling}",
        f"  2:40 {compiling}",
    ]


def test_log_file_gets_the_messages_of_uv(venv, capfd):
    assert install.uv_install(venv, "requirements.lock", "torch") == 0
    assert capfd.readouterr().err == "warning: a message of uv's\n"


@pytest.fixture
def pip_conf(tmp_path, monkeypatch):
    """Return the path of pip's only configuration."""
    for name in [
        name for name in os.environ if name.startswith(("PIP_", "UV_", "SSL_", "XDG_")) or "CA_BUNDLE" in name
    ]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    return tmp_path / "pip.conf"


def test_configuration_of_pip_counts_for_uv(venv, pip_conf, monkeypatch):
    pip_conf.write_text("""
[global]
index-url = https://mirror.example/simple
extra-index-url = https://a.example/simple
find-links = /wheels
    ~/more
cert = /etc/company.pem
client-cert = /etc/client.pem
proxy = http://proxy.example:3128
trusted-host = a.example b.example
timeout = 180
constraint = /etc/constraints.txt
no-index = true
[install]
extra-index-url = https://b.example/simple
    https://c.example/simple
""")
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://own.example/simple")
    assert install.uv_install(venv, "requirements.lock", "torch") == 0
    environment = dict(line.split("=", 1) for line in (venv / "environment").read_text().splitlines())
    expected = {
        "UV_DEFAULT_INDEX": "https://own.example/simple",
        "UV_INDEX": "https://b.example/simple https://c.example/simple",
        "UV_FIND_LINKS": "/wheels,/home/ada/more",
        "UV_INSECURE_HOST": "a.example b.example",
        "UV_HTTP_TIMEOUT": "180",
        "SSL_CERT_FILE": "/etc/company.pem",
        "SSL_CLIENT_CERT": "/etc/client.pem",
        "ALL_PROXY": "http://proxy.example:3128",
    }
    assert expected.items() <= environment.items()
    (call,) = (venv / "calls").read_text().splitlines()
    assert "--constraint requirements.lock --constraint /etc/constraints.txt --no-index torch" in call


def test_variables_replace_the_configuration_of_pip(venv, pip_conf, monkeypatch):
    pip_conf.write_text("[global]\ncert = /etc/company.pem\nno-index = false\n")
    monkeypatch.setenv("PIP_CERT", "")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/etc/bundle.pem")
    settings = install.pip_settings(venv)
    assert "no-index" not in settings
    assert install.uv_environment(settings)["SSL_CERT_FILE"] == "/etc/bundle.pem"


def test_wrong_configuration_of_pip_is_an_error_with_its_message(venv, pip_conf, capfd):
    pip_conf.write_text("index-url = no section\n")
    with pytest.raises(SystemExit, match="pip cannot read its configuration"):
        install.uv_install(venv, "requirements.lock", "torch")
    assert "pip.conf" in capfd.readouterr().err


def test_cache_that_cannot_be_written_is_not_used(venv):
    (venv / "cache").write_text("a file")
    assert install.uv_install(venv, "requirements.lock", "torch") == 0
    assert "--no-cache" in (venv / "calls").read_text()


@pytest.mark.parametrize(
    "line", ["    + gcc -c x.c\n", "  Building wheel for foo\n", "Using cached x\n", "error: no\n"]
)
def test_all_of_an_error_is_printed(line, capsys):
    install.Progress().read([line])
    assert capsys.readouterr().err == line


def test_uv_that_does_not_run_is_installed_again(tmp_path):
    assert install.version_of(tmp_path / "uv") == ""
    (tmp_path / "uv").write_bytes(b"")
    (tmp_path / "uv").chmod(0o755)
    assert install.version_of(tmp_path / "uv") == ""


def test_failed_uv_fails_the_install(venv):
    code, text = run_install(venv, "tools", UV_EXIT_CODE="1")
    assert code == 1
    assert "error: uv could not install requirements.lock: see its message above" in text


def test_only_torch_comes_from_its_index(venv):
    with index(200) as url:
        code, text = run_install(venv, "all", TORCH_INDEX=url, no_proxy="127.0.0.1")
    assert code == 0, text
    torch, everything = (venv / "calls").read_text().splitlines()
    assert re.search(rf"--no-deps --default-index {url} torch==2\.", torch)
    assert "--group=stack" in everything and "--group=dev" in everything
    assert "--constraint requirements.lock" in everything
    assert "index" not in everything


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
