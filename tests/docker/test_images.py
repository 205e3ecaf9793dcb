"""What the images are made of. The base images may be stand-ins (base-images.sh): then so is what this says of them."""

from __future__ import annotations

import json

import pytest

from scripts.common.settings import ROOT
from tests.docker.conftest import docker

pytestmark = pytest.mark.timeout(1800)
OURS = ("triton-transformers:cpu-pypi", "triton-transformers-exporter", "triton-transformers-loadtest")


@pytest.fixture(scope="module")
def built(stack):
    done = stack.make("build-cpu", timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    return stack


def run(image: str, command: str) -> str:
    return docker("run", "--rm", "--network", "none", "--entrypoint", "bash", image, "-c", command)


@pytest.mark.parametrize("image", OURS)
def test_it_is_nobody_in_particular_and_carries_no_tools(built, image):
    config = json.loads(docker("image", "inspect", image))[0]["Config"]
    assert config["User"] == "1000:1000"
    assert config["Labels"]["org.opencontainers.image.title"].startswith("triton-transformers")
    assert run(image, "id -u") == "1000"
    assert run(image, "command -v gcc cc make pip pip3 || true") == ""
    assert run(image, "ls /root/.cache /run/secrets 2>/dev/null || true") == ""
    ours = ".env.example|loadtest|model_repository|monitoring|scripts"
    assert run(image, f"ls -A /app 2>/dev/null | grep -vE '^({ours})$' || true") == ""


@pytest.mark.parametrize("image", [image for image in OURS if "exporter" not in image])
def test_it_carries_no_weights(built, image):
    kinds = " -o ".join(f"-name '*.{kind}'" for kind in ("bin", "onnx", "pt", "safetensors"))
    assert run(image, f"find / -xdev -size +1M '(' {kinds} ')' -print 2>/dev/null || true") == ""


def test_the_cpu_image_is_small(built):
    assert int(docker("image", "inspect", "--format", "{{.Size}}", "triton-transformers:cpu-pypi")) < 400e6


def test_no_secret_of_the_build_stays(built):
    for image in OURS:
        history = docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", image)
        assert "find-links" not in history
        assert run(image, "grep -rls find-links /etc /opt/venv/pip.conf 2>/dev/null || true") == ""


def test_the_target_with_transformers_has_them(built):
    done = built.compose("build", "--quiet", "triton-cpu", TRITON_SOURCE="pypi-transformers")
    assert done.returncode == 0, done.stderr
    command = (
        "python3 -c 'import torch, transformers, tokenizers, numpy; print(numpy.__version__, transformers.__version__)'"
    )
    assert run("triton-transformers:cpu-pypi-transformers", command) == "1.26.4 4.57.6"


def test_building_takes_no_device(built):
    """A build machine has none."""
    done = built.make("build-cuda", timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("settings", [{"TRITON_SOURCE": "ngc"}, {"PROFILE": "cuda"}], ids=("ngc", "cuda"))
def test_on_nvidias_image(built, settings):
    """As far as its stand-in goes: what is installed, and that NVIDIA's own onnxruntime backend is not in our way."""
    service = f"triton-{settings.get('PROFILE', 'cpu')}"
    done = built.compose("build", "--quiet", service, **settings)
    assert done.returncode == 0, done.stderr
    image = "triton-transformers:cuda" if "PROFILE" in settings else "triton-transformers:cpu-ngc"
    assert run(image, "id -u") == "1000"
    backends = "/opt/tritonserver/backends"
    ours = {path.name for path in (ROOT / "images/triton/backends").iterdir() if path.is_dir()}
    assert set(run(image, f"ls {backends}").split()) - {"__pycache__"} == (ours - {"__pycache__"}) | {"python"}
    assert run(image, f"ls {backends}/onnxruntime") == "libtriton_onnxruntime.so"
    command = "python3 -c 'import onnxruntime, PIL, tokenizers, torch, transformers; print(transformers.__version__)'"
    assert run(image, command) == "4.57.6"


def test_another_transformers_by_a_build_argument(built):
    """A model published an hour ago wants a release that is not ours."""
    done = built.compose(
        "build", "--quiet", "triton-cpu", TRITON_SOURCE="pypi-transformers", TRANSFORMERS="transformers==5.0.0"
    )
    assert done.returncode == 0, done.stderr
    command = "python3 -c 'import transformers; print(transformers.__version__)'"
    assert run("triton-transformers:cpu-pypi-transformers", command) == "5.0.0"
