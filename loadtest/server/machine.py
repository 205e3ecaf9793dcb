"""The machine of a comparison: what it is, which CPUs a process may use, and what other programs take of it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from triton_transformers.settings import UserError


def host() -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "cores": psutil.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": _gpu(),
        "system": platform.platform(),
    }


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpu() -> str | None:
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:  # the driver hangs; a report must not fail for that
        return None
    return ", ".join(done.stdout.split("\n")).strip(", ") or None if done.returncode == 0 else None


def cpu_list(text: str) -> set[int]:
    """Return the CPUs of a list as `taskset -c` takes it: 0, 0-3, 0-6:2, 0,2."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, last, step = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part).groups()  # type: ignore[union-attr]
        cpus |= set(range(int(first), int(last or first) + 1, int(step or 1)))
    return cpus


def pin(cpus: str) -> None:
    """Restrict this process and its children to the CPUs of a `taskset -c` list; an empty list restricts nothing."""
    if not cpus:
        return
    try:
        os.sched_setaffinity(0, cpu_list(cpus))
    except (ValueError, OSError):
        raise UserError(f"LOADTEST_CPUS={cpus}: must list CPUs of this machine, as in 1 or 0-3,6") from None


# --- other programs ---------------------------------------------------------------------------------------------------

# The process whose descendants are the servers, without Docker.
STACK_PROCESS = "STACK_PROCESS"
# The ids of the stack's containers, and the folder with the control groups of all containers.
STACK_CONTAINERS, CGROUPS = "STACK_CONTAINERS", Path("/host/cgroup")
# The files with the CPU time of a control group, in version 2 and in version 1.
USAGE = ("cpu.stat", "cpuacct.usage")
# The share of the machine from which on other programs make a measurement doubtful.
BUSY_FROM = 0.1


@dataclass
class OtherPrograms:
    """Measures the cores that other programs used since the last call of open(); None if that cannot be known."""

    own_seconds: Callable[[], float | None]

    def __post_init__(self) -> None:
        self.open()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ, cgroups: Path = CGROUPS) -> OtherPrograms:
        if process := environment.get(STACK_PROCESS):
            return cls(lambda: process_seconds({os.getpid(), int(process)}))
        if containers := environment.get(STACK_CONTAINERS):
            files = usage_files(containers.split(), cgroups)
            return cls(lambda: container_seconds(files))
        return cls(lambda: None)

    def open(self) -> None:
        self.opened, self.before = time.monotonic(), self._seconds()

    def cores(self) -> float | None:
        elapsed, after = time.monotonic() - self.opened, self._seconds()
        if self.before is None or after is None or elapsed <= 0:
            return None
        return max(0.0, after - self.before) / elapsed

    def _seconds(self) -> float | None:
        own = self.own_seconds()
        if own is None:
            return None
        machine = psutil.cpu_times()
        # Interrupts belong to no process; guests are counted as user.
        return machine.user + machine.nice + machine.system + machine.steal - own


def process_seconds(roots: Iterable[int]) -> float:
    """Return the CPU time of these processes and of all their descendants, also of those that have ended."""
    processes: set[psutil.Process] = set()  # a root may descend from another one
    for root in roots:
        with suppress(psutil.Error):
            process = psutil.Process(root)
            processes |= {process, *process.children(recursive=True)}
    seconds = 0.0
    for process in processes:
        with suppress(psutil.Error):  # it has ended
            seconds += sum(process.cpu_times()[:4])  # in user and in kernel mode, and the same of its ended children
    return seconds


def usage_files(containers: list[str], cgroups: Path) -> list[Path] | None:
    """Return the file with the CPU time of each container; None if that of one is not visible."""
    found: dict[str, Path] = {}
    for folder, _, files in os.walk(cgroups):
        for container in containers:
            if container in Path(folder).name:
                paths = [Path(folder) / name for name in USAGE if name in files]
                found.update((container, path) for path in paths if has_usage(path))
    return list(found.values()) if len(found) == len(containers) else None


def has_usage(file: Path) -> bool:
    """Return whether the file has the CPU time; with version 1 of control groups a cpu.stat has none."""
    return file.name != USAGE[0] or "usage_usec" in file.read_text()


def container_seconds(files: list[Path] | None) -> float | None:
    """Return the CPU time of the containers, and of this process and its children; None if it cannot be read."""
    if files is None:
        return None
    try:
        return sum(map(usage, files)) + process_seconds({os.getpid()})
    except OSError:  # a container has ended
        return None


def usage(file: Path) -> float:
    """Return the CPU time in seconds that a control group's file has."""
    text = file.read_text()
    if file.name == USAGE[1]:
        return int(text) / 1e9
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("usage_usec")) / 1e6


def is_busy(cores: float | None, machine: int) -> bool:
    """Return whether other programs used so much of a machine of that many cores that a measurement is doubtful."""
    return cores is not None and cores > BUSY_FROM * machine
