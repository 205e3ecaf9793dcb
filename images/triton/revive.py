"""Reloads a model whose Python process died. Triton answers 500 for such a model for ever, and still calls it ready.

serve.sh starts this beside tritonserver, whose child it is; it watches its siblings, the Python stubs, and ends with
their parent, taking along those that outlive it. A reload goes through the model-control API with the configuration the
model has at that moment, so an override in force (a running comparison's) stays in force. Standard library only: it
runs in every image.
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
from collections import Counter
from pathlib import Path

POLL_S = 1.0
# A model that dies again and again is reloaded ever more rarely, up to this pause.
LONGEST_PAUSE_S = 60.0
# The parameter of its configuration that counts a model's reloads.
REVIVED = "revived"
# How often a model is loaded that had to be unloaded before, and how many polls that may take.
LOADS, LONGEST_UNLOAD = 5, 60
# The parameter of models that have accelerator cores which no other process may have: AWS Neuron's.
CORES = "NEURON_CORE_START_INDEX"
# Lived this long since its last reload: the next death counts as the first again.
FORGIVEN_AFTER_S = 300.0


def stubs_of(server: int) -> dict[int, str]:
    """pid -> model of the server's living Python stubs."""
    stubs = {}
    for task in Path(f"/proc/{server}/task").iterdir():
        try:
            children = (task / "children").read_text().split()
        except OSError:  # the thread has ended
            continue
        for child in children:
            arguments = stub_arguments(int(child))
            if arguments:
                stubs[int(child)] = Path(arguments[1]).parts[-3]
    return stubs


def stub_arguments(pid: int) -> list[str]:
    """Empty if it is no living stub; else what Triton started it with:

    <stub> <repository>/<model>/<version>/model.py <shared memory region> <size> <growth> <pid of the server> ...
    """
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
    return arguments if len(arguments) > 2 and arguments[0].endswith("triton_python_backend_stub") else []


def end_orphans(server: int) -> None:
    """Stubs that outlive a killed server hold its sockets open, and clients wait on them for an answer.

    Found by the server's pid among their arguments, for one that was just being started is in no list of ours. Two
    looks, for in its first milliseconds it is still a shell.
    """
    for _ in range(2):
        for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()):
            arguments = stub_arguments(pid)
            if arguments[5:6] != [str(server)]:
                continue
            log(f"ending process {pid}, which outlived its server")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            Path("/dev/shm", arguments[2]).unlink(missing_ok=True)
        time.sleep(POLL_S)


class Triton:
    def __init__(self) -> None:
        address = {"0.0.0.0": "127.0.0.1"}.get(bind := os.environ["BIND_ADDRESS"], bind)
        self.url = f"http://{address}:{os.environ.get('TRITON_HTTP_PORT', '8000')}"
        # A company's proxy is for the world outside.
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self.headers = {"triton-admin-key": os.environ["TRITON_ADMIN_KEY"]}

    def call(self, path: str, body: object = None) -> object:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=self.headers)
        with self.opener.open(request, timeout=300) as response:
            return json.loads(response.read() or "null")

    def processes_wanted(self, model: str) -> int:
        """How many Python processes the model runs when it is well; 0 if it is not loaded."""
        index = self.call("/v2/repository/index", {})
        if not any(entry["name"] == model and entry.get("state") == "READY" for entry in index):
            return 0
        groups = self.call(f"/v2/models/{model}/config")["instance_group"]
        return sum(group["count"] * max(1, len(group.get("gpus", []))) for group in groups)

    def reload(self, model: str) -> None:
        config = self.call(f"/v2/models/{model}/config")
        # Triton reloads nothing where nothing changed since the last load, such as the reload after the last death.
        count = config.setdefault("parameters", {}).setdefault(REVIVED, {"string_value": "0"})
        count["string_value"] = str(int(count["string_value"]) + 1)
        if CORES in config["parameters"]:  # which its other processes still have
            self.unload(model)
        self.load(model, config)

    def load(self, model: str, config: dict) -> None:
        """More than once: of a model that was unloaded before, nobody else would see that it is missing."""
        for attempt in range(1, LOADS + 1):
            try:
                self.call(f"/v2/repository/models/{model}/load", {"parameters": {"config": json.dumps(config)}})
                return
            except urllib.error.HTTPError:
                if attempt == LOADS or CORES not in config["parameters"]:
                    raise
            time.sleep(POLL_S)

    def unload(self, model: str) -> None:
        self.call(f"/v2/repository/models/{model}/unload", {})
        for _ in range(LONGEST_UNLOAD):
            index = self.call("/v2/repository/index", {})
            if not any(entry["name"] == model and entry.get("state") == "UNLOADING" for entry in index):
                return
            time.sleep(POLL_S)


def log(message: str) -> None:
    """Also when whoever read our output closed it, as supervisord does when the server has died."""
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), f"revive: {message}\n".encode())


class Watch:
    """Which models lost a process, and when each may be reloaded."""

    def __init__(self, triton: Triton) -> None:
        self.triton = triton
        self.known: dict[int, str] = {}
        self.suspects: Counter[str] = Counter()  # model -> polls since it lost a process
        self.deaths: Counter[str] = Counter()
        self.reloaded: dict[str, float] = {}

    def poll(self, stubs: dict[int, str]) -> None:
        self.suspects.update({model for pid, model in self.known.items() if pid not in stubs} - self.suspects.keys())
        self.known = stubs
        for model in list(self.suspects):
            living = sum(name == model for name in stubs.values())
            if living >= self.triton.processes_wanted(model):  # it was reloaded or unloaded
                del self.suspects[model]
            elif self.suspects[model] < 2:  # an unload that is still going on looks the same: look again
                self.suspects[model] += 1
            elif time.monotonic() >= self.reloaded.get(model, 0) + self.pause(model):
                self.revive(model)

    def pause(self, model: str) -> float:
        return min(LONGEST_PAUSE_S, 2.0 ** self.deaths[model])

    def revive(self, model: str) -> None:
        if time.monotonic() - self.reloaded.get(model, 0) > FORGIVEN_AFTER_S:
            self.deaths[model] = 0
        self.deaths[model] += 1
        log(f"a process of model '{model}' died; reloading the model")
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
            log(f"Triton did not reload it: {error.read().decode(errors='replace')}")
        except (OSError, ValueError):
            pass  # not up yet, or going down: the next poll looks again
    end_orphans(server)


if __name__ == "__main__":
    main()
