"""GPT-2 as a deployment in Oracle Cloud: the real Triton, started by serve.sh as a container there would be, behind a
stand-in for the cloud.
"""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from zipfile import ZipFile

import psutil
import pytest

from scripts.common.http import answers, opener
from scripts.common.ports import free_ports
from scripts.common.settings import ROOT
from scripts.common.triton import Triton, TritonError
from scripts.stack.local import programs
from tests.support.checkpoints import language
from tests.support.oci_stand_in import OciStandIn, model_id, oci_stand_in
from tests.support.stack import TestStack
from tests.unit.test_oci_config import written

pytestmark = pytest.mark.slow

MOUNTED = "/opt/ds/model/deployed_model"
PROMPT = "  It was raining when"


@dataclass
class Containers:
    """What the service starts: serve.sh with the deployment's environment, and the zip, unpacked and read-only."""

    folder: Path
    running: dict[str, psutil.Popen] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    def launch(self, cloud: OciStandIn, deployment: dict) -> str:
        self.stop(deployment["id"])
        artifact = self.folder / deployment["id"] / str(time.monotonic_ns())
        with ZipFile(io.BytesIO(cloud.models[model_id(deployment)]["artifact"])) as packed:
            packed.extractall(artifact)
        details = deployment["modelDeploymentConfigurationDetails"]["environmentConfigurationDetails"]
        environment = dict(details["environmentVariables"])
        assert environment["TRITON_HTTP_PORT"] == str(details["serverPort"]) == str(details["healthCheckPort"])
        assert environment["MODEL_REPOSITORY"].startswith(f"{MOUNTED}/")
        (port,) = free_ports(1)
        environment |= {
            "TRITON_HTTP_PORT": str(port),
            "MODEL_REPOSITORY": environment["MODEL_REPOSITORY"].replace(MOUNTED, str(artifact)),
        }
        self.digests[deployment["id"]] = digest(artifact)
        subprocess.run(["chmod", "-R", "a-w", artifact], check=True)
        self.running[deployment["id"]] = self.start(environment)
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 90
        while not answers(f"{url}/v2/health/ready"):
            if time.monotonic() > deadline or self.running[deployment["id"]].poll() is not None:
                raise RuntimeError(f"the container is not healthy: {self.log[-1500:]}")
            time.sleep(0.2)
        assert digest(artifact) == self.digests[deployment["id"]]
        return url

    def start(self, environment: dict[str, str]) -> psutil.Popen:
        """Nothing but what the deployment says, and where Triton is, which in an image is where serve.sh looks."""
        home = programs.triton(self.folder / "home")
        own = {"TRITON_HOME": str(home), "PATH": programs.path_with_this_python(), "HOME": "/tmp"}
        if libraries := programs.library_path(self.folder / "home"):
            own["LD_LIBRARY_PATH"] = libraries
        with (self.folder / "container.log").open("w") as log:
            return psutil.Popen(
                [ROOT / "images/triton/serve.sh"],
                env=own | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return (self.folder / "container.log").read_text()

    def stop(self, name: str) -> None:
        if process := self.running.pop(name, None):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def stop_all(self) -> None:
        for name in list(self.running):
            self.stop(name)


def digest(folder: Path) -> str:
    """Of all names and contents."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found.update(f"{path.relative_to(folder)}\n".encode() + (path.read_bytes() if path.is_file() else b""))
    return found.hexdigest()


@dataclass
class User:
    stack: TestStack
    cloud: OciStandIn
    containers: Containers

    def make(self, target: str, **settings: object) -> str:
        done = self.try_to(target, **settings)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def try_to(self, target: str, **settings: object) -> subprocess.CompletedProcess[str]:
        own = {"DEPLOYMENT": self.stack.folder / "deployment.toml", "PACKAGE": self.stack.folder / "package.zip"}
        return self.stack.make(target, **own | settings)

    def describe(self, **settings: object) -> None:
        account = {"account__endpoint": self.cloud.url, "account__config_file": str(self.cloud.config_file())}
        systems = ["gpt2_ensemble", "gpt2_generate", "embedding"]
        written(self.stack.folder, **account | {"wait__poll_seconds": 0.2, "models__systems": systems} | settings)

    @property
    def deployed(self) -> str:
        (live_id,) = self.containers.running
        return live_id

    @property
    def server(self) -> psutil.Process:
        return psutil.Process(self.containers.running[self.deployed].pid)

    @property
    def triton(self) -> str:
        return self.cloud.tritons[self.deployed]


@pytest.fixture(scope="module")
def user(new_stack) -> Iterator[User]:
    stack = new_stack()
    checkpoint = language.save_gpt2(stack.folder / "checkpoint")
    done = stack.make("models", SYSTEMS="gpt2_ensemble", SOURCE=checkpoint)
    assert done.returncode == 0, done.stdout + done.stderr
    containers = Containers(stack.folder / "containers")
    containers.folder.mkdir()
    with oci_stand_in(stack.folder, launch=containers.launch) as cloud:
        user = User(stack, cloud, containers)
        user.describe()
        try:
            user.said = user.make("deploy-oci", RUNTIME="local")
            yield user
        finally:
            containers.stop_all()


def test_it_is_deployed(user):
    assert f"endpoint    {user.cloud.url}/{user.deployed}/predict" in user.said
    assert opener.open(f"{user.triton}/v2/health/ready", timeout=5).status == 200


def looped(triton: Triton, tokens: int) -> str:
    text = PROMPT
    for _ in range(tokens):
        inputs = [{"name": "TEXT", "shape": [1], "datatype": "BYTES", "data": [text]}]
        text += triton.infer("gpt2_ensemble", {"inputs": inputs})["outputs"][0]["data"][0]
    return text


def test_the_loop_says_what_triton_says(user):
    expected = looped(Triton(user.triton), 8)
    assert user.make("predict-oci", PROMPT=PROMPT, TOKENS=8) == f"{expected}\n"
    predictions = [body for method, path, body in user.cloud.seen if path.endswith("/predict")]
    assert predictions[-1]["inputs"][0]["data"][0].startswith(PROMPT)


def test_one_call_for_the_others(user):
    once = user.make("predict-oci", PROMPT=PROMPT, TOKENS=8, SYSTEM="gpt2_generate")
    assert once.startswith(PROMPT)
    assert len(once) > len(PROMPT) + 8
    vector = user.make("predict-oci", PROMPT="a text", SYSTEM="embedding")
    assert vector.startswith("output__0 FP32 [1, 384]: ")
    assert len(vector.split()) == 4 + 6 + 1


def test_a_whole_request_from_a_file(user):
    path = user.stack.folder / "request.json"
    path.write_text('{"inputs": [{"name": "TEXT", "shape": [2], "datatype": "BYTES", "data": ["I am", "Which"]}]}')
    assert user.make("predict-oci", REQUEST=path).startswith("out BYTES [2]: ")


def test_what_it_refuses_is_said(user):
    for settings, said in (
        ({"PROMPT": "", "REQUEST": ""}, "error: nothing to ask: make predict-oci PROMPT="),
        ({"PROMPT": "x" * 3000}, "error: gpt2_ensemble refused the request (400): "),
        ({"PROMPT": "x", "SYSTEM": "nowhere"}, "error: SYSTEM=nowhere is not deployed: models.systems has"),
        (
            {"PROMPT": "x", "OCI_ENDPOINT": f"{user.cloud.url}/ocid1.other"},
            "error: there is no such deployment, it has",
        ),
    ):
        done = user.try_to("predict-oci", **settings)
        assert done.returncode
        assert said in done.stderr
        assert "xxxx" not in done.stderr


def test_a_busy_deployment_is_asked_again(user):
    for status in (429, 503):
        user.cloud.fault("POST .*/predict", status, "TooManyRequests", **{"Retry-After": "1"})
    expected = looped(Triton(user.triton), 1)
    assert user.make("predict-oci", PROMPT=PROMPT, TOKENS=1) == f"{expected}\n"
    assert user.cloud.faults == []


def test_one_port_and_nothing_restricted_is_open(user):
    listening = {
        connection.laddr
        for process in (user.server, *user.server.children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert [address.ip for address in listening] == ["0.0.0.0"]
    assert f":{next(iter(listening)).port}" in user.triton
    for key in ("", "a-key-of-the-tests"):
        with pytest.raises(TritonError) as error:
            Triton(user.triton, key).index()
        assert error.value.status == 403


def test_no_prompt_is_in_a_log(user):
    assert PROMPT.strip() not in user.containers.log


def test_a_model_whose_process_died_is_back(user):
    """Which takes the key that serve.sh made."""
    (stub, *_) = [each for each in user.server.children(recursive=True) if "/gpt2_decoder/" in " ".join(each.cmdline())]
    stub.kill()
    deadline = time.monotonic() + 60
    while "model 'gpt2_decoder' is back" not in user.containers.log and time.monotonic() < deadline:
        time.sleep(0.5)
    assert "model 'gpt2_decoder' is back" in user.containers.log
    assert looped(Triton(user.triton), 1).startswith(PROMPT)


def test_another_model_is_served_under_the_same_address(user):
    before, address = user.make("predict-oci", PROMPT=PROMPT, TOKENS=8), user.deployed
    other = user.stack.folder / "other"
    language.save_gpt2(other, width=48)
    done = user.stack.make("models", SYSTEMS="gpt2_ensemble", SOURCE=other)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "changes: model" in user.make("deploy-oci")
    assert user.deployed == address
    assert user.make("predict-oci", PROMPT=PROMPT, TOKENS=8) != before
    assert "as it was" in user.make("deploy-oci")


def test_and_removed(user):
    live = user.deployed
    said = user.make("destroy-oci")
    user.containers.stop_all()
    assert f"deleting  deployment {live}, active" in said
    done = user.try_to("predict-oci", PROMPT=PROMPT)
    assert "there is no deployment 'triton-transformers' in ocid1.compartment" in done.stderr
