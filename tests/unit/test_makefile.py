"""The front door."""

import re
import subprocess

from scripts.common.settings import ROOT


def test_help_is_the_default_and_lists_every_target():
    text = subprocess.run(["make"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert sorted(re.findall(r"^  make (\S+)", text, re.MULTILINE)) == sorted(phony)


def test_reading_the_makefile_writes_nothing():
    subprocess.run(["make", "--dry-run", "loadtest"], cwd=ROOT, check=True, capture_output=True)


def test_install_says_what_the_machine_lacks(tmp_path):
    done = subprocess.run(
        ["scripts/make/install.sh", tmp_path / "venv", "requirements.lock"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHON": "no-such-python"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == "error: no-such-python is not installed (Debian: apt install python3 python3-venv)\n"
