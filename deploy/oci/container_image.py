"""The container's image, as far as the Docker engine of this machine knows it."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass

from rich.markup import escape

from scripts.common.cli import err
from scripts.common.settings import UserError
from scripts.stack.docker.slim import LABEL, PROFILE_LABEL


@dataclass(frozen=True)
class Image:
    name: str
    size: int  # unpacked
    command: list[str]  # entrypoint and cmd
    backends: list[str] | None  # None: it does not say
    digest: str  # in its registry; empty: it was not pushed from here
    architecture: str = ""  # empty: not known
    profile: str = ""  # empty: it does not say

    @classmethod
    def here(cls, name: str) -> Image | None:
        """None where this machine has no such image, or no engine."""
        if not shutil.which("docker"):
            return None
        try:
            done = docker("image", "inspect", name)
        except subprocess.TimeoutExpired:
            return None
        records = json.loads(done.stdout or "[]") if done.returncode == 0 else []
        return cls.of(name, records[0]) if records else None

    @classmethod
    def of(cls, name: str, record: dict) -> Image:
        config = record.get("Config") or {}
        labels = config.get("Labels") or {}
        label = labels.get(LABEL)
        digests = [each.partition("@") for each in record.get("RepoDigests") or []]
        return cls(
            name=name,
            size=record["Size"],
            command=[*(config.get("Entrypoint") or []), *(config.get("Cmd") or [])],
            backends=None if label is None else label.split(),
            digest=next((digest for theirs, _, digest in digests if theirs == repository(name)), ""),
            architecture=record.get("Architecture") or "",
            profile=labels.get(PROFILE_LABEL, ""),
        )

    def is_pushed(self) -> bool:
        """As its registry says: engines with containerd's store have a digest as soon as an image is built.

        Where the registry cannot be asked, the engine's word is taken.
        """
        if not self.digest:
            return False
        pushed = f"{repository(self.name)}@{self.digest}"
        try:
            done = docker("buildx", "imagetools", "inspect", pushed)
        except subprocess.TimeoutExpired as error:
            said = f"no answer within {error.timeout:.0f} s"
        else:
            if done.returncode == 0:
                return True
            said = (done.stderr.strip().splitlines() or ["docker buildx failed"])[-1]
            if said.endswith(f"{pushed}: not found"):
                return False
        err.print(f"[yellow]whether {self.name} was pushed, its registry was not to be asked:[/] {escape(said)}")
        return True


def repository(name: str) -> str:
    return name.partition("@")[0].rpartition(":")[0]


def push(name: str) -> None:
    """With Docker's own progress."""
    if not shutil.which("docker"):
        raise UserError("PUSH=1: docker is not installed here")
    err.print(f"pushing {name}")
    if subprocess.run(["docker", "push", name]).returncode:
        registry = name.partition("/")[0]
        raise UserError(
            f"{name} was not pushed; what Docker said is above. Is it there (make build TAG={name}), and are you "
            f"logged in (docker login {registry}, with an auth token)?"
        )


def docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=60)
