"""What is uploaded: the zip of `make package`, of the systems that deployment.toml names."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from deploy.oci.config import Deployment
from scripts.cli import err
from scripts.models.package import assembled, package
from scripts.settings import ROOT, Settings, UserError


@dataclass(frozen=True)
class Artifact:
    path: Path
    sha256: str

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    @classmethod
    def of(cls, path: Path) -> Artifact:
        with err.status(f"reading {path.name}"), path.open("rb") as file:
            return cls(path, hashlib.file_digest(file, "sha256").hexdigest())


def settings_of(settings: Settings, deployment: Deployment) -> Settings:
    return Settings(settings | {"SYSTEMS": " ".join(deployment.models.systems)})


def assemble(settings: Settings) -> None:
    """`make models`, in whichever runtime."""
    environment = os.environ | {"SYSTEMS": settings["SYSTEMS"]}
    done = subprocess.run([sys.executable, "-m", "scripts.make", "models"], cwd=ROOT, env=environment)
    if done.returncode:
        sys.exit(done.returncode)  # it said why


def packed(settings: Settings) -> Artifact:
    package(settings)
    return Artifact.of(settings.path("PACKAGE"))


def is_assembled(settings: Settings) -> bool:
    try:
        for name in settings.words("SYSTEMS"):
            assembled(name, settings.path("MODEL_REPOSITORY"))
    except UserError:
        return False
    return True
