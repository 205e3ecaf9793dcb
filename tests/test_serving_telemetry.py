"""OpenVINO sends nothing: its reports go through a package that it imports if that is installed."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.onnx_models import save_lookup
from triton_transformers.settings import ROOT

RUN = "from pathlib import Path; from serving.engines import graphs; graphs.OpenVinoGraph(Path({model!r}), ['row'])"


@pytest.mark.parametrize(
    ("program", "reported"), [("import openvino", "reported\n"), (RUN, "")], ids=["unguarded", "ours"]
)
def test_openvino_reports_nothing_from_our_processes(tmp_path, program, reported):
    """A stand-in for openvino_telemetry ends a process that imports it. CI=true would silence the real one."""
    (tmp_path / "openvino_telemetry.py").write_text("import os\nprint('reported', flush=True)\nos._exit(1)")
    model = str(save_lookup(tmp_path / "model.onnx"))
    done = subprocess.run(
        [sys.executable, "-c", program.format(model=model)],
        env={"PYTHONPATH": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (int(bool(reported)), reported), done.stderr


def test_only_guarded_modules_import_openvino():
    """The packages of the backends, of the exporters and of the other servers guard all their modules."""
    command = ["git", "grep", "-lE", r"^\s*(import|from) openvino", "--", "*.py", ":!tests"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    guarded = ("export/recipes", "loadtest/bench/peers", "serving")
    assert {next((folder for folder in guarded if path.startswith(f"{folder}/")), path) for path in listed} == {
        *guarded
    }
    for folder in guarded:
        assert re.search(r"^sys\.modules.*openvino_telemetry.* None", (ROOT / folder / "__init__.py").read_text(), re.M)
