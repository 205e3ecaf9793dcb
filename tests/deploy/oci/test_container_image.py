"""The container image: what the Docker engine and its registry report, and whether it fits the deployment."""

from __future__ import annotations

import json
import shutil
import subprocess
from hashlib import sha256

import pytest

from deploy.oci.container_image import Image
from deploy.oci.deployment import read
from deploy.oci.limits import check_image
from tests.support.http_servers import script
from tests.support.oci import write_deployment

DIGEST = f"sha256:{'1' * 64}"
NAME = "iad.ocir.io/tests/triton:1.0"
PUSHED = f"iad.ocir.io/tests/triton@{DIGEST}"


def image(name: str = NAME, **about: str) -> Image:
    return Image(name, 1, [], ["tokenizer"], about.pop("digest", DIGEST), **about)


def test_image_is_parsed_from_docker_inspect():
    labels = {"io.triton-transformers.backends": "tokenizer x", "io.triton-transformers.profile": "cuda"}
    record = {
        "Size": 5,
        "Architecture": "arm64",
        "Config": {"Entrypoint": ["a"], "Cmd": None, "Labels": labels},
        "RepoDigests": ["elsewhere/triton@sha256:1", "iad.ocir.io/tests/triton@sha256:2"],
    }
    assert Image.parse(NAME, record) == Image(NAME, 5, ["a"], ["tokenizer", "x"], "sha256:2", "arm64", "cuda")
    assert Image.parse(NAME, {"Size": 5, "Config": {}}) == Image(NAME, 5, [], None, "")


@pytest.mark.parametrize(
    ("shape", "architecture"),
    [
        ("VM.Standard.E5.Flex", "amd64"),
        ("VM.GPU.A10.1", "amd64"),
        ("VM.Standard.A1.Flex", "arm64"),
        ("BM.GPU.GB200.4", "arm64"),
    ],
)
def test_image_of_another_architecture_is_refused(tmp_path, shape, architecture):
    deployment = read(write_deployment(tmp_path, instances__shape=shape))
    other = {"amd64": "arm64", "arm64": "amd64"}[architecture]
    assert list(check_image(deployment, image(architecture=architecture), set())) == []
    assert list(check_image(deployment, image(), set())) == []
    (message,) = check_image(deployment, image(architecture=other), set())
    assert message == (
        f"{NAME} is for {other}, and '{shape}' runs {architecture}: build it with "
        f"`DOCKER_DEFAULT_PLATFORM=linux/{architecture} make build TAG=`"
    )


def test_cpu_image_is_refused_for_cuda(tmp_path):
    on_a_gpu = read(write_deployment(tmp_path, instances__shape="VM.GPU.A10.1", container__profile="cuda"))
    (message,) = check_image(on_a_gpu, image(profile="cpu"), set())
    assert message.startswith(f"{NAME} was built with PROFILE=cpu, and container.profile is 'cuda'")
    for profile in ("cuda", ""):
        assert list(check_image(on_a_gpu, image(profile=profile), set())) == []


# --- the registry -----------------------------------------------------------------------------------------------------


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """Return a function that installs a stand-in for the Docker client with an exit code and a line on stderr."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/docker"

    def install(message: str, code: int) -> None:
        program.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\necho "{message}" >&2\nexit {code}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")

    install.calls = lambda: (tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else ""
    return install


@pytest.mark.parametrize(
    ("code", "message", "pushed", "is_noticed"),
    [
        (0, "", True, False),
        (1, f"ERROR: {PUSHED}: not found", False, False),
        (1, "unexpected status from HEAD request to https://iad.ocir.io/v2/x: 401 Unauthorized", True, True),
        (1, "docker: 'buildx' is not a docker command.", True, True),
        (1, "error getting credentials: [/bin/docker-credential-x]: not found", True, True),
    ],
)
def test_unreachable_registry_leaves_the_engines_answer(docker, capsys, code, message, pushed, is_noticed):
    docker(f"a first line\n{message}", code)
    assert not image(digest="").is_pushed()
    assert docker.calls() == ""
    assert image().is_pushed() == pushed
    assert docker.calls() == f"buildx imagetools inspect {PUSHED}\n"
    notice = f"could not ask the registry whether it has {NAME}: {message}"
    assert " ".join(capsys.readouterr().err.split()) == (notice if is_noticed else "")


def test_registry_without_answer_leaves_the_engines_answer(monkeypatch, capsys):
    def time_out(*command: str, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 60)

    monkeypatch.setattr(subprocess, "run", time_out)
    assert image().is_pushed()
    assert "did not end within 60 s" in capsys.readouterr().err


KIND = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = {"mediaType": "application/vnd.docker.container.image.v1+json", "size": 2, "digest": DIGEST}
MANIFEST = json.dumps({"schemaVersion": 2, "mediaType": KIND, "config": CONFIG, "layers": []}).encode()
STORED = f"sha256:{sha256(MANIFEST).hexdigest()}"


def registry(path: str) -> tuple[int, dict[str, str], bytes]:
    """Answer as a registry that has the image `stored`, wants a login for `private`, and fails for `broken`."""
    codes = {"stored": 200, "private": 401, "broken": 500}
    code = 200 if path == "/v2/" else codes.get(path.split("/")[2], 404)
    headers = {"Content-Type": KIND if code == 200 else "application/json", "Docker-Content-Digest": STORED}
    return code, headers, MANIFEST if code == 200 else b"{}"


@pytest.mark.parametrize(
    ("repository", "pushed", "message"),
    [("stored", True, ""), ("nowhere", False, ""), ("private", True, "401 Unauthorized"), ("broken", True, "500 ")],
)
def test_real_docker_client_is_understood(capsys, repository, pushed, message):
    if not shutil.which("docker") or subprocess.run(["docker", "buildx", "ls"], capture_output=True).returncode:
        pytest.skip("this machine has no docker buildx")
    with script(registry) as server:
        host = server.url.removeprefix("http://")
        digest = STORED if repository == "stored" else DIGEST
        assert image(f"{host}/{repository}:1.0", digest=digest).is_pushed() == pushed
    notice = capsys.readouterr().err
    assert message in notice
    assert bool(notice) == bool(message)
