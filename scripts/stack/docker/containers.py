"""The containers, volumes and images of this checkout, and the images of others that it runs."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from scripts.stack.docker import preflight
from triton_transformers.settings import ROOT, UserError

PROJECT = "com.docker.compose.project"
# Compose's digest of the service's definition. A container with another one is replaced.
DEFINITION = "com.docker.compose.config-hash"
CACHE = "Build Cache"
# compose.yaml puts these labels on volumes and images: CHECKOUT_ID and COMPOSE_PROJECT_NAME. The first is a digest,
# because images may be pushed, and the path of a checkout often contains a user's name.
CHECKOUT, OUR_PROJECT = "io.triton-transformers.checkout", "io.triton-transformers.project"
CHECKOUT_ID = hashlib.sha256(str(ROOT).encode()).hexdigest()[:16]

_FORMAT = '{{.ID}}\t{{.Label "com.docker.compose.service"}}\t{{.Label "com.docker.compose.project.working_dir"}}'


@dataclass(frozen=True)
class Container:
    """A container of the project, with the folder of the checkout that created it."""

    id: str
    service: str
    folder: str

    @property
    def is_triton(self) -> bool:
        return self.service.startswith("triton-")


def containers(project: str, *options: str) -> list[Container]:
    """Return the running containers of a project, or those that options of `docker ps` select."""
    command = ["docker", "ps", "--no-trunc", "--filter", f"label={PROJECT}={project}", "--format", _FORMAT, *options]
    return [Container(*line.split("\t")) for line in preflight.run(*command).stdout.splitlines()]


def remove_images(project: str) -> None:
    """Remove the images that this checkout built for a project."""
    labels = [f"--filter=label={name}={value}" for name, value in ((CHECKOUT, CHECKOUT_ID), (OUR_PROJECT, project))]
    if images := sorted({*preflight.run("docker", "image", "ls", "--quiet", *labels).stdout.split()}):
        preflight.run("docker", "image", "rm", "--force", *images, timeout=None)


def build_cache() -> str:
    """Return the size of Docker's build cache, such as 8.75GB."""
    sizes = preflight.run("docker", "system", "df", "--format", "{{.Type}}\t{{.Size}}").stdout
    return next((size for kind, _, size in (line.partition("\t") for line in sizes.splitlines()) if kind == CACHE), "")


def remove_volumes(project: str) -> list[str]:
    """Remove the volumes of a project. Return the names of those that are another checkout's or in use."""
    label = f'{{{{.Name}}}}\t{{{{.Label "{CHECKOUT}"}}}}'
    listed = preflight.run("docker", "volume", "ls", "--filter", f"label={PROJECT}={project}", "--format", label).stdout
    kept = []
    for name, owner in (line.split("\t") for line in listed.splitlines()):
        if owner != CHECKOUT_ID or preflight.run("docker", "volume", "rm", name).returncode:
            kept.append(name)
    return kept


def pull(images: Iterable[str]) -> None:
    """Pull the images that are missing."""
    for image in images:
        missing = preflight.run("docker", "image", "inspect", image).returncode
        if missing and subprocess.run(["docker", "pull", image]).returncode:
            raise UserError(f"{image} cannot be pulled; Docker's message is above")
