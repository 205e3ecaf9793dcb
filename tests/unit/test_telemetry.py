"""OpenVINO sends nothing: its reports go through a package that it imports if that is installed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.onnx_models import save_lookup
from triton_transformers.settings import ROOT

BACKENDS = ROOT / "images/triton/backends"
RUN = "from pathlib import Path; from shared.engines import OpenVinoGraph; OpenVinoGraph(Path({model!r}), ['row'])"


@pytest.mark.parametrize(
    ("program", "reported"), [("import openvino", "reported\n"), (RUN, "")], ids=["unguarded", "ours"]
)
def test_openvino_reports_nothing_from_our_processes(tmp_path, program, reported):
    """A stand-in for openvino_telemetry ends a process that imports it. CI=true would silence the real one."""
    (tmp_path / "openvino_telemetry.py").write_text("import os\nprint('reported', flush=True)\nos._exit(1)")
    model = str(save_lookup(tmp_path / "model.onnx"))
    done = subprocess.run(
        [sys.executable, "-c", program.format(model=model)],
        env={"PYTHONPATH": f"{tmp_path}:{BACKENDS}"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (int(bool(reported)), reported), done.stderr


def test_only_guarded_modules_import_openvino():
    """The packages of the backends, of the exporters and of the other servers guard all their modules."""
    command = [
        "git",
        "grep",
        "-lE",
        r"^\s*(import|from) openvino",
        "--",
        "images",
        "scripts",
        "triton_transformers",
        "bench",
    ]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert {os.path.dirname(path) for path in listed} == {
        "bench/peers",
        "images/triton/backends/shared",
        "triton_transformers/models/exporters",
    }
    for package in ("bench/peers", "triton_transformers/models/exporters"):
        guard = (ROOT / package / "__init__.py").read_text()
        assert 'sys.modules.setdefault("openvino_telemetry", None)' in guard
