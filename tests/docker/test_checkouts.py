"""Failed starts, and two checkouts on one engine: neither takes a running stack down."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.docker.conftest import DockerTestStack, docker
from tests.support.embedding import embed
from triton_transformers.settings import ROOT

pytestmark = pytest.mark.timeout(1800)


@dataclass
class Load:
    """Counts the answers and failures of one client, which sends one request after the other."""

    answered: int = 0
    failures: list[str] = field(default_factory=list)


@contextmanager
def load(stack) -> Iterator[Load]:
    """Send requests meanwhile, and at least one before and after."""
    seen, over = Load(), threading.Event()

    def send() -> None:
        last = False
        while not last:
            last = over.is_set()
            try:
                embed(stack, "are you there?")
                seen.answered += 1
            except (OSError, ValueError) as error:
                seen.failures.append(str(error))

    client = threading.Thread(target=send)
    client.start()
    try:
        stack.wait(lambda: seen.answered or seen.failures, "the first answer")
        yield seen
    finally:
        over.set()
        client.join()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"GRAFANA_IMAGE": "localhost:1/grafana:none"}, "localhost:1/grafana:none cannot be pulled"),
        ({"TRITON_MEMORY": "1m"}, "docker compose create failed"),
    ],
    ids=["image that cannot be pulled", "container that cannot be created"],
)
def test_failed_up_loses_no_request(stack, settings, message):
    triton = stack.container("triton-cpu")
    with load(stack) as seen:
        # The first setting alone would restart Triton.
        done = stack.make("up", TRITON_LOG_VERBOSE="1", **settings)
    assert done.returncode != 0
    assert message in done.stderr
    assert (seen.failures, seen.answered > 1) == ([], True)
    assert [stack.container("triton-cpu")] == docker("ps", "--quiet", "--filter", f"id={triton}").split()
    assert stack.make("smoke").returncode == 0


def everything(stack) -> dict[str, object]:
    """Return the containers, with their starts, and the volumes and images of the stack."""
    containers = docker("ps", "--all", "--quiet", "--filter", stack.label).split()
    starts = {record["Id"]: record["State"]["StartedAt"] for record in json.loads(docker("inspect", *containers))}
    images = docker("image", "ls", "--no-trunc", "--format", "{{.Repository}}:{{.Tag}} {{.ID}}").splitlines()
    return {
        "containers": starts,
        "volumes": set(docker("volume", "ls", "--quiet", "--filter", stack.label).split()),
        "images": {image for image in images if image.startswith((f"{stack.project}:", f"{stack.project}-"))},
    }


def run(clone: Path, command: str, stack: DockerTestStack, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run what `make` runs there, without installing packages first."""
    own = {"LOCAL_STATE": ".local", "REPORTS": "reports", "TRITON_SETTINGS_FILE": ".env"} | settings
    return subprocess.run(
        [sys.executable, "-m", "scripts.stack", command],
        cwd=clone,
        env=stack.variables(**own),
        capture_output=True,
        text=True,
        timeout=900,
    )


def test_second_checkout_neither_takes_over_nor_removes_the_first(stack, clone):
    before = everything(stack)
    assert (len(before["volumes"]), len(before["images"]) >= 3) == (3, True)
    with load(stack) as seen:
        up = run(clone, "up", stack)
        assert (run(clone, "status", stack).stdout, run(clone, "down", stack).stdout) == (
            "not running (RUNTIME=docker): `make up` starts it\n",
            "not running\n",
        )
        clean = run(clone, "clean", stack, MODEL_REPOSITORY="model_repository")
    assert up.returncode != 0
    assert (
        f"the stack {stack.project} that runs here belongs to the checkout {ROOT}: run `make down` there" in up.stderr
    )
    assert "set another COMPOSE_PROJECT_NAME and other ports" in up.stderr
    assert clean.returncode == 0, clean.stderr
    assert f"kept the containers of {stack.project}, because they belong to the checkout {ROOT}" in clean.stdout
    assert (seen.failures, everything(stack)) == ([], before)


def test_second_checkout_runs_beside_the_first_with_a_name_and_ports_of_its_own(stack, new_stack, clone):
    other = new_stack()
    # Measuring the engines takes seconds.
    other.environment |= {"MODEL_REPOSITORY": stack.environment["MODEL_REPOSITORY"], "TRITON_ENGINE": "onnxruntime"}
    before = everything(stack)
    up = run(clone, "up", other)
    assert up.returncode == 0, up.stdout + up.stderr
    assert embed(other, "are you there?").shape == (1, 384)
    assert len(everything(other)["volumes"]) == 3
    assert docker("image", "ls", "--quiet", "--filter", other.image_label)
    clean = run(clone, "clean", other, MODEL_REPOSITORY="model_repository")
    assert clean.returncode == 0, clean.stderr
    for kind in (["ps", "--all"], ["volume", "ls"]):
        assert docker(*kind, "--quiet", "--filter", other.label) == ""
    assert docker("image", "ls", "--quiet", "--filter", other.image_label) == ""
    assert everything(stack) == before
    assert embed(stack, "are you there?").shape == (1, 384)
