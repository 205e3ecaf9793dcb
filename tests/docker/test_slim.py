"""make build TAG=: an image with only what some systems need, and such an image as Oracle Cloud runs it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.request
import uuid
from zipfile import ZipFile

import pytest
from dotenv import dotenv_values

from tests.docker.conftest import docker, run_in
from tests.support.stacks import SYSTEM
from triton_transformers.http import opener
from triton_transformers.ports import free_ports
from triton_transformers.settings import ROOT

pytestmark = pytest.mark.timeout(1800)
BACKENDS = "/opt/tritonserver/backends"


@pytest.fixture(scope="module")
def tags():
    """Return names for images, and remove the images afterwards."""
    names = {name: f"slim-{uuid.uuid4().hex[:8]}:{name}" for name in ("cpu", "ngc", "cuda", "whole", "broken")}
    yield names
    for tag in names.values():
        if docker("image", "ls", "--quiet", tag):
            docker("image", "rm", "--force", tag)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Return a repository of two models: one on our backend, one on a backend that NVIDIA's images have."""
    folder = tmp_path_factory.mktemp("models")
    for name, backend in (("texts", "tokenizer"), ("numbers", "onnxruntime")):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(f'backend: "{backend}"')
    return folder


def build_on_nvidias(tag: str, *commands: str) -> str:
    """Build NVIDIA's image with additional libraries in its server's folder."""
    image = dotenv_values(ROOT / "versions.env")["TRITON_IMAGE"]
    packages = "apt-get update && apt-get install --yes --no-install-recommends jq patchelf"
    lines = [f"FROM {image}", "USER 0:0", f"RUN {packages}", "WORKDIR /opt/tritonserver/lib"]
    lines += [f"RUN {command}" for command in commands]
    line = ["docker", "build", "--quiet", "--tag", tag, "-"]
    subprocess.run(line, input="\n".join(lines), check=True, text=True, timeout=1500)
    return tag


@pytest.fixture(scope="module")
def whole(tags) -> str:
    """Return an image with a program linked to a library elsewhere, and libraries linked to others.

    Those are one beside it, two of the driver, and one that is missing.
    """
    return build_on_nvidias(
        tags["whole"],
        "cp /usr/bin/jq links-to-libjq",
        "cp -L /usr/lib/*/libjq.so.1 libbeside.so && patchelf --set-soname libbeside.so libbeside.so",
        "cp libbeside.so libnear.so && patchelf --add-needed libbeside.so --set-rpath '$ORIGIN' libnear.so",
        "cp libbeside.so libdriven.so && patchelf --add-needed libcuda.so.1 libdriven.so",
        "patchelf --add-needed libnvidia-ml.so.1 libdriven.so",
        "cp libbeside.so liblacking.so && patchelf --add-needed libnowhere.so.1 liblacking.so",
    )


def labels(image: str) -> tuple[str, str]:
    config = json.loads(docker("image", "inspect", image))[0]["Config"]
    return config["Labels"]["io.triton-transformers.backends"], config["Labels"]["io.triton-transformers.profile"]


def build(stack, repository, tag: str, **settings: str) -> None:
    done = stack.make("build", timeout=1700, TAG=tag, MODEL_REPOSITORY=repository, **settings)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize(("name", "settings"), [("ngc", {"TRITON_SOURCE": "ngc"}), ("cuda", {"PROFILE": "cuda"})])
def test_slim_image_on_nvidias_has_what_its_backends_link_to(new_stack, repository, tags, whole, name, settings):
    image, stack = tags[name], new_stack()
    build(stack, repository, image, SYSTEMS="texts numbers", TRITON_IMAGE=whole, **settings)
    assert set(run_in(image, f"ls {BACKENDS}").split()) == {"onnxruntime", "python", "tokenizer"}
    assert run_in(image, f"ls {BACKENDS}/onnxruntime") == "libtriton_onnxruntime.so"
    assert run_in(image, "ls /opt/tritonserver/repoagents/checksum") == "libtritonrepoagent_checksum.so"
    assert run_in(image, "/opt/tritonserver/lib/links-to-libjq --version").startswith("jq-")
    assert run_in(image, "ls -d /slim /linked.sh 2>/dev/null || true") == ""
    assert run_in(image, "curl --version").startswith("curl ")
    assert run_in(image, "command -v jq gcc pip || true") == ""
    assert run_in(image, "python3 -c 'import numpy, tokenizers; print(numpy.__version__)'") == "1.26.4"
    assert run_in(image, "python3 -c 'import onnxruntime, torch' 2>&1 | tail -1").startswith("ModuleNotFoundError")
    assert run_in(image, "id -u") == "1000"
    assert labels(image) == ("onnxruntime tokenizer", settings.get("PROFILE", "cpu"))


