"""`make build TAG=`: the backends that the systems need, and the command that builds the image."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from export.backends import backend_of, engines, needed
from scripts.stack.docker.slim import ONNX, PROFILES, TORCH, build, checked, command, packages
from triton_transformers.engines import OPENVINO, TRANSFORMERS, VLLM
from triton_transformers.settings import ROOT, Settings, UserError

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
        ('platform: "ensemble"', "", "ensemble"),
        ('platform: "tensorrt_plan"', "", "tensorrt"),
        ("platform: 'pytorch_libtorch'", "", "pytorch"),
        ('platform: "torch_aoti"', "", "pytorch"),
        ('platform: "tensorflow_savedmodel"', "", "tensorflow"),
        ('platform: "tensorflow_graphdef"', "", "tensorflow"),
        ('platform: "tensorflow_savedmodel"\nbackend: "python"', "", "python"),
        ('default_model_filename: "model.xml"', "model.onnx", "openvino"),
        ('default_model_filename: "other.onnx"', "model.onnx", ""),
        ("max_batch_size: 4", "model.onnx", "onnxruntime"),
        (None, "model.onnx", "onnxruntime"),
        (None, "model.plan", "tensorrt"),
        (None, "model.pt", "pytorch"),
        (None, "model.pt2", "pytorch"),
        (None, "model.xml", "openvino"),
        (None, "model.graphdef", "tensorflow"),
        (None, "model.savedmodel/saved_model.pb", "tensorflow"),
        (None, "model.py", "python"),
        ("", "", ""),
    ],
)
def test_backend_of_a_model(tmp_path, config, file, backend):
    (tmp_path / "own/1").mkdir(parents=True)
    if config is not None:
        (tmp_path / "own/config.pbtxt").write_text(config)
    if file:
        path = tmp_path / "own/1" / file
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert backend_of("own", tmp_path) == backend


def test_backends_of_systems():
    repository = ROOT / "model_repository"
    gpt2 = {"tokenizer", "onnxruntime", "detokenizer"}
    assert needed(["gpt2_ensemble"], repository) == gpt2
    assert needed(["gpt2_ensemble", "gpt2_generate", "falcon7b"], repository) == {*gpt2, "generation"}


def put(folder: Path, model: str, file: str = "", parameters: str = "") -> None:
    (folder / model / "1").mkdir(parents=True)
    (folder / model / "config.pbtxt").write_text(f'backend: "generation"\n{parameters}')
    if file:
        (folder / model / "1/config.json").touch()
        (folder / model / "1" / file).touch()


def test_engine_of_a_generating_system_follows_from_its_files(tmp_path):
    put(tmp_path, "on_cpu", "openvino_model.xml")
    put(tmp_path, "on_gpu", "model.json")
    put(tmp_path, "on_torch", "model.safetensors")
    put(tmp_path, "on_gpu_stream", parameters='parameters { key: "weights" value { string_value: "on_gpu" } }')
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/config.pbtxt").write_text('backend: "tokenizer"')
    for profile in PROFILES:
        assert engines(["on_cpu", "texts"], tmp_path, profile) == {OPENVINO}
        assert engines(["on_gpu_stream"], tmp_path, profile) == {VLLM}
        assert engines(["on_torch", "on_gpu"], tmp_path, profile) == {TRANSFORMERS, VLLM}
        assert engines(["texts"], tmp_path, profile) == set()
    put(tmp_path, "sees", "openvino_model.xml")
    (tmp_path / "sees/1/vision").mkdir()
    assert engines(["sees"], tmp_path, "cpu") == {OPENVINO, TRANSFORMERS}
    put(tmp_path, "new")
    assert engines(["new"], tmp_path, "cuda") == {VLLM}
    assert engines(["new"], tmp_path, "cpu") == {OPENVINO}


def words(line: list[str], after: str) -> list[str]:
    return [word for before, word in pairwise(line) if before == after]


NVIDIA = {"target": ["slim"], "file": ["images/triton/Dockerfile.nvidia"]}


@pytest.mark.parametrize(
    ("profile", "backends", "engines", "settings", "expected", "arguments"),
    [
        (
            *("cpu", ["detokenizer", "tokenizer"], (), {}),
            {
                "target": ["cpu-pypi"],
                "tag": ["r/x:1"],
                "file": ["images/triton/Dockerfile.debian"],
                "platform": ["linux/amd64"],
                "label": [
                    "io.triton-transformers.backends=detokenizer tokenizer",
                    "io.triton-transformers.profile=cpu",
                ],
                "secret": [],
            },
            ["BACKENDS=detokenizer tokenizer", "TORCH_INDEX=https://torch", "TOOLS=curl"],
        ),
        (
            *("cpu", ["packed_onnx"], (), {"TRITON_SOURCE": "ngc", "BUILD_CA": "/etc/ca.pem"}),
            NVIDIA | {"secret": ["id=ca,src=/etc/ca.pem"]},
            ["PACKAGES=numpy tokenizers onnxruntime openvino"],
        ),
        (
            *("cuda", ["packed_onnx"], (), {"DOCKER_DEFAULT_PLATFORM": "linux/arm64"}),
            NVIDIA | {"platform": ["linux/arm64"]},
            ["PACKAGES=numpy tokenizers onnxruntime-gpu"],
        ),
        ("cuda", ["onnxruntime"], (), {}, NVIDIA, ["PACKAGES=numpy tokenizers"]),
        ("cuda", ["transformers"], (), {}, NVIDIA, ["PACKAGES=numpy tokenizers torch pillow transformers xgrammar"]),
        *[
            ("cpu", ["generation"], {engine}, {"TRITON_SOURCE": "ngc"}, NVIDIA, [f"PACKAGES=numpy tokenizers {more}"])
            for engine, more in (
                (OPENVINO, "openvino-genai jinja2 xgrammar"),
                (TRANSFORMERS, "torch pillow transformers xgrammar"),
            )
        ],
        # Nothing can be left out of NVIDIA's image with vLLM.
        ("cuda", ["generation"], {VLLM}, {}, NVIDIA | {"target": ["cuda-vllm"]}, ["TRITON_IMAGE=triton:1"]),
    ],
)
def test_command_builds_what_the_backends_need(profile, backends, engines, settings, expected, arguments):
    line = command("r/x:1", profile, backends, ENVIRONMENT | settings, engines)
    assert {name: words(line, f"--{name}") for name in expected} == expected
    built_with = words(line, "--build-arg")
    assert {*arguments} <= {*built_with}
    assert any(word.startswith("TORCH_INDEX=") for word in built_with) == (profile == "cpu")
    assert any(word.startswith(("BACKENDS=", "PACKAGES=")) for word in built_with) == (VLLM not in engines)


def test_unknown_backend_is_an_error_before_the_build():
    models = {"all": "ensemble", "network": "tensorrt", "own": "python", "texts": "tokenizer"}
    with pytest.raises(
        UserError, match="network runs on the backend tensorrt, which PyPI's Triton lacks: set TRITON_SOURCE=ngc"
    ):
        checked(models, "cpu", ENVIRONMENT)
    for profile, source in (("cpu", "ngc"), ("cuda", "pypi")):
        backends = checked(models, profile, ENVIRONMENT | {"TRITON_SOURCE": source})
        assert backends == ["python", "tensorrt", "tokenizer"]
    with pytest.raises(UserError, match=r"own: its config.pbtxt names no backend"):
        checked({"own": ""}, "cuda", ENVIRONMENT)
    with pytest.raises(UserError, match="SYSTEMS names nothing that runs on a backend"):
        checked({}, "cpu", ENVIRONMENT)  # an empty list would build all of them


def test_dockerfile_installs_the_packages_of_all_backends():
    """Without TAG, the image has the packages that `make build TAG=` selects for all backends."""
    stages = (ROOT / "images/triton/Dockerfile.nvidia").read_text().split("\nFROM ")
    for profile in PROFILES:
        (stage,) = [text for text in stages if text.startswith(f"build AS packages-{profile}\n")]
        installed = re.search(r"--group .*", stage.replace("\\\n", ""))[0].split()
        engines = [OPENVINO, TRANSFORMERS] if profile == "cpu" else [TRANSFORMERS]
        assert sorted(installed) == sorted(packages(TORCH | ONNX, engines, profile, '"$TRANSFORMERS"'))


def test_neuron_profile_is_an_error():
    with pytest.raises(UserError, match="PROFILE=neuron: must be one of cpu, cuda"):
        build(Settings.load().replace(PROFILE="neuron", TAG="x"), ENVIRONMENT)
