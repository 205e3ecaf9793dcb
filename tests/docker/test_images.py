"""Contents of the images. On stand-ins for the base images (base-images.sh) the tests cover only what we add."""

from __future__ import annotations

import base64
import json
import subprocess

import pytest

from scripts.audit.__main__ import locked
from tests.docker.conftest import docker, run_in
from tests.support.onnx_models import save_lookup
from triton_transformers.settings import ROOT

pytestmark = pytest.mark.timeout(1800)
TRITON, EXPORTER, GATEWAY, LOADTEST = OURS = ("cpu-pypi", "exporter:debian", "gateway:debian", "loadtest:debian")


@pytest.fixture(scope="module")
def built(new_stack):
    stack = new_stack()
    done = stack.make("build-cpu", timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"built {stack.image(image)}\n" in done.stdout for image in OURS)
    return stack


@pytest.mark.parametrize("image", OURS)
def test_image_has_an_ordinary_user_and_no_tools(built, image):
    image = built.image(image)
    config = json.loads(docker("image", "inspect", image))[0]["Config"]
    assert config["User"] == "1000:1000"
    assert config["Labels"]["org.opencontainers.image.title"].startswith("triton-transformers")
    assert run_in(image, "id -u") == "1000"
    assert run_in(image, "command -v gcc cc make pip pip3 || true") == ""
    assert run_in(image, "ls /root/.cache /run/secrets 2>/dev/null || true") == ""
    ours = "export|gateway|healthcheck.py|loadtest|model_repository|monitoring|serving|triton_transformers"
    assert run_in(image, f"ls -A /app 2>/dev/null | grep -vE '^({ours})$' || true") == ""


@pytest.mark.parametrize("image", [image for image in OURS if "exporter" not in image])
def test_image_has_no_weights(built, image):
    image = built.image(image)
    kinds = " -o ".join(f"-name '*.{kind}'" for kind in ("bin", "onnx", "pt", "safetensors"))
    assert run_in(image, f"find / -xdev -size +1M '(' {kinds} ')' -print 2>/dev/null || true") == ""


def test_cpu_image_is_small(built):
    assert int(docker("image", "inspect", "--format", "{{.Size}}", built.image(TRITON))) < 500e6


def test_gateway_image_is_small_and_has_no_more_than_it_imports(built):
    image = built.image(GATEWAY)
    assert int(docker("image", "inspect", "--format", "{{.Size}}", image)) < 200e6
    # Everything that it imports is still there, and what the clients of tests/kubernetes import.
    modules = "gateway.__main__, triton_transformers.load, uvloop, httptools, ssl"
    assert run_in(image, f"python3 -c 'import {modules}'") == ""
    assert run_in(image, "command -v apt-get dpkg perl || true") == ""


def test_image_with_tritons_wheel_keeps_its_metadata_for_scanners(built):
    metadata = run_in(built.image(TRITON), "cat /opt/pytriton/nvidia_pytriton-*.dist-info/METADATA")
    assert f"\nVersion: {locked()['nvidia-pytriton']}\n" in metadata


@pytest.fixture(scope="module")
def lookup(tmp_path_factory) -> str:
    """Return a command that looks up the embedding of a token with OpenVINO, in both precisions."""
    model = base64.b64encode(save_lookup(tmp_path_factory.mktemp("lookup") / "model.onnx").read_bytes()).decode()
    lines = [
        "import numpy, openvino",
        "for precision in 'f32', 'bf16':",
        "    model = openvino.compile_model('/tmp/model.onnx', 'CPU', {'INFERENCE_PRECISION_HINT': precision})",
        "    print(model([numpy.array([[7]])])[0].tolist())",
    ]
    program = "\n".join(lines)
    return f'echo {model} | base64 -d >/tmp/model.onnx && python3 -c "{program}"'


def assert_openvino_runs_on_a_cpu(image: str, lookup: str) -> None:
    """Assert that OpenVINO runs a graph, without its telemetry and its parts for other devices and formats."""
    assert run_in(image, lookup).splitlines() == ["[[7.0]]", "[[7.0]]"]
    packages = "/opt/venv/lib/python3.*/site-packages"
    assert run_in(image, f"ls -d {packages}/openvino_telemetry* {packages}/openvino/tools 2>/dev/null || true") == ""
    libraries = run_in(image, f"ls {packages}/openvino/libs").split()
    plugins = {name for name in libraries if name.endswith("_plugin.so")}
    assert plugins <= {"libopenvino_intel_cpu_plugin.so", "libopenvino_arm_cpu_plugin.so"}
    formats = {name.split("_")[1] for name in libraries if "_frontend.so" in name}
    assert formats == {"ir", "onnx"}
    assert run_in(image, "find /engines -perm 777 -writable") == "/engines"


def test_cpu_image_has_openvino_for_cpus(built, lookup):
    assert_openvino_runs_on_a_cpu(built.image(TRITON), lookup)


