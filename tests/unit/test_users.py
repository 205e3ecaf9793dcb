"""The users, in this process and in workers. No server runs here, so each request of the users fails at once."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import gevent
import pytest

from loadtest import worker_users
from loadtest.compare import Comparison
from loadtest.locust_users import Job
from loadtest.users import Users
from loadtest.worker import address
from loadtest.worker_users import WorkerUsers
from triton_transformers.settings import ROOT, Settings, UserError
from triton_transformers.tensors import Tensor

EXAMPLES = [[Tensor("input_text", "BYTES", [1, 1], bytes([n]))] for n in (0, 255)]
JOB = Job("http", "http://127.0.0.1:9", "m", EXAMPLES, (0.01, 0.01), 1)


def workers_of(workers: int) -> WorkerUsers:
    return WorkerUsers(JOB, workers, lambda _: None)


def has_ended(users: WorkerUsers, processes: list[subprocess.Popen]) -> bool:
    return not users.children and all(process.poll() is not None for process in processes)


def wait_until(condition: Callable[[], bool]) -> None:
    with gevent.Timeout(60):
        while not condition():
            gevent.sleep(0.05)


@pytest.mark.parametrize("make", [lambda: Users(JOB), pytest.param(lambda: workers_of(1), marks=pytest.mark.slow)])
def test_window_holds_the_samples_of_its_time(make):
    with make() as users:
        users.pause()
        users.resume()
        users.start(5, 5)
        wait_until(lambda: users.running == 5)
        before = time.perf_counter()
        users.open_window()
        gevent.sleep(1)
        wait_until(lambda: len(users.samples) > 50)  # a window without WINDOW ends once it has enough samples
        assert 0 < users.cores < 1.5
        samples = users.close_window()
        assert len(samples) > 50
        elapsed = time.perf_counter() - before
        assert all(0 <= sample.at < elapsed and "refused" in sample.error for sample in samples)
        assert 0 < users.cores < 1.5

        users.pause()
        users.open_window()
        gevent.sleep(0.5)
        assert users.close_window() == []

        users.resume()
        users.open_window()
        wait_until(lambda: bool(users.samples))
        assert users.close_window()


def test_workers_share_the_users_and_end_with_the_command(monkeypatch):
    monkeypatch.setattr(worker_users, "END_S", 60.0)  # then even slow workers are not killed
    with workers_of(2) as users:
        processes = [child.process for child in users.children]
        assert len(processes) == 2
        users.start(5, 5)
        wait_until(lambda: users.running == 5)
        assert [users.runner.clients[name].user_count for name in users.names] == [3, 2]
    assert has_ended(users, processes)
    assert [process.returncode for process in processes] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "message"), [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "left or no longer answered")]
)
def test_lost_worker_raises_an_error(number, message, monkeypatch):
    monkeypatch.setattr(worker_users, "END_S", 0.5)  # a stopped worker does not end by itself
    users = workers_of(1)
    with pytest.raises(UserError, match=message), gevent.Timeout(60), users:
        processes = [child.process for child in users.children]
        processes[0].send_signal(number)
        while True:
            users.check()
            gevent.sleep(0.05)
    assert has_ended(users, processes)


def test_worker_that_cannot_start_is_reported_with_its_exit_code(monkeypatch):
    monkeypatch.setattr(worker_users.sys, "executable", "/bin/false")
    with pytest.raises(UserError, match=r"worker 1 of 2 ended with exit code 1"), workers_of(2):
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
        command = [sys.executable, "-m", "loadtest.worker"]
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
    with workers_of(1) as users:
        assert not users.children
    assert worker.wait(60) == 0


@pytest.mark.slow
def test_worker_that_leaves_raises_an_error(start_worker):
    workers = [start_worker(), start_worker()]
    with workers_of(2) as users:
        workers[0].terminate()
        with pytest.raises(UserError, match="1 of 2 workers left"), gevent.Timeout(60):
            while True:
                users.check()
                gevent.sleep(0.05)
        assert len(users.runner.clients) == 1  # it reported that it left, else Locust would list it as missing
    assert [worker.wait(60) for worker in workers] == [130, 0]


@pytest.mark.slow
def test_worker_too_many_raises_an_error(start_worker):
    start_worker()
    with (
        pytest.raises(UserError, match="2 workers connected, but WORKERS=1"),
        workers_of(1) as users,
        gevent.Timeout(60),
    ):
        start_worker()
        while True:
            users.check()
            gevent.sleep(0.05)


@pytest.mark.slow
def test_worker_ends_when_the_master_stops_answering(start_worker):
    worker = start_worker()
    with workers_of(1) as users:
        users.runner.greenlet.kill()  # as if killed: it answers no heartbeat
        assert worker.wait(60) == 1
        assert worker.stderr.read() == "error: the comparison stopped answering, 20 s ago\n"


def test_missing_workers_raise_an_error(bind, monkeypatch):
    monkeypatch.setattr(worker_users, "GATHER_S", 0.2)
    with pytest.raises(UserError, match="only 0 of 2 workers connected in"), workers_of(2):
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
