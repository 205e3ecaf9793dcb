"""Programs and packages of the local runtime: their places and their releases."""

from pathlib import Path

import pytest

from scripts.common.settings import UserError
from scripts.stack.local import programs


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


def test_grafana_home_without_grafana_is_an_error(tmp_path):
    with pytest.raises(UserError, match="there is neither bin/grafana nor bin/grafana-server in it"):
        programs.grafana(tmp_path)


def test_grafana_on_the_path_is_used(tmp_path, monkeypatch):
    home = unpack(tmp_path / "home")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert programs.grafana(None) is None
    (tmp_path / "links").mkdir()
    (tmp_path / "links/grafana").symlink_to(home / "bin/grafana")
    monkeypatch.setenv("PATH", str(tmp_path / "links"))
    assert programs.grafana(None).home == home


@pytest.mark.parametrize(
    ("version", "release"), [("Version 11.6.0 (commit: 1)", 11), ("grafana version 12.1.1", 12), ("7.5.5", 7), ("", 0)]
)
def test_grafana_reports_its_release(tmp_path, version, release):
    assert programs.grafana(unpack(tmp_path / "home", version=version)).release() == release


def test_python_path_keeps_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/of/the/shell")
    assert programs.python_path("transformers", tmp_path) == "/of/the/shell"
    monkeypatch.setattr(programs, "transformers", lambda requirement, state: "/another")
    assert programs.python_path("transformers==5.0.0", tmp_path) == "/another:/of/the/shell"
    monkeypatch.delenv("PYTHONPATH")
    assert programs.python_path("transformers==5.0.0", tmp_path) == "/another"
