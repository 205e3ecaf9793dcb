"""`make models PROFILE=neuron` on the real Triton: a model of few shapes takes the same requests, answers the same.

The stand-in of Neuron is TorchScript on the CPU that accepts only the shape it was compiled for. test_tasks.py tests
the other tasks of text encoders.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import psutil
import pytest

from export.catalogue import SYSTEMS
from tests.support.embedding import embed
from tests.support.generation import settled
from tests.support.neuron import logged, on_neuron
from tests.support.stacks import SHORT, TestStack, bring_up
from triton_transformers.corpus import MIXED
from triton_transformers.settings import MODES
from triton_transformers.triton import TritonError

pytestmark = pytest.mark.slow

TEXTS = MIXED.texts[:24]
SHAPES = [[1, 32], [4, 32], [1, 256], [4, 256]]


@pytest.fixture(scope="module")
def neuron(new_stack) -> TestStack:
    """Serve on a stack whose profile is another."""
    stack = on_neuron(new_stack())
    shutil.rmtree(stack.folder / "models")  # links to the checkout's models
    stack.environment |= {"NEURON_BATCHES": "4 1", "NEURON_LENGTHS": "32 256"}
    done = stack.make("models")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(neuron)" in done.stdout
    assert "differs from the original by at most " in done.stdout
    assert "compiled for 4 x 256 tokens" in done.stderr
    return bring_up(stack)


def test_models_use_the_config_of_the_profile(neuron):
    assert neuron.triton.config("encoder")["backend"] == "neuron"
    assert neuron.make("smoke").stdout.split() == ["ok", "embedding"]


def test_every_shape_is_compiled_once(neuron):
    traced = logged(neuron, "trace")
    assert [call["shapes"][0] for call in traced] == SHAPES
    assert all(call["compiler_args"] == ["--target", "inf2", "--model-type", "transformer"] for call in traced)
    assert not any(call["cpu_backend"] for call in traced)
    assert "embedding: in place" in neuron.make("models").stdout
    assert len(logged(neuron, "trace")) == len(traced)


def test_every_shape_is_loaded_on_every_core(neuron):
    loads = [load for load in logged(neuron, "load") if load["path"].startswith(f"{neuron.folder}/models/encoder/1/")]
    assert {load["visible"] for load in loads} == {"0-1"}
    places = sorted((load["path"].rpartition("/")[2], load["core"]) for load in loads)
    assert places == sorted((f"model-{rows}x{length}.pt", core) for rows, length in SHAPES for core in (0, 1))


def test_vectors_equal_the_original(neuron):
    from sentence_transformers import SentenceTransformer

    original = SentenceTransformer(str(SYSTEMS["embedding"].source.verify()), device="cpu")
    texts = [*TEXTS, "", "word " * 300]
    np.testing.assert_allclose(embed(neuron, *texts), original.encode(texts), atol=1e-5)


def test_only_compiled_shapes_run_and_their_padding_is_counted(neuron):
    before, count = settled(neuron, "encoder")["padding_tokens"], len(logged(neuron, "run"))
    embed(neuron, "one", "two", "three")
    runs = [run["shapes"][0] for run in logged(neuron, "run")[count:]]
    assert all(shape in SHAPES for shape in runs)
    computed = sum(rows * length for rows, length in runs)
    assert settled(neuron, "encoder")["padding_tokens"] - before == computed - 3 * 3


def test_text_above_the_compiled_length_gets_400(neuron):
    config = neuron.triton.config("encoder")
    longer = {"max_length": {"string_value": "300"}}
    neuron.triton.load("encoder", config | {"parameters": config["parameters"] | longer})
    try:
        with pytest.raises(TritonError, match="a text has 300 tokens, and the model was compiled for 256 at most") as e:
            neuron.ask("embedding", input_text=["word " * 400])
        assert e.value.status == 400
    finally:
        neuron.triton.load("encoder", config)


@pytest.mark.slowest
def test_comparison_runs_on_neuron(neuron):
    done = neuron.make("loadtest", **SHORT | {"USERS": 8, "WINDOW": 4, "MODES": " ".join(MODES)})
    results = neuron.results_of(done.returncode, done.stdout + done.stderr)
    assert results["profile"] == "neuron"
    assert results["modes"]["none"]["mean_batch"] == pytest.approx(1, abs=0.01)
    assert results["modes"]["dynamic"]["mean_batch"] > 1
    assert "'encoder' do not run on the server's cores, but where its backend" in results["left_out"]["instances"]
    assert neuron.triton.config("encoder")["backend"] == "neuron"


def test_compiling_on_cores_of_triton_is_refused(neuron):
    done = neuron.make("models", NEURON_BATCHES="2", NEURON_LENGTHS="32")
    assert done.returncode != 0
    assert "the NeuronCores are not available (" in done.stderr
    assert "if Triton uses them, run `make down` first" in done.stderr
    assert len(embed(neuron, "still there")) == 1


def stubs(neuron: TestStack) -> list[psutil.Process]:
    return neuron.processes("triton_python_backend_stub", "/encoder/")


def test_crash_of_one_of_two_instances_recovers(neuron):
    """The reload needs the cores of both instances."""
    config = neuron.folder / "models/encoder/configs/neuron.pbtxt"
    text = config.read_text()
    config.write_text(text.replace("count: 1 kind", "count: 2 kind"))
    try:
        assert neuron.make("up").returncode == 0
        neuron.wait(lambda: len(stubs(neuron)) == 2, "exactly two processes of the encoder")  # an old one may linger
        stubs(neuron)[0].kill()
        neuron.wait(lambda: "watchdog: model 'encoder' is back" in neuron.log, "encoder reloaded", 180)
        assert [len(embed(neuron, text)) for text in TEXTS] == [1] * len(TEXTS)
    finally:
        config.write_text(text)
    assert neuron.make("up").returncode == 0


def test_changed_shapes_are_compiled_again(neuron):
    count = len(logged(neuron, "trace"))
    done = neuron.make("models", NEURON_BATCHES="2", NEURON_LENGTHS="32", NEURON_DEVICES=0)
    assert done.returncode == 0, done.stderr
    assert "not compared with the original: there is no Neuron device" in done.stdout
    assert [(call["shapes"][0], call["cpu_backend"]) for call in logged(neuron, "trace")[count:]] == [([2, 32], True)]
    folder = neuron.folder / "models/encoder/1"
    assert sorted(path.name for path in folder.iterdir()) == ["model-2x32.pt", "neuron.json", "tokenizer.json"]
    assert json.loads((folder / "neuron.json").read_text())["shapes"] == [
        {"rows": 2, "length": 32, "file": "model-2x32.pt"}
    ]


def test_wrong_setting_is_one_sentence_and_changes_nothing(neuron):
    before = (neuron.folder / "models/embedding/1/assembled.json").read_text()
    for settings, message in (
        ({"NEURON_CHIP": "inf1"}, "For Inf1, compile with torch-neuron yourself"),
        ({"NEURON_BATCHES": "3", "PYTHONPATH": ""}, "PROFILE=neuron compiles with torch_neuronx, which cannot be"),
    ):
        done = neuron.make("models", **{"NEURON_BATCHES": "2", "NEURON_LENGTHS": "32"} | settings)
        assert done.returncode != 0
        assert message in done.stderr
        assert "Traceback" not in done.stderr
        assert (neuron.folder / "models/embedding/1/assembled.json").read_text() == before


def test_compiled_model_stays_until_another_format_is_set(neuron):
    done = neuron.make("models", NEURON_BATCHES="", NEURON_LENGTHS="")
    assert done.stdout == "embedding: in place\n"
    done = neuron.make("models", PROFILE="cpu")
    assert done.returncode != 0
    assert "embedding is compiled for AWS Neuron: set PROFILE=neuron" in done.stderr
    done = neuron.make("models", PROFILE="cpu", FORMAT="onnx")
    assert done.returncode == 0, done.stderr
    assert "(onnx)" in done.stdout
    files = sorted(path.name for path in (neuron.folder / "models/encoder/1").iterdir())
    assert files == ["model.onnx", "tokenizer.json"]
    assert (neuron.folder / "models/encoder/configs/neuron.pbtxt").exists()
