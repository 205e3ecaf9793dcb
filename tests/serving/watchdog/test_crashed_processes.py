"""When the watchdog reloads a model or ends a process, seen from its polls of the server's Python processes."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from serving.watchdog import crashed_processes, endless_loads, memory_regions, missing_systems, tritonserver
from tests.support.model_control import ControlledModels
from triton_transformers.files import write_atomically
from triton_transformers.settings import ROOT
from triton_transformers.tasks.kinds import listed_names
from triton_transformers.triton import TritonError


class StandIn:
    """A Triton whose model "m" needs two processes."""

    def __init__(self):
        self.required = 2
        self.reloads = 0

    def models_in(self, state):
        return ["m"] if self.required else []

    def config(self, model):
        return {"instance_group": [{"count": self.required}]}

    def load(self, model, config, timeout):
        self.reloads += 1


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    for module in (crashed_processes, missing_systems, memory_regions):
        monkeypatch.setattr(module, "log", lambda message: None)


@pytest.fixture
def triton():
    return StandIn()


# Sets of living processes in the order of the polls, and the reloads that these cause. The model needs two processes.
POLLS = {
    "one process crashed": ([{1, 2}, {1}, {1}, {1}], 1),
    "the loss must last": ([{1, 2}, {1}, {1}], 0),
    "no second reload after the first": ([{1, 2}, {1}, {1}, {1}, {1, 3}, {3, 4}, {3, 4}], 1),
    "all processes crashed": ([{1, 2}, set(), set(), set()], 1),
    # Process 3 completes the configuration, 4 and 5 are the new instances.
    "another client loads the model": ([{1, 2}, set(), {3}, {3}, {3}, {3}, {4}, {4, 5}, {4, 5}], 0),
    "the load began with the crash": ([{1, 2}, {3}, {3}, {3}, {3}, {3}, {4}, {4, 5}, {4, 5}], 0),
    "the other client's load failed": ([{1, 2}, {1}, {1, 3}, {1, 3}, {1}, {1}, {1}], 1),
    "a new process crashed": ([{1, 2}, set(), {3}, {4, 5}, {5}, {5}, {5}], 1),
    "the processes were replaced": ([{1, 2}, {1, 2, 3}, {1, 2, 4, 5}, {2, 4, 5}, {4, 5}, {4, 5}, {4, 5}], 0),
}


@pytest.mark.parametrize(("polls", "reloads"), POLLS.values(), ids=POLLS)
def test_model_is_reloaded_once_if_it_stays_short_of_processes(triton, polls, reloads):
    crashes = crashed_processes.Crashes(triton)
    for pids in polls:
        crashes.poll(dict.fromkeys(pids, "m"))
    assert triton.reloads == reloads


def test_unload_causes_no_reload(triton):
    crashes = crashed_processes.Crashes(triton)
    for required, pids in ((2, {1, 2}), (2, {1}), *[(0, set())] * 4):
        triton.required = required
        crashes.poll(dict.fromkeys(pids, "m"))
    assert triton.reloads == 0


@pytest.fixture
def child():
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


# --- the memory of processes ------------------------------------------------------------------------------------------


class Memory:
    """Counts the reports to Triton that the process lives. A process "other" has memory of another release."""

    def __init__(self, arguments):
        if arguments[1] == "other":
            raise memory_regions.UnknownLayoutError("another layout")
        self.reports = 0
        self.loaded = True

    def is_loaded(self):
        return self.loaded

    def report_alive(self):
        self.reports += 1

    def close(self):
        pass


def command_lines(*pids: int) -> dict[int, list[str]]:
    return {pid: ["stub", "model.py", f"region_{pid}"] for pid in pids}


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """Return the folder of the memory of processes."""
    monkeypatch.setattr(memory_regions, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(memory_regions, "StubMemory", Memory)
    for name in ("region_1", "region_2", "region_3", "another"):
        (tmp_path / name).touch(0o644)
    return tmp_path


def test_shared_memory_of_an_ended_process_is_removed(memory):
    regions = memory_regions.Regions()
    regions.poll(command_lines(1, 2))
    regions.poll(command_lines(2, 3, 4))  # 4 has ended
    assert {path.name for path in memory.iterdir()} == {"region_2", "region_3", "another"}
    regions.poll({})
    assert {path.name for path in memory.iterdir()} == {"another"}


def test_shared_memory_is_hidden_from_other_users(memory):
    memory_regions.Regions().poll(command_lines(1, 2))
    modes = {path.name: path.stat().st_mode & 0o777 for path in memory.iterdir()}
    assert modes == {"region_1": 0o600, "region_2": 0o600, "region_3": 0o644, "another": 0o644}


def test_slow_search_does_not_delay_reports(memory, child, monkeypatch):
    regions, search_began, release = memory_regions.Regions(), threading.Event(), threading.Event()
    (memory / "region_0").touch()
    monkeypatch.setattr(memory_regions, "ALIVE_POLL_S", 0.01)
    monkeypatch.setattr(memory_regions, "Regions", lambda: regions)

    def search(server: int) -> dict[int, list[str]]:
        if regions.known:
            search_began.set()
            release.wait(20)
        return {child.pid: ["stub", "model.py", "region_0"]}

    monkeypatch.setattr(tritonserver, "stubs_of", search)
    monkeypatch.setattr(memory_regions, "POLL_S", 0.01)
    stubs = tritonserver.Stubs(child.pid)
    keeper = threading.Thread(target=memory_regions.keep_regions, args=(stubs, tritonserver.start_time(child.pid)))
    keeper.start()
    assert search_began.wait(20)
    region = regions.known[child.pid]
    deadline = time.monotonic() + 20
    while region.memory.reports < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert region.memory.reports >= 5
    child.kill()
    child.wait()
    release.set()
    keeper.join(20)
    assert not keeper.is_alive() and not regions.known


def test_search_leaves_out_other_programs_and_processes_that_complete_a_configuration(child, tmp_path):
    script = tmp_path / "m/1/model.py"
    script.parent.mkdir(parents=True)
    script.write_text("read\n")
    stub_line = f"/python/triton_python_backend_stub {script} region_1 64 64 {os.getpid()} python ipc"
    ends = {}
    with contextlib.ExitStack() as running:
        for name in ("m", "m_0"):
            stub = subprocess.Popen([*stub_line.split(), name], executable="/bin/bash", stdin=subprocess.PIPE)
            ends[running.enter_context(stub).pid] = name
        deadline = time.monotonic() + 60
        # The kernel's list of children may leave one out for a moment.
        while (found := tritonserver.stubs_of(os.getpid())).keys() < ends.keys():
            assert time.monotonic() < deadline
        assert child.pid not in found
        assert {pid: arguments[8] for pid, arguments in found.items()} == ends
    assert tritonserver.models_of(found) == dict.fromkeys(ends, "m")
    assert tritonserver.models_of(found, instances=True) == {pid: "m" for pid, name in ends.items() if name == "m_0"}


def test_no_search_counts_twice(monkeypatch):
    monkeypatch.setattr(tritonserver, "POLL_S", 0.01)
    with pytest.raises(TimeoutError):
        tritonserver.Stubs(7).wait_for_search()


def test_search_wakes_the_thread_that_waits_for_it(monkeypatch):
    monkeypatch.setattr(tritonserver, "POLL_S", 1000)
    monkeypatch.setattr(tritonserver, "stubs_of", lambda server: command_lines(server))
    stubs, received = tritonserver.Stubs(7), []
    waiting = threading.Thread(target=lambda: received.append(stubs.wait_for_search()))
    waiting.start()
    while waiting.is_alive():
        stubs.search()
    assert received == [command_lines(7)]


@pytest.fixture
def region(memory, child):
    (memory / "region_0").touch()
    return memory_regions.Region(child.pid, ["stub", "model.py", "region_0"])


def test_triton_hears_of_a_process_until_it_ends(region, child):
    region.keep_alive()
    assert region.memory.reports == 1
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays in /proc until its parent has its exit code
    region.keep_alive()
    child.wait()
    region.keep_alive()
    assert region.memory.reports == 1


def test_triton_may_give_up_on_a_process_that_loads_its_model(region):
    region.memory.loaded = False
    region.keep_alive()
    assert region.memory.reports == 0
    region.memory.loaded = True
    region.keep_alive()
    region.memory.loaded = False  # the queue starts again at its beginning
    region.keep_alive()
    assert region.memory.reports == 2


def test_memory_of_an_unknown_layout_is_left_alone(memory, child):
    (memory / "region_0").touch()
    region = memory_regions.Region(child.pid, ["stub", "other", "region_0"])
    region.keep_alive()
    region.remove()
    assert not (memory / "region_0").exists()


def test_stopped_process_is_kept_alive_and_then_continued(region, child):
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    for _ in range(memory_regions.STOPPED_POLLS - 1):
        region.keep_alive()
    assert tritonserver.cpu_ticks(child.pid) == tritonserver.STOPPED
    region.keep_alive()
    os.waitid(os.P_PID, child.pid, os.WCONTINUED)
    assert region.memory.reports == memory_regions.STOPPED_POLLS


def test_stops_of_a_process_are_counted_apart(region, child):
    for _ in range(2):
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        for _ in range(memory_regions.STOPPED_POLLS - 1):
            region.keep_alive()
        assert tritonserver.cpu_ticks(child.pid) == tritonserver.STOPPED
        child.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, child.pid, os.WCONTINUED)
        region.keep_alive()


# --- processes that Triton waits for in vain --------------------------------------------------------------------------

HUNG = endless_loads.HUNG_POLLS + 1


@pytest.fixture
def hung(triton):
    """Return a function that polls `times` with these stubs, and returns the processes to end after the last poll."""
    search = endless_loads.HungLoads(triton)
    seconds = iter(range(10**6))

    def ticks(pid, busy, stopped, gone):
        return tritonserver.STOPPED if pid in stopped else next(seconds) if pid in busy else -1 if pid in gone else 7

    def run(stubs, times=HUNG, awaited=(tritonserver.ANY,), busy=(), stopped=(), gone=()):
        for _ in range(times):
            ended = search.poll(stubs, {*awaited}, lambda pid: ticks(pid, busy, stopped, gone))
        return ended

    return run


FIRST, RELOAD = {1: "m"}, {1: "m", 2: "m", 3: "m"}  # of a reload, processes 1 and 2 serve the model meanwhile
SERVING = {1: "m", 2: "m"}
BOTH = dict.fromkeys(range(4), "m")
# The processes that the model needs (0: it is not ready), and for each row of polls what is seen and which are ended.
LOADS = {
    "idle": (0, [(FIRST, {"times": HUNG - 1}, []), (FIRST, {"times": 1}, [1])]),
    # It would go on in memory that Triton has given up.
    "stopped": (0, [(FIRST, {"times": 1, "stopped": {1}}, [1]), (FIRST, {"awaited": (), "stopped": {1}}, [])]),
    "busy": (0, [(FIRST, {"busy": {1}}, [])]),
    # The search for processes is up to a second old.
    "has ended": (0, [(FIRST, {"gone": {1}}, [])]),
    "not awaited": (0, [(FIRST, {"awaited": ()}, [])]),
    "loaded": (2, [(SERVING, {}, [])]),
    "reload": (2, [(SERVING, {"times": 1}, []), (RELOAD, {"awaited": {3}}, [3])]),
    # The old processes take long to end, and the new one is idle until requests come.
    "old ones awaited": (2, [(SERVING, {"times": 1}, []), (RELOAD, {"times": 100, "awaited": {1, 2}}, [])]),
    "kernel does not show": (
        2,
        [
            (SERVING, {"times": 1}, []),
            (RELOAD, {"times": endless_loads.REPLACED_POLLS}, []),
            (RELOAD, {"times": 1}, [3]),
        ],
    ),
    # The model needs two processes for each version, and Triton reports those of one.
    "several versions": (2, [(BOTH, {"times": endless_loads.SETTLED_POLLS, "awaited": ()}, []), (BOTH, {}, [])]),
    "pause": (
        0,
        [(FIRST, {"times": HUNG - 1}, []), (FIRST, {"times": 1, "busy": {1}}, []), (FIRST, {"times": HUNG - 1}, [])],
    ),
}


@pytest.mark.parametrize(("required", "polls"), LOADS.values(), ids=LOADS)
def test_only_processes_that_triton_waits_for_in_vain_are_ended(hung, triton, required, polls):
    triton.required = required
    for stubs, seen, ended in polls:
        assert hung(stubs, **seen) == ended


def test_wait_for_a_process_is_seen_in_a_thread(child):
    assert not tritonserver.awaited_by(os.getpid())
    thread = threading.Thread(target=child.wait)
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while not (awaited := tritonserver.awaited_by(os.getpid())):
            assert time.monotonic() < deadline
        assert awaited <= {child.pid, tritonserver.ANY}
    finally:
        child.kill()
        thread.join()
    assert tritonserver.cpu_ticks(os.getpid()) > 0


def test_stop_and_end_of_a_process_are_seen(child):
    """An ended process stays in /proc until its parent has asked for its exit code."""
    started = tritonserver.start_time(child.pid)
    assert started and tritonserver.start_time(os.getpid()) != started
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert tritonserver.cpu_ticks(child.pid) == tritonserver.STOPPED
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert (tritonserver.start_time(child.pid), tritonserver.cpu_ticks(child.pid)) == ("", -1)
    child.wait()
    assert (tritonserver.start_time(child.pid), tritonserver.cpu_ticks(child.pid)) == ("", -1)


# --- systems that the server had before a crash -----------------------------------------------------------------------


@pytest.fixture
def listed(tmp_path, monkeypatch):
    """Return the file that lists the systems "spam" and "ham", whose models are in the repository."""
    (tmp_path / "models/spam").mkdir(parents=True)
    file = tmp_path / "systems"
    file.write_text("spam\nham\n")
    monkeypatch.setenv("SYSTEMS_FILE", str(file))
    monkeypatch.setenv("MODEL_REPOSITORY", str(tmp_path / "models"))
    return file


@pytest.fixture
def load(listed):
    """Return a function that loads the listed systems, and returns the loads that Triton saw."""

    def run(*messages):
        triton = ControlledModels(spam=[TritonError(message, 400) for message in messages])
        assert missing_systems.load_systems(triton) is (not messages or "not healthy" in messages[0])
        return triton.loads

    return run


@pytest.mark.parametrize(("messages", "loads"), [
    ([], ["spam", "ham"]),
    (["Stub process 'spam_0_0' is not healthy."], ["spam", "spam", "ham"]),
    (["bad config"], ["spam", "ham"]),
])  # fmt: skip
def test_listed_systems_are_loaded_and_a_hung_one_again(load, messages, loads):
    assert load(*messages) == loads


@pytest.mark.parametrize(
    ("reason", "loads"),
    [("Stub process 'spam_0_0' is not healthy.", ["spam"]), ("unexpected datatype", []), ("unloaded", [])],
)
def test_systems_that_the_server_loads_itself_are_loaded_again_if_a_process_did_not_report(monkeypatch, reason, loads):
    monkeypatch.delenv("SYSTEMS_FILE", raising=False)
    monkeypatch.setenv("SYSTEMS", "spam ham")
    triton = ControlledModels()
    triton.states = {"ham": ("READY", ""), "spam_encoder": ("UNAVAILABLE", reason)}
    missing_systems.load_systems(triton)
    assert triton.loads == loads


LISTS = {b"": [], b"spam\nham\n": ["spam", "ham"], b"egg": ["egg"]}
DAMAGED = (b"\0\0\0\0", b"\xfe\xff", b"<html>\n", b"../models\n", None)


@pytest.mark.parametrize("content", [*LISTS, *DAMAGED])
def test_damaged_list_is_no_list(listed, content):
    listed.unlink()
    if content is not None:
        listed.write_bytes(content)
    assert listed_names(listed) == LISTS.get(content)


def test_requested_systems_are_loaded_while_the_list_is_damaged(listed, load):
    listed.write_bytes(b"\xff\xff")
    listed.with_name("requested").write_text("egg\n")
    assert load() == ["egg"]


def test_loaded_systems_are_not_loaded_again(listed):
    triton = ControlledModels()
    triton.states = {"spam": ("READY", ""), "ham": ("UNAVAILABLE", "bad config")}
    assert missing_systems.load_systems(triton)
    assert triton.loads == ["ham"]


@pytest.fixture
def watched(listed, monkeypatch):
    """Return a Triton that refuses one load, and the thread that tries again after a change."""
    monkeypatch.setattr(missing_systems, "CHANGE_POLL_S", 0.01)
    refused, waiting = ControlledModels(spam=[TritonError("failed to poll", 400)]), threading.Event()
    monkeypatch.setattr(
        missing_systems, "log", lambda message: waiting.set() if message.startswith("waiting") else None
    )
    thread = threading.Thread(target=missing_systems.keep_loading, args=(refused,), daemon=True)
    yield refused, thread, waiting
    thread.join(60)
    assert not thread.is_alive()


def test_system_that_did_not_load_is_loaded_again_after_a_change_of_its_files(watched, tmp_path):
    triton, thread, waiting = watched
    thread.start()
    assert waiting.wait(60)
    assert triton.loads == ["spam", "ham"]
    triton.states = {"ham": ("READY", "")}
    (tmp_path / "models/spam/config.pbtxt").write_text("restored")
    thread.join(60)
    assert triton.loads == ["spam", "ham", "spam"]


def test_list_that_was_damaged_is_read_again_after_its_repair(watched, listed):
    triton, thread, waiting = watched
    triton.failures.clear()
    listed.write_bytes(b"\0" * 9)
    thread.start()
    assert waiting.wait(60)
    assert triton.loads == []
    write_atomically(listed, "ham\n")
    thread.join(60)
    assert triton.loads == ["ham"]


# --- the program ------------------------------------------------------------------------------------------------------

# Replaces parts of the program that need a server, then runs it.
PROGRAM = """
import sys
from serving.watchdog import __main__ as program
program.POLL_S, program.keep_loading = 0.01, lambda triton: None
{changes}
program.main()
"""


def run_program(pid: int, started: str, changes: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM.format(changes=changes), str(pid), started]
    environment = {"BIND_ADDRESS": "127.0.0.1", "TRITON_ADMIN_KEY": "key", "TRITON_HOME": str(ROOT / "images/triton")}
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60)


def test_program_ends_after_an_unknown_error_so_that_it_is_started_again(child):
    ended = run_program(
        child.pid, tritonserver.start_time(child.pid), "program.Crashes.poll = lambda crashes, stubs: 1 / 0"
    )
    assert ended.returncode == 1
    assert "ZeroDivisionError" in ended.stderr


def test_program_ends_if_its_search_does(child):
    started = tritonserver.start_time(child.pid)
    ended = run_program(child.pid, started, "program.Stubs.search = lambda stubs: 1 / 0")
    assert ended.returncode == 1
    assert "the search for the server's processes ended" in ended.stderr


def test_program_ends_with_the_server_that_it_was_started_for(child):
    assert run_program(child.pid, "1").returncode == 0  # another process has its pid now
    started = tritonserver.start_time(child.pid)
    child.kill()
    child.wait()
    assert run_program(child.pid, started).returncode == 0
