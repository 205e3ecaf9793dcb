"""Read from /proc what each process of the stack uses: memory, descriptors, threads, and shared memory together."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

SHARED_MEMORY = "/dev/shm/"


@dataclass(frozen=True)
class Usage:
    """The memory, descriptors and threads of one process."""

    memory: float  # bytes
    descriptors: float
    threads: float


def usage_of(pid: int) -> Usage:
    """Return what a process uses. Raise OSError if it has ended.

    The memory is the private one, which only this process can free: without mapped files, which the kernel takes back
    as it likes, and without shared memory, which is counted once for all processes.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    lines = re.findall(r"^(RssAnon|VmSwap|Threads):\s*(\d+)", status, re.MULTILINE)
    fields = {name: int(value) for name, value in lines}
    if "RssAnon" not in fields:
        raise ProcessLookupError(f"process {pid} has ended")  # it has no memory left
    memory = (fields["RssAnon"] + fields["VmSwap"]) * 1024
    return Usage(memory, len(os.listdir(f"/proc/{pid}/fd")), fields["Threads"])


def name_of(command: list[str]) -> str:
    """Return the name of a program of the stack by its command line."""
    program = Path(command[0]).name
    if program == "triton_python_backend_stub":
        return Path(command[1]).parts[-3]  # <repository>/<model>/<version>/model.py
    if program.startswith("python"):
        script = command[2] if command[1] == "-m" else command[1]
        return "supervisord" if script == "supervisor.supervisord" else Path(script).name
    return Path(command[1]).name if program == "bash" else program


class Watch:
    """The processes of a stack. A process that ends, or that comes later, is a problem."""

    def __init__(self, processes: Callable[[], list[psutil.Process]]) -> None:
        self._processes = processes
        self._pids: dict[str, int] = {}
        for process in processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if command := process.cmdline():  # a process that has just ended has none
                    name = name_of(command)
                    self._pids[f"{name} {process.pid}" if name in self._pids else name] = process.pid
        self._regions: set[Path] = set()
        self.problems: list[str] = []

    @property
    def names(self) -> list[str]:
        return sorted(self._pids)

    def sample(self) -> dict[str, Usage]:
        """Return the usage of each process that still runs."""
        samples = {}
        for name, pid in list(self._pids.items()):
            try:
                samples[name] = usage_of(pid)
            except OSError:
                self.problems.append(f"{name} (process {pid}) ended during the soak")
                del self._pids[name]
        return samples

    def count(self) -> int:
        """Return the number of the stack's processes."""
        return len(self._processes())

    def shared_memory(self) -> int:
        """Return the bytes in /dev/shm that a process of the stack has mapped, now or before."""
        for pid in self._pids.values():
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{pid}/maps").read_text()
                self._regions |= {Path(path) for path in re.findall(rf"{SHARED_MEMORY}\S+", maps)}
        total = 0
        for region in self._regions:
            with contextlib.suppress(OSError):  # it was removed
                total += region.stat().st_blocks * 512
        return total
