"""`make drill` without drills: their list, and a wrong name."""

from __future__ import annotations

import os
import subprocess

from scripts.common.settings import ROOT

NAMES = ["prometheus-killed", "config-broken", "wrong-requests-to-gateway"]


def make_drill(folder, **variables: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    own |= {"TRITON_SETTINGS_FILE": f"{folder}/.env", "COLUMNS": "200"}
    command = ["make", "drill", f"REPORTS={folder}/reports", *(f"{name}={value}" for name, value in variables.items())]
    return subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=1000)


def test_drills_are_listed_without_starting_anything(tmp_path):
    done = make_drill(tmp_path, LIST="1")
    assert done.returncode == 0, done.stderr
    assert all(f"{name} " in done.stdout for name in NAMES)
    assert not (tmp_path / "reports").exists()


def test_unknown_drill_is_one_sentence(tmp_path):
    done = make_drill(tmp_path, DRILL="nothing", LIST="1")
    assert done.returncode != 0
    assert "error: no drill nothing; make drill LIST=1 lists them" in done.stderr
    assert "Traceback" not in done.stderr
