"""The crowd, in this process and in workers. No server runs here, so each request of the users fails at once."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import gevent
import pytest

from loadtest.compare import Comparison
from loadtest.crowd import master
from loadtest.crowd.local import LocalCrowd
from loadtest.crowd.master import MasterCrowd
from loadtest.crowd.worker import address
from loadtest.examples import Tensor
from loadtest.users import Job
from triton_transformers.settings import ROOT, Settings, UserError

EXAMPLES = [[Tensor("input_text", "BYTES", [1, 1], bytes([n]))] for n in (0, 255)]
JOB = Job("http", "http://127.0.0.1:9", "m", EXAMPLES, (0.01, 0.01), 1)


def crowd_of(workers: int) -> MasterCrowd:
    return MasterCrowd(JOB, workers, lambda _: None)


def has_ended(crowd: MasterCrowd, processes: list[subprocess.Popen]) -> bool:
    return not crowd.children and all(process.poll() is not None for process in processes)


def wait_until(condition: Callable[[], bool]) -> None:
    with gevent.Timeout(60):
        while not condition():
            gevent.sleep(0.05)


@pytest.mark.parametrize("make", [lambda: LocalCrowd(JOB), pytest.param(lambda: crowd_of(1), marks=pytest.mark.slow)])
def test_window_holds_the_samples_of_its_time(make):
    with make() as crowd:
        crowd.pause()
        crowd.resume()
        crowd.start(5, 5)
        wait_until(lambda: crowd.running == 5)
        before = time.perf_counter()
        crowd.open_window()
        gevent.sleep(1)
        wait_until(lambda: len(crowd.samples) > 50)  # a window without WINDOW ends once it has enough samples
        assert 0 < crowd.cores < 1.5
        samples = crowd.close_window()
        assert len(samples) > 50
        elapsed = time.perf_counter() - before
        assert all(0 <= sample.at < elapsed and "refused" in sample.error for sample in samples)
        assert 0 < crowd.cores < 1.5

        crowd.pause()
        crowd.open_window()
        gevent.sleep(0.5)
        assert crowd.close_window() == []

        crowd.resume()
        crowd.open_window()
        wait_until(lambda: bool(crowd.samples))
        assert crowd.close_window()


def test_workers_share_the_users_and_end_with_the_crowd(monkeypatch):
    monkeypatch.setattr(master, "END_S", 60.0)  # then even slow workers are not killed
    with crowd_of(2) as crowd:
        processes = [child.process for child in crowd.children]
        assert len(processes) == 2
        crowd.start(5, 5)
        wait_until(lambda: crowd.running == 5)
        assert [crowd.runner.clients[name].user_count for name in crowd.names] == [3, 2]
    assert has_ended(crowd, processes)
    assert [process.returncode for process in processes] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "message"), [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "left or no longer answered")]
)
def test_lost_worker_raises_an_error(number, message, monkeypatch):
    monkeypatch.setattr(master, "END_S", 0.5)  # a stopped worker does not end by itself
    crowd = crowd_of(1)
    with pytest.raises(UserError, match=message), gevent.Timeout(60), crowd:
        processes = [child.process for child in crowd.children]
        processes[0].send_signal(number)
        while True:
            crowd.check()
            gevent.sleep(0.05)
    assert has_ended(crowd, processes)


def test_worker_that_cannot_start_is_reported_with_its_exit_code(monkeypatch):
    monkeypatch.setattr(master.sys, "executable", "/bin/false")
    with pytest.raises(UserError, match=r"worker 1 of 2 ended with exit code 1"), crowd_of(2):
        pass


@pytest.fixture
def bind(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host_and_port = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("LOADTEST_BIND", host_and_port)
    return host_and_port


@pytest.fixture
def start_worker(bind, monkeypatch):
    """Return a function that starts a worker which the master did not start."""
    monkeypatch.setenv("LOADTEST_MASTER", bind)
    processes = []

    def start() -> subprocess.Popen:
        command = [sys.executable, "-m", "loadtest.crowd.worker"]
        processes.append(subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.slow
def test_master_takes_workers_started_elsewhere(start_worker):
    worker = start_worker()
    with crowd_of(1) as crowd:
        assert not crowd.children
    assert worker.wait(60) == 0


@pytest.mark.slow
def test_worker_that_leaves_raises_an_error(start_worker):
    workers = [start_worker(), start_worker()]
    with crowd_of(2) as crowd:
        workers[0].terminate()
        with pytest.raises(UserError, match="1 of 2 workers left"), gevent.Timeout(60):
            while True:
                crowd.check()
                gevent.sleep(0.05)
        assert len(crowd.runner.clients) == 1  # it reported that it left, else Locust would list it as missing
    assert [worker.wait(60) for worker in workers] == [130, 0]


@pytest.mark.slow
def test_worker_too_many_raises_an_error(start_worker):
    start_worker()
    with (
        pytest.raises(UserError, match="2 workers connected, but WORKERS=1"),
        crowd_of(1) as crowd,
        gevent.Timeout(60),
    ):
        start_worker()
        while True:
            crowd.check()
            gevent.sleep(0.05)


@pytest.mark.slow
def test_worker_ends_when_the_master_stops_answering(start_worker):
    worker = start_worker()
    with crowd_of(1) as crowd:
        crowd.runner.greenlet.kill()  # as if killed: it answers no heartbeat
        assert worker.wait(60) == 1
        assert worker.stderr.read() == "error: the comparison stopped answering, 20 s ago\n"


def test_missing_workers_raise_an_error(bind, monkeypatch):
    monkeypatch.setattr(master, "GATHER_S", 0.2)
    with pytest.raises(UserError, match="only 0 of 2 workers connected in"), crowd_of(2):
        pass


@pytest.mark.parametrize("value", ["", "5557", "host:", ":1", "host:70000", "host:x"])
def test_wrong_address_raises_an_error(monkeypatch, value):
    monkeypatch.setenv("LOADTEST_BIND", value)
    with pytest.raises(UserError, match=r"LOADTEST_BIND=.*: must be host:port"):
        address("LOADTEST_BIND")


def test_more_workers_than_users_raise_an_error():
    settings = Settings(Settings.load() | {"USERS": "3", "WORKERS": "4"})
    with pytest.raises(UserError, match="WORKERS=4: must be at most USERS, which is 3"):
        _ = Comparison(settings).workers
