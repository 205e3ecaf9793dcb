"""Reads how much memory Triton's container or machine has and how much is in use; checks that a model fits."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from serving.triton.types import ConfigError

# The weights, and a tenth for the library itself and what a batch stores.
HEADROOM = 1.1


def memory(cgroups: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> tuple[int, int]:
    """Return (used, limit) in bytes, without page cache: the limited control group's, or the machine's."""
    total, available = (_field(proc / "meminfo", name) * 1024 for name in ("MemTotal:", "MemAvailable:"))
    for folder, used, limit, inactive in (
        (cgroups, "memory.current", "memory.max", "inactive_file"),
        (cgroups / "memory", "memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file"),
    ):
        try:
            maximum = int((folder / limit).read_text())  # fails on "max", which means no limit
            if maximum < total:
                return int((folder / used).read_text()) - _field(folder / "memory.stat", inactive), maximum
        except (OSError, ValueError):
            continue
    return total - available, total


def process_memory(pid: int | str = "self") -> int:
    """Return a process's own memory in bytes, without what it shares with others, such as mapped files."""
    _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def one_load_at_a_time() -> Iterator[None]:
    """Wait until no other process loads a model, so that each check sees the memory that the model before has taken."""
    with open(__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def check_it_fits(name: str, needed: float, free: int) -> None:
    if needed > free:
        raise ConfigError(
            f"{name} takes about {needed / 1e9:.1f} GB and {max(0, free) / 1e9:.1f} GB of memory are free here: "
            "unload another model, give Triton more memory, or set the parameter 'dtype' to a smaller type"
        )


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(f"{name} "):
            return int(line.split()[1])
    raise ValueError(f"{path} has no {name}")
