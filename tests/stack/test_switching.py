"""Batching switched on the running server, on a busy machine and beside the watcher that reloads crashed models."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.server.switching import Switch, plan
from tests.support.stacks import KEY, TestStack, bring_up, stacks
from triton_transformers.settings import MODES
from triton_transformers.triton import Triton, TritonError
from triton_transformers.triton_messages import is_unreported

MODEL = """
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        time.sleep({seconds})
        return config

    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", tensor)]) for tensor in tensors]
"""
TENSORS = """
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
STEP = 'backend: "python"\ndynamic_batching { max_queue_delay_microseconds: 100 }\n' + TENSORS
# name -> (config.pbtxt, seconds that each load takes)
MODELS = {
    "first": (STEP + "instance_group [ { count: 1 kind: KIND_CPU } ]", 0),
    "second": (STEP + "instance_group [ { count: 1 kind: KIND_CPU } ]", 0),
    "slow": (STEP + "instance_group [ { count: 2 kind: KIND_CPU } ]", 4),
    "pair": (
        'platform: "ensemble"\n' + TENSORS + "ensemble_scheduling { step [\n"
        '  { model_name: "first" model_version: -1\n'
        '    input_map { key: "x" value: "x" } output_map { key: "y" value: "between" } },\n'
        '  { model_name: "second" model_version: -1\n'
        '    input_map { key: "x" value: "between" } output_map { key: "y" value: "y" } }\n'
        "] }",
        0,
    ),
}
# Each mode once. A hundred take ten minutes.
SWITCHES = int(os.environ.get("SWITCHES", 3))
REQUEST = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [7]}]}


def small_models() -> TestStack:
    """Return a stack, not yet up, that serves an ensemble of two quick models and a model that loads slowly."""
    stack = TestStack(Path(tempfile.mkdtemp(prefix="stack-")), {"SYSTEMS": "pair slow", "GRAFANA_HOME": "none"})
    for name, (config, seconds) in MODELS.items():
        (stack.folder / "models" / name / "1").mkdir(parents=True)
        (stack.folder / "models" / name / "config.pbtxt").write_text(config)
        if name != "pair":
            (stack.folder / "models" / name / "1/model.py").write_text(MODEL.format(seconds=seconds))
    return stack


@pytest.fixture(scope="module")
def stack() -> Iterator[TestStack]:
    """Start a server of models that load in seconds, and a log that has nothing else."""
    with stacks(small_models) as create:
        yield bring_up(create())


@pytest.fixture
def busy_machine() -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


def answer(triton: Triton) -> list[float]:
    """Return the pair's answer. Repeat a request whose process got no CPU for so long that Triton gave up on it."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return triton.infer("pair", REQUEST)["outputs"][0]["data"]
        except TritonError as error:
            if time.monotonic() > deadline or not is_unreported(str(error)):
                raise
            time.sleep(1)


def is_batching(stack: TestStack, model: str) -> bool:
    return "dynamic_batching" in stack.triton.config(model)


def test_errors_in_the_log_of_a_healthy_start_are_explained(stack):
    errors = re.findall(r"^E\d{4} .*\] \"(.*)\"$", stack.log, re.MULTILINE)
    assert errors
    harmless = ("CudaDriverHelper has not been initialized", "unable to create stream")
    rest = [error for error in errors if not error.startswith(harmless)]
    # On a busy machine, `make up` repeats a load.
    assert [error for error in rest if not is_unreported(error)] == []
    assert all(f"'{text}'" in stack.log for text in harmless)


@pytest.mark.usefixtures("busy_machine")
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("switches", "pause"), [(SWITCHES, 0), (1, 2.5)], ids=str)
def test_switch_holds_and_requests_succeed_on_a_busy_machine(stack, switches, pause, monkeypatch):
    """The pause is long enough for the watcher to act on a model before the next one is loaded."""
    triton = Triton(stack.http, KEY)  # whose loads only the switch repeats
    load = triton.load
    monkeypatch.setattr(triton, "load", lambda *arguments: (load(*arguments), time.sleep(pause)))
    with Switch(triton, plan(triton.composing("pair"), None, MODES, 2), stack.folder) as switch:
        for number in range(switches):
            mode = MODES[number % 3]
            switch.to(mode)
            assert switch.in_force()
            assert [is_batching(stack, step) for step in ("first", "second")] == [mode == "dynamic"] * 2
            assert answer(triton) == [7]
    assert is_batching(stack, "first") and is_batching(stack, "second")


def test_second_load_of_the_same_config_starts_no_process(stack):
    """The switch relies on this: it loads each model twice, the second time to wait for other clients' loads."""
    config = stack.triton.config("first")
    stack.triton.load("first", config)
    before = stack.stub("first")
    stack.triton.load("first", config)
    assert stack.stub("first") == before


def test_crash_during_a_load_does_not_bring_back_the_older_config(stack):
    """The watcher sees too few processes while the load goes on, for it takes seconds."""
    without = {key: value for key, value in stack.triton.config("slow").items() if key != "dynamic_batching"}
    for process in stack.processes("triton_python_backend_stub", "/slow/"):
        process.kill()
    stack.triton.load("slow", without)
    end = time.monotonic() + 8
    while time.monotonic() < end:
        assert not is_batching(stack, "slow")
        time.sleep(0.2)
