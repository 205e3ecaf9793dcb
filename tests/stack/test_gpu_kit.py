"""The kit for a bare machine with a GPU serves and compares a model on this machine's CPU, and writes its report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

from triton_transformers.settings import ROOT

pytestmark = pytest.mark.slow

SYSTEM = "bertforsequenceclassificationtextclassification524"


@pytest.fixture
def kit():
    """Return a folder with a short name: the path of a socket may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kit-") as folder:
        yield Path(folder)


def test_parity_step_compares_a_served_model_and_reports(kit):
    (kit / "venv").symlink_to(sys.prefix)
    environment = os.environ | {"GPU_KIT": str(kit), "OUT": str(kit / "out")}
    step = [ROOT / "loadtest/bench/gpu/run.sh", "parity", "bfloat16", "--here", "--only", SYSTEM]
    done = subprocess.run(step, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bfloat16: 1 of 1 rows: 1 within 0.1 of float32" in (kit / "out/summary.md").read_text()
    with tarfile.open(kit / "out/results.tar.gz") as results:
        facts = json.load(results.extractfile(f"./parity/bfloat16/{SYSTEM}.json"))
    differences = [float(cell) for cell in facts["cells"][4:7]]
    assert all(1e-5 < difference < 0.1 for difference in differences), "it did not compute in half precision"
