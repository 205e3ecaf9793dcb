"""Folders that gen_triton_model.py writes, on the real server, with stand-ins of the Neuron libraries.

They show nothing of how AWS's libraries behave on AWS's hardware.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.support.checkpoints import neuron
from tests.support.checkpoints.neuron import LENGTH, TENSORFLOW, VOCABULARY, WIDTH
from tests.support.neuron import logged, on_neuron
from tests.support.stacks import TestStack, bring_up
from triton_transformers.settings import ROOT
from triton_transformers.triton import TritonError

pytestmark = pytest.mark.slow

GENERATOR = ROOT / "scripts/neuron/gen_triton_model.py"
INPUTS = ("INPUT__0", "INPUT__1", "INPUT__2")
# The tensors of one row. With FOUR_ROWS and ANY_ROWS, Triton sees no batch dimension.
ROW_INPUTS = f"--triton_input {' '.join(f'{name},INT64,{LENGTH}' for name in INPUTS)}"
ROW_OUTPUTS = f"--triton_output OUTPUT__0,FP32,{LENGTH}x{WIDTH} OUTPUT__1,FP32,{WIDTH}"
ANY_ROWS = f"{ROW_INPUTS} {ROW_OUTPUTS}".replace("INT64,", "INT64,-1x").replace("FP32,", "FP32,-1x")
FOUR_ROWS = ANY_ROWS.replace(",-1x", ",4x")
BATCHING = "--max_batch_size 16 --enable_dynamic_batching --max_queue_delay_microseconds 300000"


def one_batch(rows: int) -> str:
    """Return flags with which the model waits until this many rows have arrived, however slowly."""
    return (
        "--max_batch_size 16 --enable_dynamic_batching "
        f"--preferred_batch_size {rows} --max_queue_delay_microseconds 600000000"
    )


@pytest.fixture(scope="module")
def stack(new_stack) -> TestStack:
    """Serve on a stack whose profile is another."""
    stack = on_neuron(new_stack())
    (stack.folder / "compiled").mkdir()
    if TENSORFLOW.is_dir():
        stack.environment["PYTHONPATH"] += f"{os.pathsep}{TENSORFLOW}"
    stack.environment |= {"TF_CPP_MIN_LOG_LEVEL": "2", "SYSTEMS": "first"}
    make(stack, "first", f"--neuron_core_range 15:15 {FOUR_ROWS}")
    return bring_up(stack)


# --- folders ----------------------------------------------------------------------------------------------------------


def generate(stack: TestStack, name: str, flags: str, compiled: Path, kind: str = "pytorch") -> Path:
    folder = stack.folder / "models" / name
    done = subprocess.run(
        [sys.executable, str(GENERATOR), "--model_type", kind, "--compiled_model", str(compiled),
         "--triton_model_dir", str(folder), *flags.split()],
        capture_output=True, text=True, env=stack.variables(), cwd=stack.folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def make(stack: TestStack, name: str, flags: str, form: str = "tuple", rows: int = 0) -> Path:
    """Generate the folder of a model whose output has this form, compiled for this number of rows."""
    compiled = neuron.save_tokens(stack.folder / f"compiled/{form}-{rows}.pt", form, rows)
    return generate(stack, name, flags, compiled)


@contextmanager
def loaded(stack: TestStack, name: str) -> Iterator[Callable[[str], list[dict]]]:
    """Load a model; return a function that lists the events of one kind that its stand-ins logged."""
    before = Counter({event: len(logged(stack, event)) for event in ("load", "DataParallel", "scatter", "run")})
    stack.triton.load(name)
    try:
        yield lambda event: logged(stack, event)[before[event] :]
    finally:
        stack.triton.unload(name)


def edit(folder: Path, before: str, after: str) -> None:
    """Edit config.pbtxt by hand, as a user would."""
    config = folder / "config.pbtxt"
    text = config.read_text()
    assert before in text
    config.write_text(text.replace(before, after))


# --- requests ---------------------------------------------------------------------------------------------------------


def tokens(rows: int, seed: int = 0) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, end, (rows, LENGTH)) for end in (VOCABULARY, 2, 2)]


@torch.inference_mode()
def plain(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Return the model's answer without a server."""
    return [output.numpy() for output in neuron.Tokens()(*map(torch.from_numpy, arrays))]


