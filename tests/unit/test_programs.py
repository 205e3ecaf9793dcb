"""Where the local runtime finds its programs and packages, and whether they will do."""

from pathlib import Path

import pytest

from scripts.common.settings import UserError
from scripts.stack.local import programs


def unpacked(folder: Path, name: str = "grafana", says: str = "Version 11.6.0 (commit: 1, branch: HEAD)") -> Path:
    """An archive of Grafana, unpacked: what of it is asked for here."""
    (folder / "bin").mkdir(parents=True)
    (folder / "conf").mkdir()
    (folder / "conf/defaults.ini").touch()
    (folder / "bin" / name).write_text(f"#!/bin/sh\necho '{says}'\n")
    (folder / "bin" / name).chmod(0o755)
    return folder


@pytest.mark.parametrize(("name", "command"), [("grafana", "server"), ("grafana-server", "")])
def test_in_its_home(tmp_path, name, command):
    found = programs.grafana(unpacked(tmp_path / "home", name))
    assert found == programs.Grafana(tmp_path / "home/bin" / name, tmp_path / "home")
    assert found.command == command


def test_a_home_without_one_is_said(tmp_path):
    with pytest.raises(UserError, match="there is neither bin/grafana nor bin/grafana-server in it"):
        programs.grafana(tmp_path)


def test_on_the_path(tmp_path, monkeypatch):
    home = unpacked(tmp_path / "home")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert programs.grafana(None) is None
    (tmp_path / "links").mkdir()
    (tmp_path / "links/grafana").symlink_to(home / "bin/grafana")
    monkeypatch.setenv("PATH", str(tmp_path / "links"))
    assert programs.grafana(None).home == home


@pytest.mark.parametrize(
    ("says", "release"), [("Version 11.6.0 (commit: 1)", 11), ("grafana version 12.1.1", 12), ("7.5.5", 7), ("", 0)]
)
def test_its_release(tmp_path, says, release):
    assert programs.grafana(unpacked(tmp_path / "home", says=says)).release() == release


def test_what_the_shell_says_of_packages_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/of/the/shell")
    assert programs.python_path("transformers", tmp_path) == "/of/the/shell"
    monkeypatch.setattr(programs, "transformers", lambda wanted, state: "/another")
    assert programs.python_path("transformers==5.0.0", tmp_path) == "/another:/of/the/shell"
    monkeypatch.delenv("PYTHONPATH")
    assert programs.python_path("transformers==5.0.0", tmp_path) == "/another"
