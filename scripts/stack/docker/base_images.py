"""Find and pull the images that ours are built on."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping

from scripts.stack.docker import preflight
from triton_transformers.settings import ROOT, UserError


def base_images_of(dockerfile: str, arguments: Mapping[str, str]) -> list[str]:
    """Return the images that a Dockerfile of ours builds on, by the arguments of its build."""
    names = re.findall(r"^ARG (\w+_IMAGE)\b", (ROOT / dockerfile).read_text(), re.MULTILINE)
    return [arguments[name] for name in names if name in arguments]


def pull(images: Iterable[str]) -> None:
    """Pull the images that are missing. The build would pull them too, but would not keep their digests."""
    for image in images:
        missing = preflight.run("docker", "image", "inspect", image).returncode
        if missing and subprocess.run(["docker", "pull", image]).returncode:
            raise UserError(f"{image} cannot be pulled; Docker's message is above")
