"""What is uploaded: the zip of `make package`, of the systems that deployment.toml names."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape

from deploy.oci.deployment import Deployment
from scripts.common.cli import err
from scripts.common.settings import ROOT, Settings, UserError, command_environment
from scripts.models.package import assembled_models, package


@dataclass(frozen=True)
class Artifact:
    path: Path
    sha256: str
    size: int
    file: tuple[int, int]  # which one that is: packing puts another in its place

    @classmethod
    def of(cls, path: Path) -> Artifact:
        with err.status(f"reading {escape(path.name)}"), path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            found = os.fstat(file.fileno())
        return cls(path, sha256, found.st_size, identity(found))

    def check(self, found: os.stat_result) -> None:
        """Minutes go by between the hash and the upload: an image is pushed."""
        if identity(found) != self.file:
            raise UserError(f"{self.path} was packed anew meanwhile: run the same command again")


def identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_ino, found.st_mtime_ns


def settings_of(settings: Settings, deployment: Deployment) -> Settings:
    return Settings(settings | {"SYSTEMS": " ".join(deployment.models.systems)})


def assemble(settings: Settings) -> None:
    """`make models`, in whichever runtime."""
    environment = command_environment(SYSTEMS=settings["SYSTEMS"])
    done = subprocess.run([sys.executable, "-m", "scripts.stack", "models"], cwd=ROOT, env=environment)
    if done.returncode:
        sys.exit(done.returncode)  # it said why


def packed(settings: Settings) -> Artifact:
    package(settings)
    return Artifact.of(settings.path("PACKAGE"))


def is_assembled(settings: Settings) -> bool:
    try:
        for name in settings.words("SYSTEMS"):
            assembled_models(name, settings.path("MODEL_REPOSITORY"))
    except UserError:
        return False
    return True
