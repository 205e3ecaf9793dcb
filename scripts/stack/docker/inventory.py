"""List as JSON what the file system holds. sboms.py runs this in a container, with the Python of the image.

It uses the standard library only, of Python 3.10 and later.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from importlib.metadata import PathDistribution
from pathlib import Path

# Triton, and the libraries that its wheel brings. No package manager knows these files.
TRITON = ("opt/tritonserver", "opt/nvidia_pytriton.libs")
NOT_IN_THE_IMAGE = {"dev", "proc", "sys", "tmp"}
# Debian's Python packages are among Debian's packages.
DEBIANS_PYTHON = "usr/lib/python3/dist-packages"


def release(root: Path) -> dict[str, str]:
    """Return the fields of /etc/os-release."""
    lines = (root / "etc/os-release").read_text(encoding="utf-8").splitlines()
    return {name: value.strip("\"'") for name, _, value in (line.partition("=") for line in lines)}


def debian(root: Path) -> Iterator[dict[str, str]]:
    """Yield the packages that dpkg has installed."""
    status = root / "var/lib/dpkg/status"
    for paragraph in status.read_text(encoding="utf-8").split("\n\n") if status.exists() else []:
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if ": " in line and line[0] != " ")
        if fields.get("Status", "").endswith(" installed"):
            yield {"name": fields["Package"], "version": fields["Version"], "architecture": fields["Architecture"]}


def python(root: Path) -> Iterator[dict[str, str]]:
    """Yield the Python packages of all environments of the image."""
    for folder, folders, _ in os.walk(root):
        here = Path(folder)
        if here == root:
            folders[:] = [name for name in folders if name not in NOT_IN_THE_IMAGE]
        for name in folders:
            if name.endswith((".dist-info", ".egg-info")) and here != root / DEBIANS_PYTHON:
                metadata = PathDistribution(here / name).metadata
                # Wheels may vendor packages, with a folder that has no metadata.
                if metadata and metadata["Name"] and metadata["Version"]:
                    location = f"/{here.relative_to(root)}"
                    yield {"name": metadata["Name"], "version": metadata["Version"], "location": location}


def binaries(root: Path) -> Iterator[dict[str, str]]:
    """Yield the programs and libraries of Triton, with their digests."""
    for top in TRITON:
        for folder, _, files in os.walk((root / top).resolve()):
            for path in (Path(folder, name) for name in files):
                if not path.is_symlink() and path.open("rb").read(4) == b"\x7fELF":
                    digest = hashlib.sha256(path.read_bytes()).hexdigest()
                    yield {"path": f"/{path.relative_to(root)}", "sha256": digest}


def inventory(root: Path) -> dict[str, object]:
    kinds = {"debian": debian, "python": python, "binaries": binaries}
    return {"release": release(root), **{kind: list(listed(root)) for kind, listed in kinds.items()}}


if __name__ == "__main__":
    json.dump(inventory(Path("/")), sys.stdout)