def ask(stack: TestStack, model: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    inputs = []
    for name, array in tensors.items():
        inputs.append(httpclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    answer = client(stack).infer(model, inputs)
    return {output["name"]: answer.as_numpy(output["name"]) for output in answer.get_response()["outputs"]}


def client(stack: TestStack) -> httpclient.InferenceServerClient:
    return httpclient.InferenceServerClient(stack.http.removeprefix("http://"))


def check(stack: TestStack, model: str, rows: int, seed: int = 0) -> None:
    arrays = tokens(rows, seed)
    answer = ask(stack, model, dict(zip(INPUTS, arrays, strict=True)))
    for name, expected in zip(("OUTPUT__0", "OUTPUT__1"), plain(arrays), strict=True):
        assert answer[name].dtype == np.float32
        np.testing.assert_array_equal(answer[name], expected)


def check_many(stack: TestStack, model: str, rows: list[int]) -> int:
    """Check requests that are sent at once; return the number of their executions."""
    before = stack.triton.statistics()[model]
    with ThreadPoolExecutor(len(rows)) as pool:
        list(pool.map(lambda seed: check(stack, model, rows[seed], seed), range(len(rows))))
    return stack.executions(model, sum(rows), before)


def run_rows(watched) -> list[int]:
    return sorted(line["shapes"][0][0] for line in watched("run"))


# --- cores ------------------------------------------------------------------------------------------------------------

SHARES = ["4-5", "6-7"]  # of two instances


def test_inf1_instances_share_the_cores(stack):
    make(stack, "inf1", f"--neuron_core_range 4:7 --threads_per_core 2 --triton_model_instance_count 2 {FOUR_ROWS}")
    with loaded(stack, "inf1") as watched:
        assert sorted(line["visible"] for line in watched("load")) == SHARES
        assert [line["device_ids"] for line in watched("DataParallel")] == [[0, 1]] * 2
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda seed: check(stack, "inf1", 4, seed), range(8)))
        assert len(watched("scatter")) == 8
        assert {line["num_workers"] for line in watched("scatter")} == {4}
        assert set(run_rows(watched)) == {2}  # a request's 4 rows over an instance's cores
        assert len({line["pid"] for line in watched("load")}) == 2


def test_inf2_instances_share_the_cores(stack):
    make(stack, "inf2", f"--inf2 --neuron_core_range 4:7 --triton_model_instance_count 2 {ANY_ROWS}")
    with loaded(stack, "inf2") as watched:
        placed = Counter((line["visible"], line["core"]) for line in watched("load"))
        assert placed == Counter({(cores, core): 1 for cores in SHARES for core in range(2)})
        for seed in range(4):
            check(stack, "inf2", 4, seed)
        assert run_rows(watched) == [4] * 4  # without COMPILED_BATCH_SIZE, a request stays whole


# --- batches ----------------------------------------------------------------------------------------------------------


def test_failing_request_leaves_its_batch_unharmed(stack):
    make(stack, "merged", f"--inf2 --neuron_core_range 0:1 {one_batch(10)} {ROW_INPUTS} {ROW_OUTPUTS}")
    with loaded(stack, "merged"):
        before = stack.triton.statistics()["merged"]

        def outcome(seed: int) -> str:
            arrays = tokens(2, seed)
            if seed != 2:
                return check(stack, "merged", 2, seed) or "right"
            arrays[0][1, 3] = 7_000_123
            with pytest.raises(InferenceServerException) as error:
                ask(stack, "merged", dict(zip(INPUTS, arrays, strict=True)))
            return str(error.value)

        with ThreadPoolExecutor(5) as pool:
            outcomes = list(pool.map(outcome, range(5)))
        assert outcomes.count("right") == 4
        assert "index out of range" in outcomes[2]
        assert "7000123" not in outcomes[2] and "Traceback" not in outcomes[2]
        assert stack.executions("merged", 8, before) == 1


