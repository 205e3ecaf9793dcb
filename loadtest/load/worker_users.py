"""The users with WORKERS: this process is Locust's master, and worker processes (worker.py) run the users.

The master sends orders. Each worker confirms an order once it has carried it out, and during a window it sends the
samples of its users. A worker counts time from when it opened the window, so the clocks of two machines may differ.

The master starts the workers on this machine, and they end with it. If LOADTEST_BIND (host:port) is set, the master
listens there instead, for workers that others start, such as Docker Compose.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Self

import gevent
from locust import runners
from locust.exception import RPCError
from locust.runners import STATE_MISSING

from loadtest.load.arrivals import Sample
from loadtest.load.locust_users import Job
from loadtest.load.users import Users
from loadtest.load.worker import ANSWER, ORDER, SAMPLES, address
from triton_transformers.settings import ROOT, UserError

GATHER_S = 180.0
# A worker sends a heartbeat every second. On a busy machine it misses some, and at three Locust would count it as lost.
runners.HEARTBEAT_LIVENESS = 20
END_S = 3.0
PR_SET_PDEATHSIG = 1


class WorkerUsers(Users):
    """All users in other processes; `progress` is called while they connect."""

    def __init__(self, job: Job, workers: int, progress: Callable[[str], None]) -> None:
        super().__init__(job)
        self.workers = workers
        self.progress = progress
        self.children: list[Child] = []
        self.names: list[str] = []  # Locust's names of the workers, once all have connected
        self.answers: dict[str, Any] = {}
        self.cores_of: dict[str, float] = {}  # by worker
        self.spawning: gevent.Greenlet | None = None

    def create_runner(self) -> None:
        """Leave that to _listen()."""

    def __enter__(self) -> Self:
        try:
            self._listen()
            self._gather()
        except BaseException:
            self.stop()
            raise
        return self

    @property
    def cores(self) -> float:
        cores = [self.meter.cores(), *self.cores_of.values()]
        # Children share this process' CPUs, and LOADTEST_CPUS may leave them fewer than there are processes.
        share = sum(cores) / len(os.sched_getaffinity(0)) if self.children else 0.0
        return max(*cores, share)

    def start(self, users: int, rate: float) -> None:
        self.spawning = gevent.spawn(self.runner.start, users, spawn_rate=rate)

    def check(self) -> None:
        for number, child in enumerate(self.children, 1):
            if ended := child.ended():
                raise UserError(f"worker {number} of {self.workers} {ended}")
        if not self.names:
            return
        connected = {node.id for node in self.runner.clients.all if node.state != STATE_MISSING}
        if missing := len(set(self.names) - connected):
            raise UserError(f"{missing} of {self.workers} workers left or no longer answered")
        if len(connected) > self.workers:
            raise UserError(f"{len(connected)} workers connected, but WORKERS={self.workers}: start as many as that")

    def pause(self) -> None:
        self._order("pause")

    def resume(self) -> None:
        self._order("resume")

    def set_rate(self, rate: float, pattern: int = 0) -> None:
        self._order("set_rate", rate, pattern)

    def open_window(self) -> None:
        self.meter.open()
        self._order("open_window")

    def close_window(self) -> list[Sample]:
        for name, share in self._order("close_window").items():
            self._add(name, share)
        return self.meter.samples

    def stop(self) -> None:
        if self.spawning:
            self.spawning.kill()
        if self.runner:
            self.runner.quit()  # which makes the workers quit
            self.runner.server.close(linger=0)
            self.runner = None
        deadline = time.monotonic() + END_S
        while self.children:
            self.children[-1].end(deadline)
            self.children.pop()

    def _listen(self) -> None:
        """Listen for workers, and start them unless LOADTEST_BIND is set."""
        started_elsewhere = bool(os.environ.get("LOADTEST_BIND"))
        host, port = address("LOADTEST_BIND") if started_elsewhere else ("127.0.0.1", 0)
        try:
            self.runner = self.environment.create_master_runner(host, port)
        except RPCError as error:
            raise UserError(f"LOADTEST_BIND={host}:{port}: {error}") from None
        self.runner.register_message(ANSWER, self._on_answer)
        self.runner.register_message(SAMPLES, self._on_samples)
        if not started_elsewhere:
            for _ in range(self.workers):
                self.children.append(Child(f"{host}:{self.runner.server.port}"))

    def _gather(self) -> None:
        deadline = time.monotonic() + GATHER_S
        while len(self.answers) < self.workers:
            self.progress(f"{len(self.answers)} of {self.workers} workers connected")
            self.check()
            if time.monotonic() > deadline:
                raise UserError(
                    f"only {len(self.answers)} of {self.workers} workers connected in {GATHER_S:.0f} s: "
                    "start the others, or set fewer WORKERS"
                )
            gevent.sleep(0.05)
        # Sorted as Locust deals out users: where the shares differ by one, the first workers get the larger ones.
        self.names = sorted(self.answers)
        self._order("prepare", asdict(self.traffic.job), self.names)

    def _order(self, order: str, *arguments: Any) -> dict[str, Any]:
        """Send an order, wait until all workers have carried it out, and return their results by name."""
        self.check()
        self.answers = {}
        for name in self.names:
            self.runner.send_message(ORDER, {"order": order, "arguments": arguments}, client_id=name)
        while len(self.answers) < self.workers:
            self.check()
            gevent.sleep(0.01)
        for answer in self.answers.values():
            if "error" in answer:
                raise UserError(answer["error"])
        return {name: answer["result"] for name, answer in self.answers.items()}

    def _on_answer(self, msg: Any, **_: Any) -> None:
        if not self.names or msg.node_id in self.names:
            self.answers[msg.node_id] = msg.data

    def _on_samples(self, msg: Any, **_: Any) -> None:
        if msg.node_id in self.names:  # workers of an earlier master that was killed may still send theirs
            self._add(msg.node_id, msg.data)

    def _add(self, name: str, share: dict[str, Any]) -> None:
        self.meter.samples += map(Sample._make, share["samples"])
        self.cores_of[name] = share["cores"]


class Child(subprocess.Popen[bytes]):
    """A worker that this process starts. Its stderr is read only if it ends early."""

    def __init__(self, master: str) -> None:
        libc = ctypes.CDLL(None)
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        super().__init__(
            [sys.executable, "-m", "loadtest.load.worker"],
            cwd=ROOT,
            env={**os.environ, "LOADTEST_MASTER": master},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.log,
            start_new_session=True,  # Ctrl-C reaches the master alone, which then ends its workers
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # the kernel kills it with the master
        )

    def ended(self) -> str:
        """Return how the worker ended, or nothing while it runs."""
        code = self.poll()
        if code is None:
            return ""
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        self.log.seek(0)
        last = self.log.read().decode(errors="replace").strip().rpartition("\n")[2]
        return f"ended with exit code {code}: {last}"

    def end(self, deadline: float) -> None:
        try:
            self.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            self.wait()
        self.log.close()
