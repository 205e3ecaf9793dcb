"""make build TAG=: which backends some systems need, and what Docker is asked for."""

from __future__ import annotations

from itertools import pairwise

import pytest

from scripts.docker.slim import build, command, packages
from scripts.models.backends import backend_of, needed
from scripts.settings import ROOT, Settings, UserError

ENVIRONMENT = {
    "DEBIAN_IMAGE": "debian:1",
    "TRITON_IMAGE": "triton:1",
    "TRITON_MIN_IMAGE": "triton:1-min",
    "TRANSFORMERS": "transformers",
    "TORCH_INDEX": "https://torch",
    "TRITON_SOURCE": "pypi",
    "BUILD_PIP_CONF": "/dev/null",
    "BUILD_CA": "/dev/null",
    "http_proxy": "",
}


@pytest.mark.parametrize(
    ("config", "file", "backend"),
    [
        ('backend: "tokenizer"', "", "tokenizer"),
        ('name: "x"\n  backend : "python" # backend: "other"', "", "python"),
        ('platform: "onnxruntime_onnx"', "", "onnxruntime"),
        ('platform: "ensemble"', "", ""),
        ('platform: "tensorrt_plan"', "", "tensorrt_plan"),
        ("max_batch_size: 4", "model.onnx", "onnxruntime"),
        (None, "model.onnx", "onnxruntime"),
        (None, "model.py", "python"),
        ("", "", ""),
    ],
)
def test_the_backend_of_a_model(tmp_path, config, file, backend):
    (tmp_path / "own/1").mkdir(parents=True)
    if config is not None:
        (tmp_path / "own/config.pbtxt").write_text(config)
    if file:
        (tmp_path / "own/1" / file).touch()
    assert backend_of("own", tmp_path) == backend


def test_the_backends_of_systems():
    repository = ROOT / "model_repository"
    gpt2 = {"tokenizer", "onnxruntime", "detokenizer"}
    assert needed(["gpt2_ensemble"], repository) == gpt2
    assert needed(["gpt2_ensemble", "gpt2_generate", "falcon7b"], repository) == {
        *gpt2,
        "onnx_generate",
        "transformers",
    }


def words(line: list[str], after: str) -> list[str]:
    return [word for before, word in pairwise(line) if before == after]


def test_on_debian():
    line = command("r/x:1", "cpu", ["detokenizer", "tokenizer"], ENVIRONMENT)
    assert (words(line, "--target"), words(line, "--tag")) == (["cpu-pypi"], ["r/x:1"])
    assert words(line, "--label") == ["io.triton-transformers.backends=detokenizer tokenizer"]
    assert "BACKENDS=detokenizer tokenizer" in words(line, "--build-arg")
    assert "TORCH_INDEX=https://torch" in words(line, "--build-arg")
    assert words(line, "--secret") == []


@pytest.mark.parametrize(
    ("profile", "backends", "installed"),
    [
        ("cpu", ["tokenizer", "packed_onnx"], "numpy tokenizers onnxruntime"),
        ("cuda", ["tokenizer", "packed_onnx"], "numpy tokenizers onnxruntime-gpu"),
        ("cuda", ["tokenizer", "onnxruntime"], "numpy tokenizers"),
        ("cuda", ["transformers"], "numpy tokenizers torch pillow transformers"),
    ],
)
def test_on_nvidias(profile, backends, installed):
    environment = ENVIRONMENT | {"TRITON_SOURCE": "ngc", "BUILD_CA": "/etc/ca.pem"}
    line = command("r/x:1", profile, backends, environment)
    assert words(line, "--target") == ["nvidia-slim"]
    assert f"PACKAGES={installed}" in words(line, "--build-arg")
    assert ("TORCH_INDEX=https://torch" in words(line, "--build-arg")) == (profile == "cpu")
    assert words(line, "--secret") == ["id=ca,src=/etc/ca.pem"]
    assert packages(set(backends), profile, "transformers") == installed.split()


def test_neuron_has_no_such_image():
    with pytest.raises(UserError, match="PROFILE=neuron: must be one of cpu, cuda"):
        build(Settings(Settings.load() | {"PROFILE": "neuron", "TAG": "x"}), ENVIRONMENT)