@pytest.mark.parametrize("chip", ["", "--inf2"])
def test_disabled_batch_requests_run_one_by_one(stack, chip):
    flags = f"{chip} --neuron_core_range 0:1 {one_batch(10)} --disable_batch_requests_to_neuron"
    make(stack, "apart", f"{flags} {ROW_INPUTS} {ROW_OUTPUTS}")
    with loaded(stack, "apart") as watched:
        assert check_many(stack, "apart", [1, 2, 4, 2, 1]) == 1
        whole = watched("run") if chip else watched("scatter")
        assert sorted(line["shapes"][0][0] for line in whole) == [1, 1, 2, 2, 4]


@pytest.mark.parametrize("chip", ["", "--inf2"])
def test_batches_are_padded_to_the_compiled_rows(stack, chip):
    name = f"filled{chip.strip('-')}"
    make(
        stack,
        name,
        f"{chip} --neuron_core_range 0:1 --compiled_batch_size 4 {BATCHING} {ROW_INPUTS} {ROW_OUTPUTS}",
        rows=4,
    )
    with loaded(stack, name) as watched:
        for rows in (1, 4, 5, 11):
            check(stack, name, rows)
        assert run_rows(watched) == [4] * 7
        stack.wait(lambda: counted(stack, "padding_rows", name) == 7, "3, 0, 3 and 1 rows added")
        check_many(stack, name, [1, 2, 3])
        assert set(run_rows(watched)) == {4}


def counted(stack: TestStack, name: str, model: str) -> float | None:
    line = re.search(rf'^transformers_{name}_total{{model="{model}",.*}} (.*)$', stack.metrics(), re.M)
    return line and float(line[1])


def test_missing_compiled_batch_size_is_named(stack):
    make(stack, "unset", f"--inf2 --neuron_core_range 0:1 --max_batch_size 4 {ROW_INPUTS} {ROW_OUTPUTS}", rows=4)
    with loaded(stack, "unset") as watched:
        for seed in range(2):
            check(stack, "unset", 4, seed)
        assert {line["core"] for line in watched("run")} == {0, 1}
        with pytest.raises(InferenceServerException, match=r"given 1 row.*COMPILED_BATCH_SIZE"):
            check(stack, "unset", 1)


# --- outputs ----------------------------------------------------------------------------------------------------------


def test_bfloat16_input_and_output_are_served(stack):
    example = torch.ones(4, 3, dtype=torch.bfloat16)
    compiled = neuron.save_compiled(stack.folder / "compiled/halver.pt", neuron.Halver(), (example,))
    tensors = "--triton_input x__0,BF16,3 --triton_output half__0,BF16,3"
    flags = f"--inf2 --neuron_core_range 0:1 --max_batch_size 8 --compiled_batch_size 4 {tensors}"
    generate(stack, "halver", flags, compiled)
    with loaded(stack, "halver"):
        array = np.random.default_rng(0).random((5, 3), np.float32)
        tensor = httpclient.InferInput("x__0", [5, 3], "BF16")
        tensor.set_data_from_numpy(array.astype(ml_dtypes.bfloat16))
        answer = client(stack).infer("halver", [tensor])
        np.testing.assert_array_equal(answer.as_numpy("half__0").astype(np.float32), rounded(array) / 2)


def rounded(array: np.ndarray) -> np.ndarray:
    return torch.from_numpy(array).bfloat16().float().numpy()


def test_edited_model_py_is_served(stack):
    folder = make(stack, "edited", f"--inf2 --neuron_core_range 0:1 {BATCHING} {ROW_INPUTS} {ROW_OUTPUTS}")
    with (folder / "1/model.py").open("a") as file:
        file.write(
            "\n    def run(self, inputs):\n"
            "        outputs = super().run(inputs)\n"
            '        return outputs | {"OUTPUT__1": -outputs["OUTPUT__1"]}\n'
        )
    with loaded(stack, "edited"):
        arrays = tokens(2)
        answer = ask(stack, "edited", dict(zip(INPUTS, arrays, strict=True)))
        np.testing.assert_array_equal(answer["OUTPUT__1"], -plain(arrays)[1])


