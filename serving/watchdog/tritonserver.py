"""The server as the watchdog sees it: its Python processes in /proc, and its model-control API."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from serving.triton.stub_memory import stub_arguments
from triton_transformers.protocol import FIRST_CORE
from triton_transformers.triton import Triton, TritonError

POLL_S = 1.0
# The time of a load: a large model takes long.
TIMEOUT_S = 3600
# How often to try the load of a model that was unloaded first.
MAX_LOADS = 5
# The parameter in a model's configuration that counts its reloads.
RELOADS = "watchdog_reloads"
# Bytes: more than any file of /proc has that this program reads.
MAX_FILE = 65536
# Stands for a process that the kernel does not show.
ANY = 0
# Stands for the CPU ticks of a process that was stopped by a signal: it cannot be at work.
STOPPED = -2


def log(message: str) -> None:
    """Print a line. A closed pipe is no error: supervisord closes it when the server has crashed."""
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), f"watchdog: {message}\n".encode())


def read(path: str) -> str:
    """Return the text of a file of /proc. A server has hundreds of them, and Path takes six times as long."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, MAX_FILE).decode(errors="replace")
    finally:
        os.close(file)


def stubs_of(server: int) -> dict[int, list[str]]:
    """Return the command lines of the server's living Python processes, which Triton calls stubs, by their pid."""
    stubs = {}
    tasks = f"/proc/{server}/task"
    for task in os.listdir(tasks):
        try:
            children = read(f"{tasks}/{task}/children").split()
        except OSError:  # the thread has ended
            continue
        for child in children:
            if arguments := stub_arguments(int(child)):
                stubs[int(child)] = arguments
    return stubs


def models_of(stubs: Mapping[int, list[str]], instances: bool = False) -> dict[int, str]:
    """Return pid -> model. `instances`: not those that complete a configuration, which have the model's own name."""
    models = {pid: Path(arguments[1]).parts[-3] for pid, arguments in stubs.items()}
    return {pid: model for pid, model in models.items() if not instances or stubs[pid][8] != model}


class Stubs:
    """The server's Python processes as of the last search.

    One thread searches for all, because a search reads a file for each of the server's threads, which are hundreds.
    """

    def __init__(self, server: int) -> None:
        self.server = server
        self.latest: dict[int, list[str]] = {}
        self.new_search = threading.Condition()

    def search(self) -> dict[int, list[str]]:
        found = stubs_of(self.server)
        with self.new_search:
            self.latest = found
            self.new_search.notify_all()
        return found

    def wait_for_search(self) -> dict[int, list[str]]:
        """Return what the next search finds. Raise TimeoutError if it is late, so that no search counts twice."""
        with self.new_search:
            if not self.new_search.wait(2 * POLL_S):
                raise TimeoutError("no search for the server's processes in time")
            return self.latest


def stat_fields(pid: int) -> list[str]:
    """Return the fields of a living process from its state on, as in proc_pid_stat(5); empty if it has ended."""
    try:
        fields = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in "ZX" else fields


def start_time(pid: int) -> str:
    """Return when a process started, which tells it from a later one with its pid; empty if it has ended."""
    return "".join(stat_fields(pid)[19:20])


def cpu_ticks(pid: int) -> int:
    """Return how much time the process has used on a CPU; -1 if it has ended, STOPPED if it is stopped."""
    fields = stat_fields(pid)
    if not fields:
        return -1
    return STOPPED if fields[0] == "T" else int(fields[11]) + int(fields[12])


def awaited_by(server: int) -> set[int]:
    """Return the processes whose end threads of the server wait for: ANY among them if the kernel does not show which.

    The kernel hides the arguments of system calls from users who may not trace the server (Yama's ptrace_scope).
    """
    awaited = set()
    tasks = f"/proc/{server}/task"
    for task in os.listdir(tasks):
        with contextlib.suppress(OSError):  # the thread has ended
            if read(f"{tasks}/{task}/wchan") == "do_wait":
                try:
                    awaited.add(int(read(f"{tasks}/{task}/syscall").split()[1], 16))  # of wait4(pid, ...)
                except (OSError, IndexError):
                    awaited.add(ANY)
    return awaited


def client() -> Triton:
    """Return a client of this machine's server that may load models."""
    address = {"0.0.0.0": "127.0.0.1"}.get(bind := os.environ["BIND_ADDRESS"], bind)
    return Triton(f"http://{address}:{os.environ.get('TRITON_HTTP_PORT', '8000')}", os.environ["TRITON_ADMIN_KEY"])


def required_processes(triton: Triton, model: str) -> int:
    """Return how many Python processes the model runs when it is healthy; 0 if it is not loaded."""
    if model not in triton.models_in("READY"):
        return 0
    groups = triton.config(model)["instance_group"]
    return sum(group["count"] * max(1, len(group.get("gpus", []))) for group in groups)


def reload(triton: Triton, model: str) -> None:
    config = triton.config(model)
    parameters = config.setdefault("parameters", {})
    # TRITON-FAULTS.md#unchanged-loads
    count = parameters.setdefault(RELOADS, {"string_value": "0"})
    count["string_value"] = str(int(count["string_value"]) + 1)
    if FIRST_CORE in parameters:  # the model's other processes hold the cores
        with contextlib.suppress(TritonError):  # it still has requests in flight
            triton.unload(model)
        for _ in range(MAX_LOADS - 1):  # no later poll would see that the model is missing
            with contextlib.suppress(TritonError):
                return triton.load(model, config, TIMEOUT_S)
            time.sleep(POLL_S)
    triton.load(model, config, TIMEOUT_S)
