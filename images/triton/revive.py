"""Load the systems, and help Triton where a Python process of a model crashes or stands still.

Triton answers 500 for ever for a model whose process crashed, and still calls it ready: this program reloads the model.
Triton gives up on a process that stands still for a second, and mixes up responses if it goes on: this program keeps it
waiting. Triton makes the memory that it shares with its processes readable for every user of the machine: this program
hides it. Triton sometimes waits in vain for a process to end: this program ends it.

serve.sh starts this with the pid and the start time of tritonserver, and again if it crashes. It watches the server's
children, the Python stubs, and ends with the server, after killing stubs that outlive it. It reloads a model through
the model-control API with the configuration that is in force, so that a comparison's override stays in force. Standard
library only: it runs in every image, which has the folder `shared` of the backends, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

BACKENDS = Path(os.environ.get("TRITON_HOME", "/opt/tritonserver")) / "backends"
sys.path.append(str(BACKENDS))

from shared.stub_memory import SHARED_MEMORY, StubMemory, UnknownLayoutError, stub_arguments

POLL_S = 1.0
# The time of a load: a large model takes long.
TIMEOUT_S = 3600
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
# How often to load a system whose Python process did not report in time, and Triton's words for that.
ATTEMPTS, NOT_REPORTED = 3, ("is not healthy", "health mutex")
# Names of systems.
NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")
# The file beside SYSTEMS_FILE that lists what the server is to serve, loaded or not.
REQUESTED = "requested"
# How often to look for a change of the files of a system that did not load.
CHANGE_POLL_S = 2.0
# How often to search for a process that Triton waits for in vain. If the process goes on meanwhile, it may write into
# memory that Triton has given up, and Triton may crash: so the search is quick.
HUNG_POLL_S = 0.25
# For this many polls Triton must have waited for a process to end that does nothing, before the process is ended.
HUNG_POLLS = 6
# The same while a new process replaces one of a ready model, and the kernel does not show for which one Triton waits:
# the old one may take seconds to end on a busy machine, and the new one is idle until requests come.
REPLACED_POLLS = 40
# Stands for a process that the kernel does not show.
ANY = 0
# A process of a ready model that lived for this many polls without such a wait has finished loading.
SETTLED_POLLS = 240
# Stands for the CPU ticks of a process that was stopped by a signal: it cannot be at work.
STOPPED = -2
# The parameter of models whose accelerator cores no other process may use (AWS Neuron).
CORES = "NEURON_CORE_START_INDEX"
# How often to tell Triton that a process is alive. Triton gives up on one of which it hears nothing for a second.
ALIVE_POLL_S = 0.2
# A process may stay stopped by a signal for this many of these polls.
STOPPED_POLLS = 25
# Bytes: more than any file of /proc has that this program reads.
MAX_FILE = 65536
# The niceness of this program: on a machine that is busy with other work, a late report costs requests.
NICENESS = -10


def read(path: str) -> str:
    """Return the text of a file of /proc. A server has hundreds of them, and Path takes six times as long."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, MAX_FILE).decode(errors="replace")
    finally:
        os.close(file)


def stubs_of(server: int) -> dict[int, str]:
    """Return pid -> model of the server's living Python stubs."""
    stubs = {}
    tasks = f"/proc/{server}/task"
    for task in os.listdir(tasks):
        try:
            children = read(f"{tasks}/{task}/children").split()
        except OSError:  # the thread has ended
            continue
        for child in children:
            if arguments := stub_arguments(int(child)):
                stubs[int(child)] = Path(arguments[1]).parts[-3]
    return stubs


def instance_stubs(stubs: dict[int, str]) -> dict[int, str]:
    """Return the stubs that run an instance. The one that completes the configuration has the model's own name."""
    return {pid: model for pid, model in stubs.items() if stub_arguments(pid)[8:9] not in ([], [model])}


def stat_fields(pid: int) -> list[str]:
    """Return the fields of a living process from its state on, as in proc_pid_stat(5); empty if it has ended."""
    try:
        fields = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in "ZX" else fields


def start_time(pid: int) -> str:
    """Return when a process started, which tells it from a later one with its pid; empty if it has ended."""
    fields = stat_fields(pid)
    return fields[19] if fields else ""


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