# --- models that cannot be served -------------------------------------------------------------------------------------


def refusal(stack: TestStack, name: str) -> str:
    """Return why Triton does not load the model."""
    with pytest.raises(TritonError) as error:
        stack.triton.load(name)
    return str(error.value)


def test_cores_of_another_model_fail_with_a_hint(stack):
    make(stack, "taking", f"--inf2 --neuron_core_range 14:15 {ANY_ROWS}")
    reason = refusal(stack, "taking")
    assert "tuple-0.pt could not be loaded on NeuronCores 14 to 15: NRT: NeuronCore(s) not available" in reason
    assert "is another model or process on them?" in reason
    check(stack, "first", 4)


# --- TensorFlow -------------------------------------------------------------------------------------------------------

INSTALL = "`make test-stack SLOW=2 TENSORFLOW=.local/tensorflow` installs it"
with_tensorflow = pytest.mark.skipif(not TENSORFLOW.is_dir(), reason=f"TensorFlow is missing: {INSTALL}")


@pytest.fixture(scope="module")
def saved(stack) -> dict[int, Path]:
    return {rows: neuron.save_doubler(stack.folder / f"compiled/doubler-{rows}", rows) for rows in (0, 4)}


def double(stack: TestStack, model: str, rows: int) -> list[int]:
    """Check the doubled rows; return the number of rows in the run of each row."""
    x = np.random.default_rng(rows).random((rows, 3), np.float32)
    label = np.array([[f"line {row}, 줄".encode()] for row in range(rows)], np.object_)
    answer = ask(stack, model, {"x": x, "label": label})
    np.testing.assert_array_equal(answer["doubled"], 2 * x)
    assert answer["echo"].ravel().tolist() == [text + b"!" for text in label.ravel()]
    return answer["rows"].ravel().tolist()


@with_tensorflow
@pytest.mark.slowest
def test_saved_model_spreads_rows_over_its_cores(stack, saved):
    generate(stack, "doubler", "--neuron_core_range 2:4", saved[0], "tensorflow")
    with loaded(stack, "doubler"):
        config = stack.triton.config("doubler")
        assert {t["name"]: (t["data_type"], t["dims"]) for t in config["input"] + config["output"]} == {
            "x": ("TYPE_FP32", [-1, 3]),
            "label": ("TYPE_STRING", [-1, 1]),
            "doubled": ("TYPE_FP32", [-1, 3]),
            "echo": ("TYPE_STRING", [-1, 1]),
            "rows": ("TYPE_INT32", [-1, 1]),
        }
        assert double(stack, "doubler", 1) == [1]
        assert double(stack, "doubler", 2) == [1, 1]
        assert double(stack, "doubler", 7) == [3, 3, 3, 2, 2, 2, 2]


@with_tensorflow
@pytest.mark.slowest
def test_saved_model_of_one_batch_size_gets_full_batches(stack, saved):
    generate(stack, "four", f"--neuron_core_range 0:1 {BATCHING}", saved[4], "tensorflow")
    with loaded(stack, "four"):
        for rows in (1, 4, 6):
            assert double(stack, "four", rows) == [4] * rows


@with_tensorflow
@pytest.mark.slowest
@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("serving_default", "predict", "has no signature 'predict', it has serving_default"),
        (
            '"serve"',
            '"train"',
            "with the tags train could not be loaded on NeuronCores 0 to 0: Got an incompatible argument",
        ),
        ("doubled", "tripled", "the signature has no output 'tripled'; it has doubled, echo, rows"),
    ],
)
def test_saved_model_without_a_part_fails_with_the_reason(stack, saved, before, after, reason):
    edit(generate(stack, "wrongly", "--neuron_core_range 0:0", saved[0], "tensorflow"), before, after)
    assert reason in refusal(stack, "wrongly")
