"""The users, in this process and in workers. Without a server, each request of theirs fails at once."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import gevent
import pytest

from loadtest.compare.compare import Comparison
from loadtest.load import worker_users
from loadtest.load.locust_users import Job
from loadtest.load.users import Users
from loadtest.load.worker import address
from loadtest.load.worker_users import WorkerUsers
from loadtest.overload.overload import Overload
from tests.support.certificates import save_certificate
from tests.support.http_servers import replying, response
from triton_transformers.settings import ROOT, Settings, UserError
from triton_transformers.tensors import Tensor

EXAMPLES = [[Tensor("input_text", "BYTES", [1, 1], bytes([n]))] for n in (0, 255)]
JOB = Job("http", "http://127.0.0.1:9", "m", EXAMPLES, (0.01, 0.01), 1)


def workers_of(workers: int) -> WorkerUsers:
    return WorkerUsers(JOB, workers, lambda _: None)


def has_ended(users: WorkerUsers, processes: list[subprocess.Popen]) -> bool:
    return not users.children and all(process.poll() is not None for process in processes)


def wait_until(condition: Callable[[], object]) -> None:
    with gevent.Timeout(60):
        while not condition():
            gevent.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "message"), [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "left or no longer answered")]
)
def test_lost_worker_raises_an_error(number, message, monkeypatch):
    monkeypatch.setattr(worker_users, "END_S", 0.5)  # a stopped worker does not end by itself
    users = workers_of(1)
    with pytest.raises(UserError, match=message), users:
        processes = list(users.children)
        processes[0].send_signal(number)
        users.runner.clients[users.names[0]].heartbeat = 0  # as if it had missed all of them but one
        wait_until(users.check)
    assert has_ended(users, processes)


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
        processes = list(users.children)
        assert len(processes) == 2
        users.start(5, 5)
        wait_until(lambda: users.running == 5)
        assert [users.runner.clients[name].user_count for name in users.names] == [3, 2]
    assert has_ended(users, processes)
    assert [process.returncode for process in processes] == [0, 0]


def test_worker_that_cannot_start_is_reported_with_its_exit_code(monkeypatch):
    monkeypatch.setattr(worker_users.sys, "executable", "/bin/false")
    with pytest.raises(UserError, match=r"worker [12] of 2 ended with exit code 1"), workers_of(2):
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

    def start(master_lost_s: float = 20.0) -> subprocess.Popen:
        code = f"from loadtest.load import worker; worker.MASTER_LOST_S = {master_lost_s}; worker.run(worker.main)"
        command = [sys.executable, "-c", code]
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
def test_worker_ends_when_the_master_stops_answering(start_worker):
    worker = start_worker(master_lost_s=5.0)
    with workers_of(1) as users:
        users.runner.greenlet.kill()  # as if killed: it answers no heartbeat
        assert worker.wait(60) == 1
        assert worker.stderr.read() == "error: the comparison stopped answering, 5 s ago\n"


def test_missing_workers_raise_an_error(bind, monkeypatch):
    monkeypatch.setattr(worker_users, "GATHER_S", 0.2)
    with pytest.raises(UserError, match="only 0 of 2 workers connected in"), workers_of(2):
        pass
    for value in ("", "5557", "host:", ":1", "host:70000", "host:x"):
        monkeypatch.setenv("LOADTEST_BIND", value)
        with pytest.raises(UserError, match=rf"LOADTEST_BIND={value}: must be host:port"):
            address("LOADTEST_BIND")
    settings = Settings.load().replace(USERS="3", WORKERS="4")
    with pytest.raises(UserError, match="WORKERS=4: must be at most USERS, which is 3"):
        _ = Comparison(settings).workers


@pytest.mark.slow
def test_worker_that_leaves_or_comes_in_addition_raises_an_error(start_worker):
    workers = [start_worker(), start_worker()]
    with workers_of(2) as users:
        workers[0].terminate()
        with pytest.raises(UserError, match="1 of 2 workers left"):
            wait_until(users.check)
        assert len(users.runner.clients) == 1  # it reported that it left, else Locust would list it as missing
        users.names = [name for name in users.names if name in users.runner.clients]
        users.workers = 1
        start_worker()
        with pytest.raises(UserError, match="2 workers connected, but WORKERS=1"):
            wait_until(users.check)
    assert [worker.wait(60) for worker in workers] == [130, 0]


def chunk(event: str) -> bytes:
    data = f"data: {event}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def test_streamed_texts_have_the_times_of_their_tokens():
    """The first token comes after 0.2 s, and the two later ones in another 0.2 s."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    token = chunk('{"choices": [{"text": "a"}], "usage": null}')
    usage = chunk('{"choices": [], "usage": {"completion_tokens": 3}}')

    class Slowly(list):
        def __iter__(self) -> Iterator[bytes]:
            for delay, part in super().__iter__():
                time.sleep(delay)
                yield part

    parts = Slowly([(0.2, head + token), (0.1, token), (0.1, token + usage + chunk("[DONE]")), (0.0, b"0\r\n\r\n")])
    prompt = [Tensor("prompt", "BYTES", [1], b"\1\0\0\0a"), Tensor("max_new_tokens", "INT32", [1], b"\3\0\0\0")]
    with replying([parts] * 50) as server:
        job = replace(JOB, protocol="openai", requests=[prompt], url=f"http://{server.address}", kind="generation")
        with Users(job) as users:
            users.open_window()
            users.start(1, 1)
            wait_until(lambda: len(users.samples) > 1)
    for sample in users.samples[:2]:
        assert sample.error == ""
        assert 200 <= sample.first_token_ms < 390 <= sample.latency_ms
        assert 90 <= sample.output_token_ms < 190


def test_single_request_over_tls_lets_other_users_run(tmp_path):
    """The server answers only while another greenlet of this process runs."""
    other_runs = threading.Event()

    def replies() -> Iterator[list[bytes]]:
        other_runs.wait(60)
        yield [response("200 OK", b'{"data": [1]}')]

    with replying(replies(), save_certificate(tmp_path)) as server:
        text = Tensor("input_text", "BYTES", [1, 1], b"\1\0\0\0a")
        job = replace(JOB, requests=[[text]], url=f"https://{server.address}", timeout_s=30, kind="embedding")
        other = gevent.spawn_later(0.1, other_runs.set)
        comparison: Any = SimpleNamespace(closed=SimpleNamespace(job=job))
        assert Overload.ask(comparison) is not None
        other.join()