def test_library_that_was_not_gathered_fails_the_build(new_stack, repository, tags):
    """Hide it in a folder that only the whole image searches. The container would fail later, in a cloud."""
    broken = build_on_nvidias(
        tags["broken"],
        "mkdir /private && cp -L /usr/lib/*/libjq.so.1 /private/libhidden.so.1",
        "patchelf --set-soname libhidden.so.1 /private/libhidden.so.1",
        "echo /private >/etc/ld.so.conf.d/private.conf && ldconfig",
        "cp -L /usr/lib/*/libjq.so.1 libseeking.so && patchelf --add-needed libhidden.so.1 libseeking.so",
    )
    settings = {"TRITON_SOURCE": "ngc", "TRITON_IMAGE": broken, "SYSTEMS": "texts", "MODEL_REPOSITORY": repository}
    done = new_stack().make("build", timeout=1700, TAG=tags["ngc"], **settings)
    assert done.returncode
    assert re.search(r"libhidden\.so\.1\n.*gather\.sh did not copy them", done.stdout + done.stderr)


def test_system_that_is_not_assembled_is_an_error(new_stack, repository, tags):
    done = new_stack().make("build", TAG=tags["cpu"], MODEL_REPOSITORY=repository, SYSTEMS="gpt2_ensemble")
    assert done.returncode
    assert "gpt2_ensemble is not assembled in" in done.stderr


@pytest.fixture(scope="module")
def embedding(tmp_path_factory):
    """Return a repository with `embedding` as `make models` assembled it."""
    folder = tmp_path_factory.mktemp("embedding")
    for name in SYSTEM:
        shutil.copytree(ROOT / "model_repository" / name, folder / name)
    if not (folder / "encoder/1/model.onnx").exists():
        pytest.skip("make models first")
    return folder


def test_slim_image_serves_as_oracle_cloud_runs_it(new_stack, embedding, tags, tmp_path):
    """Oracle mounts the zip read-only, publishes one port, and leaves Docker's default of 64 MB of shared memory."""
    stack = new_stack()
    build(stack, embedding, tags["cpu"], SYSTEMS="embedding")
    assert set(run_in(tags["cpu"], f"ls {BACKENDS}").split()) == {"packed_onnx", "python", "tokenizer"}
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
    # Oracle's instructions check a container's health with curl, inside.
    health = ["--health-cmd", "curl -f http://localhost:8000/v2/health/ready", "--health-interval", "1s"]
    published = ["--publish", f"127.0.0.1:{port}:8000"]
    container = docker("run", "--detach", *settings, *health, "--volume", mount, *published, tags["cpu"])
    try:
        deadline = time.monotonic() + 300
        while (state := docker("inspect", "--format", "{{.State.Health.Status}}", container)) != "healthy":
            assert time.monotonic() < deadline, state
            time.sleep(0.5)
        body = {"inputs": [{"name": "input_text", "shape": [1, 1], "datatype": "BYTES", "data": ["a text"]}]}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v2/models/embedding/versions/1/infer", data=json.dumps(body).encode()
        )
        with opener.open(request, timeout=120) as response:
            shapes = {output["name"]: output["shape"] for output in json.load(response)["outputs"]}
        assert shapes == {"output__0": [1, 384], "token_count": [1, 1], "input_ids": [1, 4]}
    finally:
        subprocess.run(["docker", "logs", "--tail", "20", container])  # pytest shows it if the test fails
        docker("rm", "--force", container)