def kill_orphans(server: int) -> None:
    """Kill the stubs of a server that has ended: they hold its sockets open, and clients would wait there for answers.

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
            (SHARED_MEMORY / arguments[2]).unlink(missing_ok=True)
        time.sleep(POLL_S)


class Region:
    """The shared memory of a Python process, which holds the tensors of requests."""

    def __init__(self, pid: int, arguments: list[str]) -> None:
        """Hide it from other users of this machine: Triton makes it readable for all of them, whatever the umask."""
        self.pid = pid
        self.path = SHARED_MEMORY / arguments[2]
        self.path.chmod(0o600)
        self.stopped_polls = 0
        self.loaded = False
        self.memory: StubMemory | None = None
        try:
            self.memory = StubMemory(arguments)
        except UnknownLayoutError as error:
            log(f"Triton may give up on process {pid} if it stands still for a second: {error}")

    def keep_alive(self) -> None:
        """Let Triton wait for the process while it exists, and continue it if it was stopped for long.

        A load may fail: Triton then keeps no request of the process, and the client may repeat the load.
        """
        fields = stat_fields(self.pid)
        if not fields or self.memory is None:
            return
        self.loaded = self.loaded or self.memory.is_loaded()
        if not self.loaded:
            return
        self.memory.report_alive()
        self.stopped_polls = self.stopped_polls + 1 if fields[0] == "T" else 0
        if self.stopped_polls >= STOPPED_POLLS:
            log(f"process {self.pid} was stopped; continuing it, because Triton waits for it")
            os.kill(self.pid, signal.SIGCONT)
            self.stopped_polls = 0

    def remove(self) -> None:
        """Remove the memory of a process that has ended. Triton leaves that of one that crashed, 64 MiB."""
        if self.memory:
            self.memory.close()
        self.path.unlink(missing_ok=True)


class Regions:
    """The shared memory of each of the server's Python processes."""

    def __init__(self) -> None:
        self.known: dict[int, Region] = {}

    def poll(self, stubs: Iterable[int]) -> None:
        """Find the memory of new processes, and remove that of processes that have ended."""
        for pid in self.known.keys() - set(stubs):
            self.known.pop(pid).remove()
        for pid in set(stubs) - self.known.keys():
            if arguments := stub_arguments(pid):
                with contextlib.suppress(OSError):  # the process has ended
                    self.known[pid] = Region(pid, arguments)

    def keep_alive(self) -> None:
        for region in list(self.known.values()):
            with contextlib.suppress(OSError, ValueError):  # the process has ended
                region.keep_alive()

    def keep_alive_until(self, end: threading.Event) -> None:
        """Report the processes as alive until the event is set."""
        while not end.wait(ALIVE_POLL_S):
            self.keep_alive()


