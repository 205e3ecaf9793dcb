"""A composed stack of the tests' own: the real compose file and images, a project name and ports of its own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from scripts.common.settings import Settings
from scripts.stack.docker.compose import Compose
from tests.docker.mirror import pip_configuration
from tests.support.stack import TestStack, brought_up, stacks


def docker(*arguments: str, timeout: float = 60) -> str:
    return subprocess.run(
        ["docker", *arguments], check=True, capture_output=True, text=True, timeout=timeout
    ).stdout.strip()


@dataclass
class DockerTestStack(TestStack):
    __test__ = False
    project: str = field(default_factory=lambda: f"test-{uuid.uuid4().hex[:8]}")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.environment |= {
            "RUNTIME": "docker",
            "COMPOSE_PROJECT_NAME": self.project,
        }

    @property
    def log(self) -> str:
        return self.make("logs").stdout

    def container(self, service: str) -> str:
        """The id of the service's newest container."""
        label = f"label=com.docker.compose.project={self.project}"
        found = docker(
            "ps", "--all", "--quiet", "--filter", label, "--filter", f"label=com.docker.compose.service={service}"
        )
        return found.splitlines()[0]

    def inspect(self, service: str) -> dict:
        return json.loads(docker("inspect", self.container(service)))[0]

    def inside(self, service: str, *command: str) -> str:
        return docker("exec", self.container(service), *command)

    def kill_inside(self, service: str, pattern: str) -> None:
        """The pattern must not match itself: [x]yz."""
        command = f"kill -9 $(grep --text --files-with-matches '{pattern}' /proc/[0-9]*/cmdline | cut -d/ -f3)"
        self.inside(service, "bash", "-c", command)

    def healthy(self, service: str = "triton-cpu") -> bool:
        return self.inspect(service)["State"].get("Health", {}).get("Status") == "healthy"

    def compose(self, *arguments: str, **settings: object) -> subprocess.CompletedProcess[str]:
        """Compose with the settings filled in, as `make` calls it."""
        filled = Compose(Settings(Settings.load() | self.environment | settings))
        return subprocess.run(
            filled.command(*arguments), env=filled.environment, capture_output=True, text=True, timeout=900
        )

    def destroy(self) -> None:
        label = f"label=com.docker.compose.project={self.project}"
        if containers := docker("ps", "--all", "--quiet", "--filter", label).split():
            docker("rm", "--force", "--volumes", *containers)
        for kind in ("network", "volume"):
            if left := docker(kind, "ls", "--quiet", "--filter", label).split():
                docker(kind, "rm", *left)
        shutil.rmtree(self.folder)


@pytest.fixture(scope="session")
def new_stack() -> Iterator:
    with tempfile.TemporaryDirectory() as folder, pip_configuration(Path(folder) / "pip.conf") as configuration:

        def make() -> DockerTestStack:
            stack = DockerTestStack(Path(tempfile.mkdtemp(prefix="stack-")))
            stack.environment["BUILD_PIP_CONF"] = str(configuration)
            # The mirror has PyTorch's CPU build; as an index it has nothing, and says so at once.
            if mirrors := re.findall(r"http://\S+", configuration.read_text()):
                stack.environment["TORCH_INDEX"] = mirrors[0]
            return stack

        with stacks(make) as make_one:
            yield make_one


@pytest.fixture(scope="session")
def stack(new_stack) -> DockerTestStack:
    """Built, assembled by the exporter, and up."""
    return brought_up(new_stack(), timeout=1500)
