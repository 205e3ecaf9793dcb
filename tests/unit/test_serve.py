"""serve.sh: what it makes of the machine. Stand-ins take the places of the server and of df."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from scripts.common.settings import ROOT

MIB = 2**20


@pytest.fixture
def shared_memory(tmp_path):
    """What a Python process begins with, where df says this."""
    for name in ("bin", "home/bin"):
        (tmp_path / name).mkdir(parents=True)
    programs = {"home/bin/tritonserver": 'printf "%s\\n" "$@"', "bin/python3": ":", "bin/df": '. "$DF"'}
    for name, does in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)

    def started(df: str, **settings: str) -> int:
        (tmp_path / "df").write_text(df)
        environment = {
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
            "DF": str(tmp_path / "df"),
            "TRITON_HOME": str(tmp_path / "home"),
            "TRITON_ADMIN_KEY": "a-key-of-the-tests",
        }
        done = subprocess.run(
            [ROOT / "images/triton/serve.sh"], env=environment | settings, capture_output=True, text=True, timeout=30
        )
        assert (done.returncode, done.stderr) == (0, "")
        return int(re.search(r"shm-default-byte-size=(\d+)$", done.stdout, re.MULTILINE)[1])

    return started


@pytest.mark.parametrize(
    ("there", "expected"),
    [(64 * MIB, 4 * MIB), (256 * MIB, 16 * MIB), (16 * 2**30, 64 * MIB), (MIB, 4 * MIB), (0, 64 * MIB)],
)
def test_what_fits(shared_memory, there, expected):
    assert shared_memory(f"printf '  1B-blocks\\n %s\\n' {there}") == expected


@pytest.mark.parametrize("df", ["echo 'df: unrecognized option: output' >&2; exit 1", "echo Size; echo -", "exit 1"])
def test_where_it_is_not_known(shared_memory, df):
    assert shared_memory(df) == 64 * MIB


def test_what_is_set_is_not_asked_for(shared_memory):
    assert shared_memory("kill -9 $PPID", TRITON_SHM_BYTES="12345678") == 12345678
