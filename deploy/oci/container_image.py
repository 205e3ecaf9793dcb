"""Inspect and push the container image with the Docker engine of this machine."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass

from rich.markup import escape

from scripts.stack.docker import preflight
from scripts.stack.docker.slim import LABEL, PROFILE_LABEL
from triton_transformers.cli import err
from triton_transformers.settings import UserError


@dataclass(frozen=True)
class Image:
    name: str
    size: int  # unpacked
    command: list[str]  # entrypoint and cmd
    backends: list[str] | None  # None if it has no label
    digest: str  # in its registry; empty if it was not pushed from here
    architecture: str = ""  # empty if unknown
    profile: str = ""  # empty if it has no label

    @classmethod
    def inspect(cls, name: str) -> Image | None:
        """Return the image of this name, or None if this machine does not have it, or has no engine."""
        if not shutil.which("docker"):
            return None
        try:
            done = preflight.run("docker", "image", "inspect", name)
        except UserError:  # no answer
            return None
        records = json.loads(done.stdout or "[]") if done.returncode == 0 else []
        return cls.parse(name, records[0]) if records else None

    @classmethod
    def parse(cls, name: str, record: dict) -> Image:
        config = record.get("Config") or {}
        labels = config.get("Labels") or {}
        label = labels.get(LABEL)
        digests = [digest.partition("@") for digest in record.get("RepoDigests") or []]
        return cls(
            name=name,
            size=record["Size"],
            command=[*(config.get("Entrypoint") or []), *(config.get("Cmd") or [])],
            backends=None if label is None else label.split(),
            digest=next((digest for origin, _, digest in digests if origin == repository(name)), ""),
            architecture=record.get("Architecture") or "",
            profile=labels.get(PROFILE_LABEL, ""),
        )

    def is_pushed(self) -> bool:
        """Return whether the registry has this image, or the engine's answer if the registry cannot be queried.

        The engine alone is not enough: with containerd's store an image has a digest as soon as it is built.
        """
        if not self.digest:
            return False
        pushed = f"{repository(self.name)}@{self.digest}"
        try:
            done = preflight.run("docker", "buildx", "imagetools", "inspect", pushed)
        except UserError as error:  # no answer
            problem = str(error)
        else:
            if done.returncode == 0:
                return True
            problem = (done.stderr.strip().splitlines() or ["docker buildx failed"])[-1]
            if problem.endswith(f"{pushed}: not found"):  # buildx's words: it has no exit status of its own for this
                return False
        err.print(f"[yellow]could not ask the registry whether it has {self.name}:[/] {escape(problem)}")
        return True


def repository(name: str) -> str:
    return name.partition("@")[0].rpartition(":")[0]


def push(name: str) -> None:
    """Push an image, with Docker's own progress."""
    if not shutil.which("docker"):
        raise UserError("PUSH=1: Docker is not installed here. Push the image from a machine that has it")
    err.print(f"pushing {name}")
    if subprocess.run(["docker", "push", name]).returncode:
        registry = name.partition("/")[0]
        raise UserError(
            f"{name} was not pushed; Docker's message is above. Build it with `make build TAG={name}`, and log in with "
            f"`docker login {registry}` and an auth token"
        )
