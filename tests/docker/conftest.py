"""A composed stack of the tests' own: the real compose file and images, with its own project name and ports."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from scripts.stack.docker.compose import Compose
from scripts.stack.docker.containers import OUR_PROJECT
from tests.docker.mirror import pip_configuration
from tests.support.scheduling import Scheduler
from tests.support.stacks import TestStack, bring_up, stacks
from triton_transformers.settings import ROOT, Settings

PIP_FILE = pytest.StashKey[Path]()


def docker(*arguments: str, timeout: float = 900) -> str:
    return subprocess.run(
        ["docker", *arguments], check=True, capture_output=True, text=True, timeout=timeout
    ).stdout.strip()


def run_in(image: str, command: str) -> str:
    """Return the output of a command in a container without a network."""
    return docker("run", "--rm", "--network", "none", "--entrypoint", "bash", image, "-c", command)


@dataclass
class DockerTestStack(TestStack):
    """A stack of containers."""

    __test__ = False
    project: str = field(default_factory=lambda: f"test-{uuid.uuid4().hex[:8]}")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.environment |= {"RUNTIME": "docker", "COMPOSE_PROJECT_NAME": self.project, "TRITON_ENGINE": "auto"}

    @property
    def log(self) -> str:
        return self.compose("logs", "--no-color").stdout

    def image(self, name: str) -> str:
        """Return the name of one of the stack's images: of Triton's for a tag alone."""
        return f"{self.project}:{name}" if ":" not in name else f"{self.project}-{name}"

    @property
    def label(self) -> str:
        return f"label=com.docker.compose.project={self.project}"

    @property
    def image_label(self) -> str:
        return f"label={OUR_PROJECT}={self.project}"

    def container(self, service: str) -> str:
        """Return the id of the service's newest container."""
        of_service = f"label=com.docker.compose.service={service}"
        return docker("ps", "--all", "--quiet", "--filter", self.label, "--filter", of_service).splitlines()[0]

    def inspect(self, service: str) -> dict:
        return json.loads(docker("inspect", self.container(service)))[0]

    def inside(self, service: str, *command: str) -> str:
        return docker("exec", self.container(service), *command)

    def kill_inside(self, service: str, pattern: str) -> None:
        """Kill the processes whose command line matches; write the pattern as [x]yz, or it matches this command."""
        command = f"kill -9 $(grep --text --files-with-matches '{pattern}' /proc/[0-9]*/cmdline | cut -d/ -f3)"
        self.inside(service, "bash", "-c", command)

    def healthy(self, *services: str) -> bool:
        label = '{{.Label "com.docker.compose.service"}}'
        healthy = docker("ps", "--filter", self.label, "--filter", "health=healthy", "--format", label)
        return set(services) <= set(healthy.split())

    def compose(self, *arguments: str, **settings: object) -> subprocess.CompletedProcess[str]:
        """Call compose as `make` does."""
        compose = Compose(Settings.load().replace(**self.environment | settings))
        return subprocess.run(
            compose.command(*arguments), env=compose.environment, capture_output=True, text=True, timeout=1700
        )

    def destroy(self) -> None:
        if containers := docker("ps", "--all", "--quiet", "--filter", self.label).split():
            docker("rm", "--force", "--volumes", *containers)
        for kind in ("network", "volume"):
            if leftovers := docker(kind, "ls", "--quiet", "--filter", self.label).split():
                docker(kind, "rm", *leftovers)
        if images := docker("image", "ls", "--quiet", "--filter", self.image_label).split():
            docker("image", "rm", "--force", *set(images))
        shutil.rmtree(self.folder)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduler:
    """Give one worker the modules that use the fixture `stack`."""
    return Scheduler(config, log, dict.fromkeys(("test_checkouts", "test_stack"), "stack"))


def pytest_configure_node(node: Any) -> None:
    """Give all workers the same mirror, because Docker caches layers by its address."""
    node.workerinput["pip_file"] = str(served_pip_file(node.config))


def served_pip_file(config: pytest.Config) -> Path:
    """Return pip's configuration. This process, or the one that started this worker, serves its mirror meanwhile."""
    if hasattr(config, "workerinput"):
        return Path(config.workerinput["pip_file"])
    if PIP_FILE not in config.stash:
        served = ExitStack()
        config.add_cleanup(served.close)
        folder = served.enter_context(tempfile.TemporaryDirectory())
        config.stash[PIP_FILE] = served.enter_context(pip_configuration(Path(folder) / "pip.conf"))
    return config.stash[PIP_FILE]


@pytest.fixture(scope="session")
def new_stack(pytestconfig: pytest.Config) -> Iterator:
    """Yield a function that makes stacks, whose builds use the packages that this machine's pip uses."""
    pip_file = served_pip_file(pytestconfig)

    def make() -> DockerTestStack:
        stack = DockerTestStack(Path(tempfile.mkdtemp(prefix="stack-")))
        stack.environment["BUILD_PIP_CONF"] = str(pip_file)
        # The mirror holds PyTorch's CPU build as a file. As an index it is empty, and answers that at once.
        if mirrors := re.findall(r"http://\S+", pip_file.read_text()):
            stack.environment["TORCH_INDEX"] = mirrors[0]
        return stack

    with stacks(make) as create:
        yield create


@pytest.fixture(scope="session")
def stack(new_stack) -> DockerTestStack:
    """Return a stack that was built, whose models the exporter assembled, and that is up."""
    return bring_up(new_stack(), timeout=1500)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a second checkout with the files of git, as a fresh clone: no .env."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, files.split("\0")):
        (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "clone" / name)
    return tmp_path / "clone"
