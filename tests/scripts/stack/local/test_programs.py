"""Programs and packages of the local runtime: their places and their releases."""

import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.stack.local import programs
from triton_transformers.settings import ROOT, UserError


def unpack(folder: Path, name: str = "grafana", version: str = "Version 11.6.0 (commit: 1, branch: HEAD)") -> Path:
    """Create those files of an unpacked archive of Grafana that the code reads."""
    (folder / "bin").mkdir(parents=True)
    (folder / "conf").mkdir()
    (folder / "conf/defaults.ini").touch()
    (folder / "bin" / name).write_text(f"#!/bin/sh\necho '{version}'\n")
    (folder / "bin" / name).chmod(0o755)
    return folder


@pytest.mark.parametrize(("name", "command"), [("grafana", "server"), ("grafana-server", "")])
def test_grafana_home_is_used(tmp_path, name, command):
    grafana = programs.grafana(unpack(tmp_path / "home", name))
    assert grafana == programs.Grafana(tmp_path / "home/bin" / name, tmp_path / "home")
    assert grafana.command == command
    with pytest.raises(UserError, match="there is neither bin/grafana nor bin/grafana-server in it"):
        programs.grafana(tmp_path)


@pytest.mark.parametrize(
    ("version", "release"), [("Version 11.6.0 (commit: 1)", 11), ("grafana version 12.1.1", 12), ("7.5.5", 7), ("", 0)]
)
def test_grafana_reports_its_release(tmp_path, version, release):
    assert programs.grafana(unpack(tmp_path / "home", version=version)).release() == release


def test_stand_in_of_grafana_reports_a_release_and_serves_nothing_then():
    """It served on port 3000 of all addresses, and each `make up` waited 20 s for it."""
    stand_in = ROOT / "tests/docker/stand-ins/grafana/grafana_stand_in.py"
    done = subprocess.run([sys.executable, stand_in, "-v"], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"Version {programs.MIN_GRAFANA}.0.0 (a stand-in)\n"


def test_grafana_on_the_path_is_used(tmp_path, monkeypatch):
    home = unpack(tmp_path / "home")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert programs.grafana(None) is None
    (tmp_path / "links").mkdir()
    (tmp_path / "links/grafana").symlink_to(home / "bin/grafana")
    monkeypatch.setenv("PATH", str(tmp_path / "links"))
    assert programs.grafana(None).home == home


def test_python_path_keeps_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/of/the/shell")
    assert programs.python_path("transformers", tmp_path) == "/of/the/shell"
    monkeypatch.setattr(programs, "transformers", lambda requirement, state: "/another")
    assert programs.python_path("transformers==5.0.0", tmp_path) == "/another:/of/the/shell"
    monkeypatch.delenv("PYTHONPATH")
    assert programs.python_path("transformers==5.0.0", tmp_path) == "/another"


def loaded_by_stub(home: Path) -> str:
    """Return the path of the libpython that the loader gives Triton's stub."""
    stub = home / "backends/python/triton_python_backend_stub"
    listed = subprocess.run(["ldd", stub], capture_output=True, text=True, check=True).stdout
    found = re.search(r"libpython\S+ => (\S+)", listed)
    assert found, listed
    return found[1]


def version_of(libpython: str) -> str:
    """Return the version of a libpython; in another process, because this one may have loaded its own."""
    program = "import ctypes, sys; version = ctypes.CDLL(sys.argv[1]).Py_GetVersion; version.restype = ctypes.c_char_p"
    command = [sys.executable, "-c", f"{program}; print(version().decode().split()[0])", libpython]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_stub_loads_the_libpython_of_this_python(tmp_path):
    """The loader's may be older: `ssl` then needs a function that it does not have."""
    assert version_of(loaded_by_stub(programs.triton(tmp_path))) == platform.python_version()


@pytest.mark.parametrize(
    ("release", "message"),
    [
        (sys.version_info[:3], ""),
        ((3, 11, 0), r"without a shared library, and {name} is of the older 3\.11\.0, .*: set PYTHON to"),
        (None, r"needs {name}, which this machine lacks: install libpython3"),
    ],
)
def test_libpython_of_the_loader_replaces_a_missing_own_if_it_is_not_older(tmp_path, monkeypatch, release, message):
    def load(name: str) -> str:
        if not release:
            raise OSError(f"{name}: cannot open shared object file")
        return name

    monkeypatch.setattr(programs.sysconfig, "get_config_var", lambda name: str(tmp_path / "built-elsewhere"))
    monkeypatch.setattr(programs.sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr(programs.ctypes, "CDLL", load)
    monkeypatch.setattr(programs, "release_of", lambda library: release)
    monkeypatch.setattr(programs, "debian_package", lambda name, state: None)
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    if message:
        with pytest.raises(UserError, match=message.format(name=re.escape(name))):
            programs.libpython(tmp_path)
    else:
        assert programs.libpython(tmp_path) is None
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / name).touch()
    assert programs.libpython(tmp_path) == tmp_path / "lib" / name  # its own is preferred
