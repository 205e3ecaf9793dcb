"""Pack the systems that deployment.toml names into the zip that is uploaded, as `make package` does."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape

from deploy.oci.deployment import Deployment
from triton_transformers.cli import err
from triton_transformers.models.package import assembled_models, package
from triton_transformers.settings import ROOT, Settings, UserError, command_environment


@dataclass(frozen=True)
class Artifact:
    path: Path
    sha256: str
    size: int
    identity: tuple[int, int]  # of the file that was hashed: packing again puts another in its place

    @classmethod
    def read(cls, path: Path) -> Artifact:
        with err.status(f"reading {escape(path.name)}"), path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            status = os.fstat(file.fileno())
        return cls(path, sha256, status.st_size, identity(status))

    def check_unchanged(self, status: os.stat_result) -> None:
        """Raise if the zip is no longer the one that was hashed: pushing the image takes minutes before the upload."""
        if identity(status) != self.identity:
            raise UserError(f"{self.path} was packed again meanwhile. Run the same command again")


def identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns


def settings_for(settings: Settings, deployment: Deployment) -> Settings:
    """Return the settings with the deployment's systems as SYSTEMS."""
    return Settings(settings | {"SYSTEMS": " ".join(deployment.models.systems)})


def assemble(settings: Settings) -> None:
    """Run `make models`, in whichever runtime; it prints its own errors."""
    environment = command_environment(SYSTEMS=settings["SYSTEMS"])
    done = subprocess.run([sys.executable, "-m", "scripts.stack", "models"], cwd=ROOT, env=environment)
    if done.returncode:
        sys.exit(done.returncode)


def pack(settings: Settings) -> Artifact:
    package(settings)
    return Artifact.read(settings.package)


def is_assembled(settings: Settings) -> bool:
    try:
        for name in settings.systems:
            assembled_models(name, settings.model_repository)
    except UserError:
        return False
    return True
