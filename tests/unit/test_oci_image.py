"""The container's image, as the Docker engine and its registry tell of it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from deploy.oci.container_image import Image
from deploy.oci.deployment import read
from deploy.oci.limits import of_image
from tests.unit.test_oci_config import written

DIGEST = f"sha256:{'1' * 64}"
NAME = "iad.ocir.io/tests/triton:1.0"
PUSHED = f"iad.ocir.io/tests/triton@{DIGEST}"


def image(name: str = NAME, **about: str) -> Image:
    return Image(name, 1, [], ["tokenizer"], about.pop("digest", DIGEST), **about)


def test_what_it_is_made_for():
    labels = {"io.triton-transformers.backends": "tokenizer", "io.triton-transformers.profile": "cuda"}
    found = Image.of(NAME, {"Size": 1, "Architecture": "arm64", "Config": {"Labels": labels}})
    assert (found.architecture, found.profile) == ("arm64", "cuda")


@pytest.mark.parametrize(
    ("shape", "runs"),
    [
        ("VM.Standard.E5.Flex", "amd64"),
        ("VM.Standard2.1", "amd64"),
        ("VM.Optimized3.Flex", "amd64"),
        ("VM.GPU.A10.1", "amd64"),
        ("BM.GPU.A100-v2.8", "amd64"),
        ("VM.Standard.A1.Flex", "arm64"),
        ("VM.Standard.A2.Flex", "arm64"),
        ("BM.GPU.GB200.4", "arm64"),
    ],
)
def test_the_machine_that_it_runs_on(tmp_path, shape, runs):
    deployment = read(written(tmp_path, instances__shape=shape))
    other = {"amd64": "arm64", "arm64": "amd64"}[runs]
    assert list(of_image(deployment, image(architecture=runs), set())) == []
    assert list(of_image(deployment, image(), set())) == []
    (said,) = of_image(deployment, image(architecture=other), set())
    assert said == (
        f"{NAME} is for {other}, and '{shape}' runs {runs}: build it for that, "
        f"`DOCKER_DEFAULT_PLATFORM=linux/{runs} make build TAG=`"
    )


def test_the_profile_that_it_was_built_with(tmp_path):
    on_a_gpu = read(written(tmp_path, instances__shape="VM.GPU.A10.1", container__profile="cuda"))
    (said,) = of_image(on_a_gpu, image(profile="cpu"), set())
    assert said.startswith(f"{NAME} was built with PROFILE=cpu, and container.profile is 'cuda'")
    for profile in ("cuda", ""):
        assert list(of_image(on_a_gpu, image(profile=profile), set())) == []


# --- the registry -----------------------------------------------------------------------------------------------------


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """A stand-in for the client, which says what its registry would; and what it was asked."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/docker"

    def make(says: str, code: int) -> None:
        program.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\necho "{says}" >&2\nexit {code}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")

    make.asked = lambda: (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""
    return make


def test_the_registry_has_it(docker, capsys):
    docker("", 0)
    assert image().is_pushed()
    assert docker.asked() == f"buildx imagetools inspect {PUSHED}\n"
    assert capsys.readouterr().err == ""


def test_the_registry_has_not_got_it(docker, capsys):
    docker(f"ERROR: {PUSHED}: not found", 1)
    assert not image().is_pushed()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "said",
    [
        "unexpected status from HEAD request to https://iad.ocir.io/v2/x: 401 Unauthorized",
        "dial tcp: lookup iad.ocir.io on 10.0.0.1:53: no such host",
        "docker: 'buildx' is not a docker command.",
        "error getting credentials: [/bin/docker-credential-x]: not found",
    ],
)
def test_the_registry_cannot_be_asked(docker, capsys, said):
    docker(f"a first line\nERROR: {said}", 1)
    assert image().is_pushed()
    told = " ".join(capsys.readouterr().err.split())
    assert told == f"whether {NAME} was pushed, its registry was not to be asked: ERROR: {said}"


def test_no_answer(monkeypatch, capsys):
    def never(*_: str) -> None:
        raise subprocess.TimeoutExpired("docker", 60)

    monkeypatch.setattr("deploy.oci.container_image.docker", never)
    assert image().is_pushed()
    assert "no answer within 60 s" in capsys.readouterr().err


def test_what_has_no_digest_was_not_pushed_and_nobody_is_asked(docker):
    docker("", 0)
    assert not image(digest="").is_pushed()
    assert docker.asked() == ""


KIND = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = {"mediaType": "application/vnd.docker.container.image.v1+json", "size": 2, "digest": DIGEST}
MANIFEST = json.dumps({"schemaVersion": 2, "mediaType": KIND, "config": CONFIG, "layers": []}).encode()
THERE = f"sha256:{sha256(MANIFEST).hexdigest()}"


@contextmanager
def registry() -> Iterator[str]:
    """A stand-in: it has one image, `there`, asks for a login for `private`, and is broken for `broken`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            codes = {"there": 200, "private": 401, "broken": 500}
            code = 200 if self.path == "/v2/" else codes.get(self.path.split("/")[2], 404)
            body = MANIFEST if code == 200 else b"{}"
            self.send_response(code)
            self.send_header("Content-Type", KIND if code == 200 else "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Docker-Content-Digest", THERE)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield "127.0.0.1:{1}".format(*server.server_address)
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ("repository", "pushed", "said"),
    [("there", True, ""), ("nowhere", False, ""), ("private", True, "401 Unauthorized"), ("broken", True, "500 ")],
)
def test_as_the_real_client_says_it(capsys, repository, pushed, said):
    if not shutil.which("docker") or subprocess.run(["docker", "buildx", "ls"], capture_output=True).returncode:
        pytest.skip("there is no docker buildx here")
    with registry() as host:
        digest = THERE if repository == "there" else DIGEST
        assert image(f"{host}/{repository}:1.0", digest=digest).is_pushed() == pushed
    told = capsys.readouterr().err
    assert said in told
    assert bool(told) == bool(said)