def keep_regions(server: int, started: str) -> None:
    """Look after the memory of the server's Python processes until the server has ended.

    Use two threads: Triton gives up within a second, and the search for the processes of a busy server may take longer.
    Reloads take longer, too, so they run elsewhere.
    """
    regions, end = Regions(), threading.Event()
    threading.Thread(target=regions.keep_alive_until, args=(end,), daemon=True).start()
    while start_time(server) == started:
        with contextlib.suppress(OSError, ValueError):  # the server is starting or stopping
            regions.poll(stubs_of(server))
        time.sleep(POLL_S)
    end.set()
    regions.poll([])


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
        with self.opener.open(request, timeout=TIMEOUT_S) as response:
            return json.loads(response.read() or "null")

    def wait_until_live(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                return self.opener.open(f"{self.url}/v2/health/live", timeout=2).close()
            time.sleep(0.2)

    def required_processes(self, model: str) -> int:
        """Return how many Python processes the model runs when it is healthy; 0 if it is not loaded."""
        index = self.call("/v2/repository/index", {})
        if not any(entry["name"] == model and entry.get("state") == "READY" for entry in index):
            return 0
        groups = self.call(f"/v2/models/{model}/config")["instance_group"]
        return sum(group["count"] * max(1, len(group.get("gpus", []))) for group in groups)

    def load_system(self, system: str) -> None:
        self.call(f"/v2/repository/models/{system}/load", {})

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


class HungLoads:
    """The search for processes that Triton gave up on, but waits for.

    If a process does not answer in time while its model loads, as on a machine that stands still for seconds, Triton
    waits for it to end (StubLauncher::Launch, ~ScopedDefer, WaitForStubProcess). The process waits for Triton. So the
    load never ends, and no other load of this model begins.
    """

    def __init__(self, triton: Triton) -> None:
        self.triton = triton
        self.loaded: set[int] = set()  # the processes of models that finished loading
        self.ages: dict[int, int] = {}  # pid -> the polls in which it lived and Triton waited for no end
        self.idle: dict[int, tuple[int, int]] = {}  # pid -> its CPU ticks, and for how many polls they have not changed

    def has_loading(self, stubs: dict[int, str]) -> bool:
        """Return whether a model of these processes may still be loading."""
        self.loaded &= stubs.keys()
        return bool(stubs.keys() - self.loaded)

    def poll(self, stubs: dict[int, str], awaited: set[int], ticks: Callable[[int], int]) -> list[int]:
        """Return the processes to end. `awaited`: those whose end threads of the server wait for."""
        self.loaded &= stubs.keys()
        self.ages = {pid: self.ages.get(pid, 0) + (not awaited) for pid in stubs}
        replaced: set[int] = set()
        for model in {model for pid, model in stubs.items() if pid not in self.loaded}:
            own = {pid for pid, name in stubs.items() if name == model}
            required = self.required_processes(model)
            # A reload starts new processes beside the old ones. A model with several versions always has more.
            if required and (len(own) == required or min(self.ages[pid] for pid in own) >= SETTLED_POLLS):
                self.loaded |= own
            elif required and ANY in awaited:
                replaced |= own
        before, self.idle = self.idle, {}
        for pid in stubs.keys() - self.loaded if ANY in awaited else awaited & stubs.keys() - self.loaded:
            used, (last, polls) = ticks(pid), before.get(pid, (-1, 0))
            self.idle[pid] = (used, REPLACED_POLLS if used == STOPPED else polls + 1 if used == last else 0)
        limits = {pid: REPLACED_POLLS if pid in replaced else HUNG_POLLS for pid in self.idle}
        return sorted(pid for pid, (_, polls) in self.idle.items() if polls >= limits[pid])

    def required_processes(self, model: str) -> int:
        try:
            return self.triton.required_processes(model)
        except urllib.error.HTTPError:
            raise
        except OSError:  # with --load-model the server answers only after all loads
            return 0


def end_hung_loads(server: int, triton: Triton) -> None:
    """End each process that Triton waits for in vain. The load then fails, and the client may repeat it."""
    hung = HungLoads(triton)
    pause = POLL_S
    while True:
        time.sleep(pause)
        try:
            stubs = instance_stubs(stubs_of(server))
            if not hung.has_loading(stubs):
                # Reading the state of every thread takes milliseconds, so do it only during a load.
                pause = POLL_S
                continue
            pause = HUNG_POLL_S
            for pid in hung.poll(stubs, awaited_by(server), cpu_ticks):
                log(f"process {pid} of model '{stubs[pid]}' did not report to Triton in time; ended it")
                os.kill(pid, signal.SIGKILL)
        except (OSError, ValueError):
            pass  # the server is starting or stopping: the next poll tries again


def listed_systems(path: Path) -> list[str] | None:
    """Return the systems that a file lists; None if it is missing or damaged, as system_names.py does."""
    try:
        names = path.read_text(encoding="utf-8").split()
    except (FileNotFoundError, IsADirectoryError, UnicodeDecodeError):
        return None
    return names if all(map(NAME.fullmatch, names)) else None


def required_systems() -> list[str]:
    """Return the systems of SYSTEMS_FILE, or those of SYSTEMS without that setting.

    If the file is damaged, return those of the file beside it, which lists what the user asked for.
    """
    if not (file := os.environ.get("SYSTEMS_FILE")):
        return os.environ.get("SYSTEMS", "").split()
    lists = (listed_systems(path) for path in (Path(file), Path(file).with_name(REQUESTED)))
    return next((names for names in lists if names is not None), [])


def systems_to_load(triton: Triton) -> list[str]:
    """Return the required systems that the server lacks.

    Without SYSTEMS_FILE it loads them itself, but does not try again if a process does not report in time.
    """
    triton.wait_until_live()
    index = triton.call("/v2/repository/index", {})
    if not os.environ.get("SYSTEMS_FILE") and not any(
        text in entry.get("reason", "") for entry in index for text in NOT_REPORTED
    ):
        return []
    ready = {entry["name"] for entry in index if entry.get("state") == "READY"}
    return [system for system in required_systems() if system not in ready]


def load_systems(triton: Triton) -> bool:
    """Load the systems that the server lacks, one after the other, once it answers. Return whether it has all."""
    try:
        systems = systems_to_load(triton)
    except (OSError, ValueError) as error:
        log(f"could not find the systems to load: {error}")
        return False
    # A list: each system is tried, also after one that failed.
    return all([load_system(triton, system, f"({n} of {len(systems)})") for n, system in enumerate(systems, 1)])


def load_system(triton: Triton, system: str, progress: str) -> bool:
    """Load a system, and return whether it is loaded."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            triton.wait_until_live()
            log(f"loading system '{system}' {progress}")
            triton.load_system(system)
            log(f"system '{system}' is loaded")
            return True
        except urllib.error.HTTPError as error:
            message = error.read().decode(errors="replace")
            log(f"system '{system}' did not load: {message}")
            if attempt == ATTEMPTS or not any(text in message for text in NOT_REPORTED):
                return False
        except OSError as error:
            log(f"system '{system}' did not load: {error}")
            return False
    return False


def keep_loading(triton: Triton) -> None:
    """Load the systems. If one does not load, or their list is damaged, try again after each change of a file.

    So a config.pbtxt that is restored by hand needs no command. Without SYSTEMS_FILE, try once.
    """
    if not (file := os.environ.get("SYSTEMS_FILE")):
        load_systems(triton)
        return
    while True:
        before = versions_of_files()
        loaded = load_systems(triton)
        if damaged := listed_systems(Path(file)) is None:
            log(f"{file} is missing or damaged. `make up` writes it again")
        if loaded and not damaged:
            return
        log("waiting until a file of the systems changes")
        wait_for_change(before)


def wait_for_change(before: dict[str, tuple[int, int]]) -> None:
    """Wait until files differ from their versions before, and are no longer being written."""
    last = before
    while (now := versions_of_files()) == before or now != last:
        last = now
        time.sleep(CHANGE_POLL_S)


def versions_of_files() -> dict[str, tuple[int, int]]:
    """Return the time of the last change, and the size, of the list of systems and of the files of models."""
    repository = Path(os.environ.get("MODEL_REPOSITORY", "/models"))
    versions = {}
    for file in (Path(os.environ["SYSTEMS_FILE"]), *repository.glob("*/*"), *repository.glob("*/*/*")):
        with contextlib.suppress(OSError):  # it was deleted meanwhile
            state = file.stat()
            versions[str(file)] = state.st_mtime_ns, state.st_size
    return versions


def main() -> None:
    server, started = int(sys.argv[1]), sys.argv[2]
    with contextlib.suppress(OSError):  # only root may ask for this
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    for work, *arguments in ((keep_loading, Triton()), (end_hung_loads, server, Triton())):
        threading.Thread(target=work, args=arguments, daemon=True).start()
    # A daemon, so that it does not keep this program from ending, and from being started again, after an error below.
    keeper = threading.Thread(target=keep_regions, args=(server, started), daemon=True)
    keeper.start()
    watch = Watch(Triton())
    while start_time(server) == started:
        time.sleep(POLL_S)
        try:
            watch.poll(stubs_of(server))
        except urllib.error.HTTPError as error:
            log(f"Triton refused {error.url}: {error.read().decode(errors='replace')}")
        except (OSError, ValueError):
            pass  # the server is starting or stopping: the next poll tries again
    kill_orphans(server)
    keeper.join()


if __name__ == "__main__":
    main()
