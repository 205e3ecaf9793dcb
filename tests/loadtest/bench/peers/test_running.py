"""The comparison with other servers: starting, checking, pausing and ending them, and its table."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from dataclasses import dataclass

import numpy as np
import psutil
import pytest

from loadtest.bench.__main__ import BENCHMARKS, main
from loadtest.bench.clients import FORMS, Clients, Window, measure
from loadtest.bench.peers import generation_peers, known_peers, rotation, running
from loadtest.bench.peers.known_peers import INT8, PEERS, REQUIREMENTS, OwnPeer, Peer, Site
from loadtest.bench.peers.rotation import Row, compare, markdown, show, summary
from loadtest.bench.peers.running import started
from tests.support.peer_stand_in import vector_of
from triton_transformers.cli import one_interrupt, out
from triton_transformers.ports import free_ports
from triton_transformers.settings import UserError

CPU = str(min(os.sched_getaffinity(0)))
EXPECTED = {text: np.array(vector_of(text)) for text in ("hello", "good morning", "zebra", "a")}


def stand_in(behaviour="right"):
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "tests.support.peer_stand_in", str(port), behaviour]
    return started(command, port, "embed", CPU, {})


def assert_ended(server):
    assert server.processes == []
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections do not count
        probe.bind(("127.0.0.1", int(server.url.rpartition(":")[2])))


@dataclass(frozen=True)
class StandIn:
    """A peer whose settings are how the stand-in behaves."""

    name: str
    behaviours: tuple[str, ...]
    is_rival: bool = True

    def variants(self, cores):
        return [{"behaviour": behaviour} for behaviour in self.behaviours]

    @contextlib.contextmanager
    def serve(self, site, variant):
        with stand_in(variant["behaviour"]) as server:
            yield server


@pytest.fixture
def site(tmp_path):
    return Site((int(CPU),), tmp_path, tmp_path, tmp_path)


@pytest.fixture
def measured(monkeypatch):
    """Replace the clients; return the states of all started servers in each window."""
    servers, states = [], []

    @contextlib.contextmanager
    def recorded(*arguments):
        with running.started(*arguments) as server:
            servers.append(server)
            yield server

    def window(clients, cpus):
        running_now = [server for server in servers if server.processes]
        states.append({server.url: server.processes[0].status() for server in running_now})
        return Window(1.0, [10.0] * int(100 + clients.window_s * len(servers)))

    monkeypatch.setattr(sys.modules[__name__], "started", recorded)
    monkeypatch.setattr(rotation, "measure", window)
    return servers, states


@pytest.mark.parametrize(
    ("behaviour", "expected", "message"),
    [
        ("wrong", EXPECTED, r"wrong embedding: cosine 0\.\d+"),
        ("right", {"hello": np.ones(3)}, "wrong embedding: cosine -1"),
        ("fails", EXPECTED, "answered 500"),
        ("ends", EXPECTED, "ended with exit code 1: ValueError: the model is missing"),
    ],
)
def test_wrong_server_is_refused(behaviour, expected, message):
    with pytest.raises(UserError, match=message), stand_in(behaviour) as server:
        server.check(expected)


def test_server_that_never_answers_is_ended(monkeypatch):
    monkeypatch.setattr(running, "START_S", 0.3)
    before = set(psutil.pids())
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(UserError, match="did not start within"), started(command, 1, "embed", CPU, {}):
        pass
    sleeping = [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == command]
    assert not [process for process in sleeping if process.pid not in before]


@pytest.mark.slow
@pytest.mark.parametrize("paused", [False, True])
def test_all_processes_end_with_the_block(paused, monkeypatch):
    monkeypatch.setattr(running, "END_S", 0.3)
    with pytest.raises(ZeroDivisionError), stand_in("stubborn") as server:
        assert len(server.processes) == 2
        if paused:
            server.pause()
        raise ZeroDivisionError
    assert_ended(server)


def test_signal_ends_the_servers():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), one_interrupt(), stand_in() as server:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGINT)  # a second one while the servers end
    assert_ended(server)
    assert signal.getsignal(signal.SIGTERM) == before


def test_signal_interrupts_every_benchmark(monkeypatch):
    """Then it stops its own servers."""
    monkeypatch.setitem(BENCHMARKS, "engines", lambda: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(sys, "argv", ["bench", "engines"])
    with pytest.raises(KeyboardInterrupt):
        main()


def test_paused_server_answers_after_resume(monkeypatch):
    monkeypatch.setattr(running, "STOP_S", 60)
    with stand_in() as server:
        server.pause()
        assert {process.status() for process in server.processes} == {psutil.STATUS_STOPPED}
        server.resume()
        server.check(EXPECTED)


def test_one_server_runs_at_a_time_with_its_fastest_settings_or_has_a_reason(site, measured, monkeypatch):
    monkeypatch.setattr(running, "STOP_S", 60)
    servers, states = measured
    peers = [
        StandIn("one", ("right", "right")), StandIn("two", ("right",)), StandIn("ends", ("ends",)),
        StandIn("wrong", ("wrong",)), StandIn("half", ("ends", "right")),
    ]  # fmt: skip
    one, two, ends, wrong, half = compare(peers, site, (int(CPU),), EXPECTED)
    for row in (one, two, half):
        assert (row.problem, row.variant, len(row.windows)) == ("", {"behaviour": "right"}, rotation.ROUNDS)
    assert (ends.windows, ends.problem) == ([], "ended with exit code 1: ValueError: the model is missing")
    assert wrong.windows == [] and wrong.problem.startswith("answers with a wrong embedding")
    for window in states:
        assert list(window.values()).count(psutil.STATUS_STOPPED) == len(window) - 1
    # Both settings of `one`, then that of `half`, beside those that are paused; then all three in turn.
    assert [len(window) for window in states] == [1, 2, 3, *[3] * 3 * rotation.ROUNDS]
    for server in servers:
        assert_ended(server)


@pytest.mark.slow
def test_failed_install_is_refused_and_tried_again(tmp_path, monkeypatch):
    (tmp_path / "missing.txt").write_text("no-such-package==1\n")
    monkeypatch.setattr(known_peers, "REQUIREMENTS", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("LOCAL_STATE", str(tmp_path / "state"))
    peer = Peer("missing", "missing", ("python",), lambda cores: [{}])
    with pytest.raises(UserError, match=r"could not be installed: .*no-such-package"):
        peer.install()
    (tmp_path / "missing.txt").write_text("numpy==1.26.4\n")  # which .venv has
    venv = peer.install()
    assert venv == tmp_path / "state/peers/missing"
    marker = (venv / "installed.txt").stat().st_ctime_ns
    peer.install()
    assert (venv / "installed.txt").stat().st_ctime_ns == marker


@pytest.mark.slow
@pytest.mark.parametrize(("behaviour", "fails"), [("right", False), ("fails", True)])
def test_clients_count_responses_and_failures(behaviour, fails):
    with stand_in(behaviour) as server:
        window = measure(Clients(server.url, "embed", 4, 0.1, 4.0), CPU)
    assert (window.rate > 0, bool(window.failures)) == (not fails, fails)
    if fails:
        with pytest.raises(UserError, match="not every request of a window got its answer: 500"):
            window.check()
    else:
        assert 0 < window.check().p50_ms <= window.p95_ms


def window(rate, p50=10.0, failures=0):
    half = int(rate) // 2
    return Window(1.0, [p50] * half + [2 * p50] * (int(rate) - half), failures=["500 no"] * failures)


ROWS = [
    Row(1, "FastAPI", True, "fp32", 1.0, {"pool": 1}, [window(90.0), window(110.0, 12.0), window(100.0, 11.0)]),
    Row(1, "this project", False, "int8", 0.976, {}, [window(600.0)]),
    Row(1, "this project", False, "fp32", 1.0, {}, [window(300.0), window(250.0), window(350.0)]),
    Row(1, "mosec", True, problem="could not be installed: no matching | distribution"),
    Row(2, "FastAPI", True, "fp32", 1.0, {"pool": 2}, [window(50.0, failures=3)]),
]


def test_table_has_medians_settings_and_reasons_and_compares_with_the_fastest_other_server():
    assert markdown(ROWS).splitlines()[-5:] == [
        "| 1 | fp32 | this project | 300 (250 to 350) | 15 | 20 | 1.0000 | default |",
        "| 1 | fp32 | FastAPI | 100 (90 to 110) | 16 | 22 | 1.0000 | pool 1 |",
        "| 1 | int8 | this project | 600 (600 to 600) | 15 | 20 | 0.9760 | default |",
        "| 1 | – | mosec | – | – | – | – | could not be installed: no matching / distribution |",
        "| 2 | fp32 | FastAPI | 50 (50 to 50) | 15 | 20 | 1.0000 | pool 2; 3 requests failed, the first with: 500 no |",
    ]
    text = summary(ROWS)
    assert "make bench BENCH=peers" in text
    assert "1 core(s), fp32: this project 300 requests/s, 3.0 times the fastest other server (FastAPI, 100)" in text
    assert "int8" not in text and "2 core(s)" not in text
    with out.capture() as capture:
        show(ROWS)
    assert all(word in capture.get() for word in ("FastAPI", "mosec", "pool 1", "300 (250 to"))


@pytest.mark.parametrize(
    ("name", "variant", "precision"),
    [
        ("mosec", {"processes": 2}, "fp32"),
        ("infinity", {"engine": "torch", "dtype": "bfloat16"}, "bf16"),
        ("OpenVINO Model Server's policy", {"engine": "openvino"}, "bf16"),
    ],
)
def test_precision_follows_from_the_settings_and_the_cpu(name, variant, precision, monkeypatch):
    monkeypatch.setattr(known_peers, "runs_bf16", lambda: True)
    own, *_ = [peer for peer in PEERS if peer.name == name]
    assert own.precision(variant) == precision
    assert all(peer.precision(variant) == "int8" for peer in PEERS if isinstance(peer, Peer) and peer.format in INT8)


def test_triton_form_reads_the_tensor_after_the_header():
    vector = np.arange(384, dtype=np.float32)
    form = FORMS["triton"]
    assert (form.vector(b'{"outputs": []}' + vector.tobytes()) == vector).all()
    assert int(form.headers("é")["Inference-Header-Content-Length"]) == len(form.body("é")) - 4 - len("é".encode())


def test_packages_of_every_peer_are_pinned():
    peers = [*PEERS, *generation_peers.PEERS.values()]
    needed = {peer.packages for peer in peers if not isinstance(peer, OwnPeer)}
    assert {path.stem for path in REQUIREMENTS.iterdir()} == needed
    for path in REQUIREMENTS.iterdir():
        assert all("==" in line for line in path.read_text().splitlines()), path
