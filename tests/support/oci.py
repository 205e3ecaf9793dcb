"""A user's machine for tests of Oracle Cloud: a model repository, a deployment.toml, a profile, and the commands."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from unittest import mock

import oci

from deploy.oci import deployment as configuration
from deploy.oci.client import Service
from deploy.oci.deployment import Account, Deployment
from deploy.oci.registered_models import Artifact
from deploy.oci.rollout import roll_out
from export.package import package
from tests.support.oci_stand_in import OciStandIn
from triton_transformers import cli
from triton_transformers.settings import ROOT, Settings

COMMITTED = ROOT / "deploy/oci/deployment.toml"
REQUIRED = {
    "deployment.compartment_id": "ocid1.compartment.oc1..tests",
    "deployment.project_id": "ocid1.datascienceproject.oc1.iad.tests",
    "container.image": "iad.ocir.io/tests/triton:1.0",
}

# All that a deployment.toml can set, and the committed one does not.
EVERYTHING = {
    "deployment__description": "of the tests",
    "container__entrypoint": ["/opt/triton-transformers/serve.sh"],
    "container__cmd": ["--log-verbose=1"],
    "container__environment": {"TRITON_LOG_VERBOSE": "1"},
    "container__image": f"iad.ocir.io/tests/triton:1.0@sha256:{'0' * 64}",
    "instances__subnet_id": "ocid1.subnet.oc1.iad.tests",
    "logs__group_id": "ocid1.loggroup.oc1.iad.tests",
    "logs__access_id": "ocid1.log.oc1.iad.access",
    "logs__predict_id": "ocid1.log.oc1.iad.predict",
    "tags__team": "search",
}


def write_deployment(folder: Path, **settings: object) -> Path:
    """Write the committed file with the required keys filled in, and these: section__name=value; None removes a key."""
    table = tomllib.loads(COMMITTED.read_text())
    for name, value in {**REQUIRED, **{name.replace("__", "."): value for name, value in settings.items()}}.items():
        section, _, key = name.partition(".")
        if key and value is None:
            del table[section][key]
        elif key:
            table.setdefault(section, {})[key] = value
        else:
            table[section] = value
    path = folder / "deployment.toml"
    # Keys outside sections come first.
    ordered = sorted(table.items(), key=lambda item: isinstance(item[1], dict))
    path.write_text("".join(toml(name, value) for name, value in ordered))
    return path


def toml(name: str, value: object) -> str:
    if not isinstance(value, dict):
        return f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}\n"
    lines = [toml(key, item) for key, item in value.items() if not isinstance(item, dict)]
    tables = [toml(f"{name}.{key}", item) for key, item in value.items() if isinstance(item, dict)]
    return "".join([f"[{name}]\n", *lines, *tables])


@dataclass
class Machine:
    folder: Path
    cloud: OciStandIn

    def __post_init__(self) -> None:
        model = self.folder / "models/own"
        (model / "1").mkdir(parents=True)
        (model / "config.pbtxt").write_text('backend: "tokenizer"')
        self.change_model()

    def change_model(self) -> None:
        (self.folder / "models/own/1/weights").write_bytes(os.urandom(300_000))

    @cached_property
    def settings(self) -> Settings:
        own = {"SYSTEMS": "own", "MODEL_REPOSITORY": f"{self.folder}/models", "PACKAGE": f"{self.folder}/own.zip"}
        return Settings.load().replace(**own)

    @cached_property
    def config_file(self) -> str:
        return str(self.cloud.config_file())

    def deployment(self, **settings: object) -> Deployment:
        account = {"account__endpoint": self.cloud.url, "account__config_file": self.config_file}
        own = {"models__systems": ["own"], "wait__poll_seconds": 0.1}
        return configuration.read(write_deployment(self.folder, **account | own | settings))

    @cached_property
    def usual_service(self) -> Service:
        return self.service(self.deployment().account)

    def service(self, account: Account) -> Service:
        """Return clients that send each request once: by default, Oracle's SDK retries for minutes."""
        service = Service.connect(account)
        service.object_storage.base_client.endpoint = self.cloud.url
        for client in (service.data_science, service.object_storage):
            client.retry_strategy = oci.retry.NoneRetryStrategy()
        return service

    def artifact(self) -> Artifact:
        package(self.settings)
        return Artifact.read(self.folder / "own.zip")

    def deploy(self, **settings: object) -> oci.data_science.models.ModelDeployment:
        return roll_out(self.usual_service, self.deployment(**settings), self.artifact())

    # --- commands -----------------------------------------------------------------------------------------------------

    def environment(self, settings: dict[str, str]) -> dict[str, str]:
        if "DEPLOYMENT" not in settings:
            self.deployment()
        own = {"DEPLOYMENT": str(self.folder / "deployment.toml"), "MODEL_REPOSITORY": f"{self.folder}/models"}
        return own | {"PACKAGE": f"{self.folder}/own.zip", "RUNTIME": "local", "COLUMNS": "200"} | settings

    def run(self, name: str, **settings: str) -> tuple[int, str, str]:
        """Run a command in this process; return its exit code, stdout and stderr."""
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            code = run_command(name, self.environment(settings))
        return code, out.getvalue(), err.getvalue()

    def run_process(self, name: str, **settings: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", f"deploy.oci.{name}"]
        environment = os.environ | self.environment(settings)
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180)

    @contextlib.contextmanager
    def hanging_command(self, name: str, request: str) -> Iterator[subprocess.Popen]:
        """Start a command in a process, and yield it once it waits for the answer to a request."""
        self.cloud.hangs_at = request
        with (self.folder / "output").open("w") as output:
            command = subprocess.Popen(
                [sys.executable, "-m", f"deploy.oci.{name}"],
                cwd=ROOT,
                env=os.environ | self.environment({}),
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # nohup starts pytest without it
            )
        try:
            deadline = time.monotonic() + 120
            while self.cloud.hangs_at and command.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not self.cloud.hangs_at, (self.folder / "output").read_text()
            yield command
        finally:
            command.kill()
            command.wait()


def run_command(name: str, environment: dict[str, str]) -> int:
    module = importlib.import_module(f"deploy.oci.{name}")
    with mock.patch.dict(os.environ, environment):
        try:
            cli.run(module.main)
        except SystemExit as exit:
            return exit.code
    raise AssertionError("cli.run always exits")
