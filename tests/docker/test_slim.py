"""make build TAG=: the image with just what some systems need, and such an image as Oracle Cloud runs it."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
import uuid
from zipfile import ZipFile

import pytest

from scripts.ports import free_ports
from scripts.settings import ROOT
from scripts.web import answers, opener
from tests.docker.conftest import docker
from tests.stack.conftest import SYSTEM

pytestmark = pytest.mark.timeout(1800)
BACKENDS = "/opt/tritonserver/backends"


@pytest.fixture(scope="module")
def tags():
    """Names of their own, gone afterwards."""
    made = [f"slim-{uuid.uuid4().hex[:8]}:{which}" for which in ("cpu", "ngc", "cuda")]
    yield dict(zip(("cpu", "ngc", "cuda"), made, strict=True))
    for tag in made:
        if docker("image", "ls", "--quiet", tag):
            docker("image", "rm", "--force", tag)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Two models of the user's own: one on a backend of ours, one on one that NVIDIA's images have."""
    folder = tmp_path_factory.mktemp("models")
    for name, backend in (("texts", "tokenizer"), ("numbers", "onnxruntime")):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(f'backend: "{backend}"')
    return folder


def run(image: str, command: str) -> str:
    return docker("run", "--rm", "--network", "none", "--entrypoint", "bash", image, "-c", command)


def label(image: str) -> str:
    return json.loads(docker("image", "inspect", image))[0]["Config"]["Labels"]["io.triton-transformers.backends"]


def build(stack, repository, tag: str, **settings: str) -> None:
    done = stack.make("build", timeout=1700, TAG=tag, MODEL_REPOSITORY=repository, **settings)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("which", ["ngc", "cuda"])
def test_on_nvidias_image(new_stack, repository, tags, which):
    """As far as its stand-in goes: what is put together, and that what it links to comes along."""
    how = {"TRITON_SOURCE": "ngc"} if which == "ngc" else {"PROFILE": "cuda"}
    build(new_stack(), repository, tags[which], SYSTEMS="texts numbers", **how)
    image = tags[which]
    assert set(run(image, f"ls {BACKENDS}").split()) == {"onnxruntime", "python", "shared", "tokenizer"}
    assert run(image, f"ls {BACKENDS}/onnxruntime") == "libtriton_onnxruntime.so"
    assert run(image, "ls /opt/tritonserver/repoagents/checksum") == "libtritonrepoagent_checksum.so"
    assert run(image, "/opt/tritonserver/lib/links-to-libcurl --version").startswith("curl ")
    assert run(image, "command -v curl gcc pip || true") == ""
    assert run(image, "python3 -c 'import numpy, tokenizers; print(numpy.__version__)'") == "1.26.4"
    assert run(image, "python3 -c 'import onnxruntime, torch' 2>&1 | tail -1").startswith("ModuleNotFoundError")
    assert run(image, "id -u") == "1000"
    assert label(image) == "onnxruntime tokenizer"


def test_what_is_not_assembled_is_not_guessed(new_stack, repository, tags):
    done = new_stack().make("build", TAG=tags["cpu"], MODEL_REPOSITORY=repository, SYSTEMS="gpt2_ensemble")
    assert done.returncode
    assert "gpt2_ensemble is not assembled in" in done.stderr


@pytest.fixture(scope="module")
def embedding(tmp_path_factory):
    """As `make models` has assembled it."""
    folder = tmp_path_factory.mktemp("embedding")
    for name in SYSTEM:
        shutil.copytree(ROOT / "model_repository" / name, folder / name)
    if not (folder / "encoder/1/model.onnx").exists():
        pytest.skip("make models first")
    return folder


def test_as_oracle_cloud_runs_it(new_stack, embedding, tags, tmp_path):
    """The zip read-only, the environment of the deployment, one port, and Docker's own 64 MB of shared memory."""
    stack = new_stack()
    build(stack, embedding, tags["cpu"], SYSTEMS="embedding")
    assert set(run(tags["cpu"], f"ls {BACKENDS}").split()) == {"packed_onnx", "python", "shared", "tokenizer"}
    done = stack.make("package", SYSTEMS="embedding", MODEL_REPOSITORY=embedding, PACKAGE=tmp_path / "e.zip")
    assert done.returncode == 0, done.stderr
    with ZipFile(tmp_path / "e.zip") as packed:
        packed.extractall(tmp_path / "deployed_model")
    for path in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        path.chmod(0o755)
    (port,) = free_ports(1)
    environment = {
        "CONTAINER_TYPE": "TRITON",
        "MODEL_REPOSITORY": "/opt/ds/model/deployed_model/model_repository",
        "SYSTEMS": "embedding",
        "PROFILE": "cpu",
        "BIND_ADDRESS": "0.0.0.0",
        "TRITON_HTTP_PORT": "8000",
    }
    settings = [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
    mount = f"{tmp_path}/deployed_model:/opt/ds/model/deployed_model:ro"
    container = docker(
        "run", "--detach", *settings, "--volume", mount, "--publish", f"127.0.0.1:{port}:8000", tags["cpu"]
    )
    try:
        deadline = time.monotonic() + 120
        while not answers(f"http://127.0.0.1:{port}/v2/health/ready") and time.monotonic() < deadline:
            time.sleep(0.5)
        body = {"inputs": [{"name": "input_text", "shape": [1, 1], "datatype": "BYTES", "data": ["a text"]}]}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v2/models/embedding/versions/1/infer", data=json.dumps(body).encode()
        )
        with opener.open(request, timeout=60) as response:
            assert json.load(response)["outputs"][0]["shape"] == [1, 384]
    finally:
        subprocess.run(["docker", "logs", "--tail", "20", container])  # for whoever reads why
        docker("rm", "--force", container)
