"""Describe what fills /dev/shm, the memory through which Triton and its Python processes pass tensors."""

from __future__ import annotations

import contextlib
import shutil
from collections import defaultdict
from pathlib import Path

import psutil
from rich.filesize import decimal

SHARED_MEMORY = Path("/dev/shm")
SHOWN = 3  # files


def occupancy(folder: Path = SHARED_MEMORY) -> str:
    """Return how full the folder is, its largest files, and the programs that use them."""
    disk = shutil.disk_usage(folder)
    sizes = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # it was deleted meanwhile
            if path.is_file():
                sizes[path] = path.stat().st_blocks * 512
    largest = sorted(sizes, key=lambda path: -sizes[path])[:SHOWN]
    users = users_of(largest)
    files = [
        f"{path} has {decimal(sizes[path])} ({', '.join(users[path]) or 'no program uses it'})" for path in largest
    ]
    return "; ".join([f"{folder} is too full: {decimal(disk.free)} of {decimal(disk.total)} are free", *files])


def users_of(paths: list[Path]) -> dict[Path, list[str]]:
    """Return the programs that have mapped or opened each file, of those that this user may look at."""
    users: dict[Path, list[str]] = defaultdict(list)
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error):  # it belongs to another user, or has ended
            used = {file.path for file in process.memory_maps()} | {file.path for file in process.open_files()}
            for path in paths:
                if str(path) in used:
                    users[path].append(f"{process.info['name']}, process {process.pid}")
    return users