def test_exporter_has_every_config_of_the_repository(built):
    """Keep them in its image: with another MODEL_REPOSITORY, `make models` copies them from there."""
    files = subprocess.run(
        ["git", "ls-files", "model_repository"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    configs = {name for name in files.stdout.split() if name.endswith(".pbtxt")}
    assert "model_repository/encoder/configs/neuron.pbtxt" in configs
    assert set(run_in(built.image(EXPORTER), "cd /app && find model_repository -name '*.pbtxt'").split()) == configs


def test_build_secrets_are_in_no_image(built):
    for image in map(built.image, OURS):
        history = docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", image)
        assert "find-links" not in history
        assert built.environment["TRITON_ADMIN_KEY"] not in history
        assert run_in(image, "grep -rls find-links /etc /opt/venv/pip.conf 2>/dev/null || true") == ""


def test_image_with_transformers_imports_them(built, lookup):
    done = built.compose("build", "--quiet", "triton-cpu", TRITON_SOURCE="pypi-transformers")
    assert done.returncode == 0, done.stderr
    printed = "print(numpy.__version__, transformers.__version__)"
    command = f"python3 -c 'import torch, transformers, tokenizers, numpy, scipy; {printed}'"
    assert run_in(built.image("cpu-pypi-transformers"), command) == f"{locked()['numpy']} {locked()['transformers']}"
    assert_openvino_runs_on_a_cpu(built.image("cpu-pypi-transformers"), lookup)


@pytest.mark.parametrize(("profile", "tag"), [("cpu", "cpu-ngc"), ("cuda", "cuda")])
def test_image_on_nvidias_has_our_backends_and_packages(built, lookup, profile, tag):
    """Building needs no device. NVIDIA's onnxruntime backend is the only one of that name; OpenVINO uses CPUs only."""
    done = built.make(f"build-{profile}", timeout=1500, TRITON_SOURCE="ngc")
    assert done.returncode == 0, done.stdout + done.stderr
    image = built.image(tag)
    assert run_in(image, "id -u") == "1000"
    backends = "/opt/tritonserver/backends"
    ours = {path.name for path in (ROOT / "images/triton/backends").iterdir() if path.is_dir()}
    assert set(run_in(image, f"ls {backends}").split()) - {"__pycache__"} == (ours - {"__pycache__"}) | {"python"}
    assert run_in(image, f"ls {backends}/onnxruntime") == "libtriton_onnxruntime.so"
    printed = "print(onnxruntime.__version__, transformers.__version__)"
    versions = run_in(image, f"python3 -c 'import onnxruntime, PIL, tokenizers, torch, transformers; {printed}'")
    assert versions.split() == [locked()["onnxruntime"], locked()["transformers"]]
    if profile == "cuda":
        # Text encoders on PyTorch run without padding by this function, which older releases lack.
        run_in(image, "python3 -c 'from torch.nn.attention.varlen import varlen_attn'")
        assert run_in(image, "python3 -c 'import openvino' 2>&1 | tail -n 1").startswith("ModuleNotFoundError")
    else:
        assert_openvino_runs_on_a_cpu(image, lookup)


def test_image_with_vllm_has_our_backends_beside_nvidias(built, tmp_path):
    """Ours stands in for NVIDIA's backend onnxruntime, which that image lacks, and no package is there twice."""
    (tmp_path / "story").mkdir()
    (tmp_path / "story/config.pbtxt").write_text('backend: "generation"')
    settings = {"PROFILE": "cuda", "SYSTEMS": "story", "MODEL_REPOSITORY": tmp_path}
    done = built.compose("build", "--quiet", "triton-cuda", **settings)
    assert done.returncode == 0, done.stderr
    image, backends = built.image("cuda-vllm"), "/opt/tritonserver/backends"
    assert run_in(image, "id -u") == "1000"
    ours = {path.name for path in (ROOT / "images/triton/backends").iterdir() if path.is_dir()} - {"__pycache__"}
    assert set(run_in(image, f"ls {backends}").split()) == ours | {"python", "vllm"}
    assert run_in(image, f"ls {backends}/onnxruntime") == "model.py"
    packages = set(run_in(image, "ls /opt/packages").split())
    assert {"onnxruntime", "flatbuffers"} <= packages
    assert not packages & {"numpy", "torch", "transformers", "tokenizers"}
    printed = "print(onnxruntime.__version__, onnxruntime.get_available_providers()[-1])"
    built_with = run_in(image, f"python3 -c 'import onnxruntime; {printed}'")
    assert built_with.split() == [locked()["onnxruntime"], "CPUExecutionProvider"]
    assert run_in(image, "find /engines -perm 777 -writable") == "/engines"
    assert run_in(image, "echo $HOME; python3 -c 'import getpass; print(getpass.getuser())'").split() == [
        "/engines",
        "triton-server",
    ]


def test_transformers_setting_selects_the_release(built):
    done = built.compose(
        "build", "--quiet", "triton-cpu", TRITON_SOURCE="pypi-transformers", TRANSFORMERS="transformers==5.0.0"
    )
    assert done.returncode == 0, done.stderr
    command = "python3 -c 'import transformers; print(transformers.__version__)'"
    assert run_in(built.image("cpu-pypi-transformers"), command) == "5.0.0"
