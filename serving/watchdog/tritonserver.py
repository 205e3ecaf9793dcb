"""The server as the watchdog sees it: its Python processes in /proc, and its model-control API."""

import contextlib
import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serving.triton.stub_memory import stub_arguments

POLL_S = 1.0
# The time of a load: a large model takes long.
TIMEOUT_S = 3600
# How often to try the load of a model that was unloaded first, and how many polls its unload may take.
MAX_LOADS, MAX_UNLOAD_POLLS = 5, 60
# The parameter in a model's configuration that counts its reloads.
RELOADS = "watchdog_reloads"
# The parameter of models whose accelerator cores no other process may use (AWS Neuron).
CORES = "NEURON_CORE_START_INDEX"
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


class Triton:
    """A client of the server's model-control API."""

    def __init__(self) -> None:
        address = {"0.0.0.0": "127.0.0.1"}.get(bind := os.environ["BIND_ADDRESS"], bind)
        self.url = f"http://{address}:{os.environ.get('TRITON_HTTP_PORT', '8000')}"
        # A company's proxy must not see requests to this machine.
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self.headers = {"triton-admin-key": os.environ["TRITON_ADMIN_KEY"]}

    def call(self, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=self.headers)
        with self.opener.open(request, timeout=TIMEOUT_S) as response:
            return json.loads(response.read() or "null")

    def wait_until_live(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                return self.opener.open(f"{self.url}/v2/health/live", timeout=2).close()
            time.sleep(0.2)

    def models_in(self, state: str) -> list[str]:
        return [entry["name"] for entry in self.call("/v2/repository/index", {}) if entry.get("state") == state]

    def config(self, model: str) -> dict[str, Any]:
        return self.call(f"/v2/models/{model}/config")

    def required_processes(self, model: str) -> int:
        """Return how many Python processes the model runs when it is healthy; 0 if it is not loaded."""
        if model not in self.models_in("READY"):
            return 0
        groups = self.config(model)["instance_group"]
        return sum(group["count"] * max(1, len(group.get("gpus", []))) for group in groups)

    def load(self, model: str, config: dict[str, Any] | None = None) -> None:
        parameters = {"parameters": {"config": json.dumps(config)}} if config else {}
        self.call(f"/v2/repository/models/{model}/load", parameters)

    def reload(self, model: str) -> None:
        config = self.config(model)
        parameters = config.setdefault("parameters", {})
        # docs/triton-faults.md#unchanged-loads
        count = parameters.setdefault(RELOADS, {"string_value": "0"})
        count["string_value"] = str(int(count["string_value"]) + 1)
        if CORES in parameters:  # the model's other processes hold the cores
            self.call(f"/v2/repository/models/{model}/unload", {})
            for _ in range(MAX_UNLOAD_POLLS):
                if model not in self.models_in("UNLOADING"):
                    break
                time.sleep(POLL_S)
            for _ in range(MAX_LOADS - 1):  # no later poll would see that the model is missing
                with contextlib.suppress(urllib.error.HTTPError):
                    return self.load(model, config)
                time.sleep(POLL_S)
        self.load(model, config)
