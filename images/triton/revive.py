"""Reload a model whose Python process crashed. Triton answers 500 for such a model for ever, and still calls it ready.

serve.sh starts this as a child of tritonserver. It watches the server's other children, the Python stubs, and ends with
the server, after killing stubs that outlive it. It reloads a model through the model-control API with the
configuration that is in force, so that a comparison's override stays in force. Standard library only: it runs in every
image.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

POLL_S = 1.0
# An unload looks like a crash until it is done, so this many polls must agree before a reload.
POLLS = 2
# A model that crashes again and again is reloaded less and less often, up to this pause.
MAX_PAUSE_S = 60.0
# A model that lived this long since its last reload starts again with the shortest pause.
FORGIVEN_AFTER_S = 300.0
# The parameter in a model's configuration that counts its reloads.
REVIVED = "revived"
# How often to try the load of a model that was unloaded first, and how many polls its unload may take.
MAX_LOADS, MAX_UNLOAD_POLLS = 5, 60
# The parameter of models whose accelerator cores no other process may use (AWS Neuron).
CORES = "NEURON_CORE_START_INDEX"


def stubs_of(server: int) -> dict[int, str]:
    """Return pid -> model of the server's living Python stubs."""
    stubs = {}
    for task in Path(f"/proc/{server}/task").iterdir():
        try:
            children = (task / "children").read_text().split()
        except OSError:  # the thread has ended
            continue
        for child in children:
            if arguments := stub_arguments(int(child)):
                stubs[int(child)] = Path(arguments[1]).parts[-3]
    return stubs


def stub_arguments(pid: int) -> list[str]:
    """Return the command line of a living stub, or an empty list for any other process.

    Triton starts a stub as
    <stub> <repository>/<model>/<version>/model.py <shared memory region> <size> <growth> <pid of the server> ...
    """
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
    return arguments if len(arguments) > 2 and arguments[0].endswith("triton_python_backend_stub") else []


def kill_orphans(server: int) -> None:
    """Kill the stubs of a dead server: they hold its sockets open, and clients would wait on them for an answer.

    Search all processes for the server's pid, because a stub that was just starting is in no list yet. Search twice,
    because a stub is a shell for its first milliseconds.
    """
    for _ in range(2):
        for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()):
            arguments = stub_arguments(pid)
            if arguments[5:6] != [str(server)]:
                continue
            log(f"killing process {pid}, which outlived its server")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            Path("/dev/shm", arguments[2]).unlink(missing_ok=True)
        time.sleep(POLL_S)


class Triton:
    """A client of the server's model-control API."""

    def __init__(self) -> None:
        address = {"0.0.0.0": "127.0.0.1"}.get(bind := os.environ["BIND_ADDRESS"], bind)
        self.url = f"http://{address}:{os.environ.get('TRITON_HTTP_PORT', '8000')}"
        # A company's proxy must not see requests to this machine.
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self.headers = {"triton-admin-key": os.environ["TRITON_ADMIN_KEY"]}

    def call(self, path: str, body: object = None) -> object:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=self.headers)
        with self.opener.open(request, timeout=300) as response:
            return json.loads(response.read() or "null")

    def required_processes(self, model: str) -> int:
        """Return how many Python processes the model runs when it is healthy; 0 if it is not loaded."""
        index = self.call("/v2/repository/index", {})
        if not any(entry["name"] == model and entry.get("state") == "READY" for entry in index):
            return 0
        groups = self.call(f"/v2/models/{model}/config")["instance_group"]
        return sum(group["count"] * max(1, len(group.get("gpus", []))) for group in groups)

    def reload(self, model: str) -> None:
        config = self.call(f"/v2/models/{model}/config")
        # Triton ignores a load that changes nothing, as this one would after an earlier crash.
        count = config.setdefault("parameters", {}).setdefault(REVIVED, {"string_value": "0"})
        count["string_value"] = str(int(count["string_value"]) + 1)
        if CORES in config["parameters"]:  # which the model's other processes still hold
            self.unload(model)
        self.load(model, config)

    def load(self, model: str, config: dict) -> None:
        """Load the model; retry if this process unloaded it, because the watcher does not see that it is missing."""
        for attempt in range(1, MAX_LOADS + 1):
            try:
                self.call(f"/v2/repository/models/{model}/load", {"parameters": {"config": json.dumps(config)}})
                return
            except urllib.error.HTTPError:
                if attempt == MAX_LOADS or CORES not in config["parameters"]:
                    raise
            time.sleep(POLL_S)

    def unload(self, model: str) -> None:
        self.call(f"/v2/repository/models/{model}/unload", {})
        for _ in range(MAX_UNLOAD_POLLS):
            index = self.call("/v2/repository/index", {})
            if not any(entry["name"] == model and entry.get("state") == "UNLOADING" for entry in index):
                return
            time.sleep(POLL_S)


def log(message: str) -> None:
    """Print a line. A closed pipe is no error: supervisord closes it when the server has crashed."""
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), f"revive: {message}\n".encode())


@dataclass
class Suspect:
    """A model that lost a process: the processes that it had left then, and the polls since then that found no more."""

    survivors: set[int]
    polls: int = 0


class Watch:
    """The models that lost a process, and when each may be reloaded."""

    def __init__(self, triton: Triton) -> None:
        self.triton = triton
        self.known: dict[int, str] = {}
        self.suspects: dict[str, Suspect] = {}
        self.crashes: dict[str, int] = {}
        self.reloaded: dict[str, float] = {}

    def poll(self, stubs: dict[int, str]) -> None:
        """Compare the living stubs with those of the last poll; reload models that stay short of processes.

        A process that is younger than the loss means that another client loads the model. A reload now would wait in
        Triton for that load to end and then undo it, because it carries the configuration from before.
        """
        living: dict[str, set[int]] = {model: set() for model in self.suspects.keys() | {*self.known.values()}}
        for pid, model in stubs.items():
            living.setdefault(model, set()).add(pid)
        for model in {model for pid, model in self.known.items() if pid not in stubs}:
            # Only those of the last poll: a load may have started a process since.
            self.suspects[model] = Suspect(living[model] & self.known.keys())
        self.known = stubs
        for model, suspect in list(self.suspects.items()):
            if len(living[model]) >= self.triton.required_processes(model):  # it was reloaded or unloaded
                del self.suspects[model]
            elif living[model] <= suspect.survivors:
                suspect.polls += 1
                if suspect.polls > POLLS and time.monotonic() >= self.reloaded.get(model, 0) + self.pause(model):
                    self.revive(model)

    def pause(self, model: str) -> float:
        return min(MAX_PAUSE_S, 2.0 ** self.crashes.get(model, 0))

    def revive(self, model: str) -> None:
        if time.monotonic() - self.reloaded.get(model, 0) > FORGIVEN_AFTER_S:
            self.crashes[model] = 0
        self.crashes[model] = self.crashes.get(model, 0) + 1
        log(f"a process of model '{model}' crashed; reloading the model")
        try:
            self.triton.reload(model)
            log(f"model '{model}' is back")
        finally:
            self.reloaded[model] = time.monotonic()


def main() -> None:
    server = os.getppid()
    watch = Watch(Triton())
    while os.getppid() == server:
        time.sleep(POLL_S)
        try:
            watch.poll(stubs_of(server))
        except urllib.error.HTTPError as error:
            log(f"Triton refused {error.url}: {error.read().decode(errors='replace')}")
        except (OSError, ValueError):
            pass  # the server is starting or stopping: the next poll tries again
    kill_orphans(server)


if __name__ == "__main__":
    main()
