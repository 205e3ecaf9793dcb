"""The CPU time that other programs took from a measurement."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from loadtest.server import machine
from loadtest.server.machine import STACK_CONTAINERS, STACK_PROCESS, OtherPrograms, is_busy, process_seconds

# It ends by itself, if this test is killed.
LOOP = "import time; end = time.time() + 60\nwhile time.time() < end: pass"
ONE, TWO = "a" * 64, "b" * 64


def process(proc, pid: int, parent: int, *ticks: int) -> None:
    (proc / str(pid)).mkdir(exist_ok=True)
    (proc / f"{pid}/stat").write_text(
        f"{pid} (a name) with)) S {parent} {' 0' * 9} {' '.join(map(str, ticks))}{' 0' * 40}"
    )


def clock_ticks(proc, user: int, steal: int = 0) -> None:
    (proc / "stat").write_text(f"cpu  {user} 0 0 999 999 50 50 {steal} 0 0\ncpu0 1 1\nbtime 1\n")


@pytest.fixture
def clock(monkeypatch):
    """Let two seconds pass between any two readings of the clock."""
    seconds = iter(range(0, 1000, 2))
    monkeypatch.setattr(machine.time, "monotonic", lambda: next(seconds))


def ticks(seconds: float) -> int:
    return round(seconds * os.sysconf("SC_CLK_TCK"))


@pytest.fixture
def proc(tmp_path, monkeypatch):
    folder = tmp_path / "proc"
    folder.mkdir()
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(folder))
    clock_ticks(folder, 0)
    return folder


def test_processes_count_with_their_descendants_and_those_that_ended(proc):
    process(proc, 10, 1, ticks(1), ticks(2), ticks(3), ticks(4))
    process(proc, 11, 10, ticks(5), 0, 0, 0)
    process(proc, 12, 11, ticks(6), 0, 0, 0)
    process(proc, 13, 1, ticks(100), 0, 0, 0)
    assert process_seconds({10}) == pytest.approx(21)
    assert process_seconds({11, 13}) == pytest.approx(111)
    assert process_seconds({99}) == 0


def test_others_are_what_the_stack_and_the_load_generator_did_not_use(proc, clock):
    own = os.getpid()
    process(proc, own, 1, 0, 0, 0, 0)
    process(proc, 10, 1, 0, 0, 0, 0)
    others = OtherPrograms.from_environment({STACK_PROCESS: "10"})
    process(proc, own, 1, ticks(0.5), 0, 0, 0)
    process(proc, 10, 1, 0, ticks(1.5), 0, 0)
    clock_ticks(proc, ticks(3), steal=ticks(1))
    assert others.cores() == pytest.approx((3 + 1 - 2) / 2)
    others.open()
    assert others.cores() == 0


@pytest.mark.parametrize("version", [1, 2])
def test_containers_count_by_their_control_groups(proc, tmp_path, clock, version):
    cgroups = tmp_path / "cgroup"

    def use(container: str, seconds: float) -> None:
        folders = [cgroups / f"system.slice/docker-{container}.scope"]
        if version == 1:
            folders = [cgroups / name / "docker" / container for name in ("cpu", "cpuacct")]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        if version == 1:
            (folders[0] / "cpu.stat").write_text("nr_periods 0\n")
            (folders[1] / "cpuacct.usage").write_text(f"{seconds * 1e9:.0f}\n")
        else:
            (folders[0] / "cpu.stat").write_text(f"usage_usec {seconds * 1e6:.0f}\nuser_usec 1\n")

    for container in (ONE, TWO, "c" * 64):  # the last one is another project's
        use(container, 5)
    process(proc, os.getpid(), 1, 0, 0, 0, 0)
    others = OtherPrograms.from_environment({STACK_CONTAINERS: f"{ONE} {TWO}"}, cgroups)
    use(ONE, 6)
    use("c" * 64, 7)
    process(proc, os.getpid(), 1, ticks(0.5), 0, 0, 0)
    clock_ticks(proc, ticks(3.5))
    assert others.cores() == pytest.approx(1)


def test_nothing_is_known_of_a_stack_that_is_not_visible(proc, tmp_path):
    assert OtherPrograms.from_environment({}).cores() is None
    assert OtherPrograms.from_environment({STACK_CONTAINERS: ONE}, tmp_path / "none").cores() is None
    assert not is_busy(None, 2)


def test_busy_loop_beside_the_measurement_is_seen():
    """Run a busy loop whose parent has ended, so it is no descendant of this process."""
    start = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {LOOP!r}], stdout=2).pid)"
    start_s = time.monotonic()
    others = OtherPrograms.from_environment({STACK_PROCESS: str(os.getpid())})
    loop = int(subprocess.run([sys.executable, "-c", start], stdout=subprocess.PIPE, check=True).stdout)
    try:
        while (others.cores() or 0) * (time.monotonic() - start_s) < 0.4:
            assert psutil.pid_exists(loop)  # which ends by itself after a minute
            time.sleep(0.05)
    finally:
        os.kill(loop, signal.SIGKILL)
