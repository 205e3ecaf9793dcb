"""GPT-2 as a deployment in Oracle Cloud: a stand-in of the cloud starts the real Triton as a container would."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from zipfile import ZipFile

import psutil
import pytest

from scripts.stack.local import programs
from tests.support.checkpoints import language
from tests.support.oci import write_deployment
from tests.support.oci_stand_in import OciStandIn, model_id, oci_server
from tests.support.stacks import TestStack, reserve_ports
from triton_transformers.http import answers, opener
from triton_transformers.settings import ROOT
from triton_transformers.triton import Triton, TritonError

pytestmark = pytest.mark.slow

MOUNTED = "/opt/ds/model/deployed_model"
PROMPT = "  It was raining when"


@dataclass
class Containers:
    """The service's containers: each runs serve.sh with the deployment's environment on the unpacked, read-only zip."""

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
        (port,) = reserve_ports(1)
        environment |= {
            "TRITON_HTTP_PORT": str(port),
            "MODEL_REPOSITORY": environment["MODEL_REPOSITORY"].replace(MOUNTED, str(artifact)),
        }
        self.digests[deployment["id"]] = digest(artifact)
        subprocess.run(["chmod", "-R", "a-w", artifact], check=True)
        self.running[deployment["id"]] = self.start(environment)
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 300
        while not answers(f"{url}/v2/health/ready"):
            if time.monotonic() > deadline or self.running[deployment["id"]].poll() is not None:
                raise RuntimeError(f"the container is not healthy: {self.log[-1500:]}")
            time.sleep(0.2)
        assert digest(artifact) == self.digests[deployment["id"]]
        return url

    def start(self, environment: dict[str, str]) -> psutil.Popen:
        """Start serve.sh with the deployment's environment and this machine's paths of Triton."""
        home = programs.triton(self.folder / "home")
        own = {"TRITON_HOME": str(home), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": "/tmp"}
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
            group = process.pid
            process.kill()
            process.wait()
            # The watchdog ends the Python processes, and removes their shared memory, which would stay on this machine.
            with contextlib.suppress(ProcessLookupError):
                for _ in range(1200):
                    os.killpg(group, 0)
                    time.sleep(0.1)
                os.killpg(group, signal.SIGKILL)

    def stop_all(self) -> None:
        for name in list(self.running):
            self.stop(name)


def digest(folder: Path) -> str:
    """Return a hash of all names and contents."""
    sha256 = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        sha256.update(f"{path.relative_to(folder)}\n".encode() + (path.read_bytes() if path.is_file() else b""))
    return sha256.hexdigest()


@dataclass
class User:
    stack: TestStack
    cloud: OciStandIn
    containers: Containers
    first_output: str = ""  # of the first deployment

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
        own = {"wait__poll_seconds": 0.2, "models__systems": systems}
        write_deployment(self.stack.folder, **account | own | settings)

    @property
    def live_id(self) -> str:
        (live_id,) = self.containers.running
        return live_id

    @property
    def server(self) -> psutil.Process:
        return psutil.Process(self.containers.running[self.live_id].pid)

    @property
    def triton(self) -> str:
        return self.cloud.tritons[self.live_id]


@pytest.fixture(scope="module")
def user(new_stack) -> Iterator[User]:
    stack = new_stack()
    checkpoint = language.save_gpt2(stack.folder / "checkpoint")
    stack.assemble({"SYSTEMS": "gpt2_ensemble", "SOURCE": checkpoint})
    containers = Containers(stack.folder / "containers")
    containers.folder.mkdir()
    with oci_server() as server:
        user = User(stack, server.new_cloud(stack.folder, launch=containers.launch), containers)
        user.describe()
        try:
            user.first_output = user.make("deploy-oci", RUNTIME="local")
            yield user
        finally:
            containers.stop_all()


def test_deployment_is_ready(user):
    assert f"endpoint    {user.cloud.url}/{user.live_id}/predict" in user.first_output
    assert opener.open(f"{user.triton}/v2/health/ready", timeout=120).status == 200


def looped(triton: Triton, tokens: int) -> str:
    text = PROMPT
    for _ in range(tokens):
        inputs = [{"name": "TEXT", "shape": [1], "datatype": "BYTES", "data": [text]}]
        text += triton.infer("gpt2_ensemble", {"inputs": inputs})["outputs"][0]["data"][0]
    return text


def test_predict_oci_equals_a_loop_on_triton(user):
    expected = looped(Triton(user.triton), 8)
    assert user.make("predict-oci", PROMPT=PROMPT, TOKENS=8) == f"{expected}\n"
    predictions = [body for method, path, body in user.cloud.received if path.endswith("/predict")]
    assert predictions[-1]["inputs"][0]["data"][0].startswith(PROMPT)


def test_other_systems_take_one_request(user):
    once = user.make("predict-oci", PROMPT=PROMPT, TOKENS=8, SYSTEM="gpt2_generate")
    assert once.startswith(PROMPT)
    assert len(once) > len(PROMPT) + 8
    vector, tokens, *ids = user.make("predict-oci", PROMPT="a text", SYSTEM="embedding").strip().splitlines()
    assert vector.startswith("output__0 FP32 [1, 384]: ")
    assert len(vector.split()) == 4 + 6 + 1
    assert [tokens, *ids] == ["token_count INT32 [1, 1]: 4", "input_ids INT64 [1, 4]: 101 1037 3793 102"]


def test_refusal_does_not_quote_the_prompt(user):
    done = user.try_to("predict-oci", PROMPT="x" * 3000)
    assert done.returncode
    assert "error: gpt2_ensemble refused the request (400): " in done.stderr
    assert "xxxx" not in done.stderr
    assert PROMPT.strip() not in user.containers.log


def test_container_opens_one_port_and_nothing_restricted(user):
    listening = {
        connection.laddr
        for process in (user.server, *user.server.children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert [address.ip for address in listening] == ["0.0.0.0"]
    assert f":{next(iter(listening)).port}" in user.triton
    for key in ("", "another-key"):
        with pytest.raises(TritonError) as error:
            Triton(user.triton, key).index()
        assert error.value.status == 403


def test_killed_model_process_recovers(user):
    """The reload needs the admin key that serve.sh generated."""
    processes = user.server.children(recursive=True)
    next(process for process in processes if "/gpt2_decoder/" in " ".join(process.cmdline())).kill()
    deadline = time.monotonic() + 180
    while "model 'gpt2_decoder' is back" not in user.containers.log and time.monotonic() < deadline:
        time.sleep(0.5)
    assert "model 'gpt2_decoder' is back" in user.containers.log
    assert looped(Triton(user.triton), 1).startswith(PROMPT)


def test_new_model_is_served_at_the_same_address(user):
    before, address = user.make("predict-oci", PROMPT=PROMPT, TOKENS=8), user.live_id
    other = user.stack.folder / "other"
    language.save_gpt2(other, width=48)
    user.stack.assemble({"SYSTEMS": "gpt2_ensemble", "SOURCE": other})
    assert "changes: model" in user.make("deploy-oci")
    assert user.live_id == address
    assert user.make("predict-oci", PROMPT=PROMPT, TOKENS=8) != before
    assert "unchanged" in user.make("deploy-oci")


def test_destroyed_deployment_is_gone(user):
    live = user.live_id
    output = user.make("destroy-oci")
    user.containers.stop_all()
    assert f"deleting  deployment {live}, active" in output
    done = user.try_to("predict-oci", PROMPT=PROMPT)
    assert "has no deployment 'triton-transformers'" in done.stderr
