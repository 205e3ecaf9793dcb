"""The crowd of a run with WORKERS: this process is Locust's master, others (worker.py) run the users.

The master gives orders; each worker answers each when it is carried out, and in a window sends what its users were
answered. It counts the time from when it opened the window, so the clocks of two machines need not agree.

The workers are started here, on this machine, and end with this process; unless LOADTEST_BIND (host:port) says where
workers that somebody else starts will come to, as Docker Compose does.
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
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

import gevent
from locust.exception import RPCError
from locust.runners import STATE_MISSING, MasterRunner

from loadtest.crowd.base import Crowd, Sample
from loadtest.crowd.worker import ANSWER, ORDER, SAMPLES, address
from loadtest.users import Job
from scripts.common.settings import ROOT, UserError

GATHER_S = 60.0
END_S = 3.0
PR_SET_PDEATHSIG = 1


class MasterCrowd(Crowd):
    """All users in other processes, which `progress` sees coming."""

    runner: MasterRunner | None = None

    def __init__(self, job: Job, workers: int, progress: Callable[[str], None]) -> None:
        super().__init__(job)
        self.job = job
        self.workers = workers
        self.progress = progress
        self.children: list[Child] = []
        self.names: list[str] = []  # Locust's, of the workers that are counted on
        self.answers: dict[str, dict] = {}
        self.busy: dict[str, float] = {}  # cores that each worker uses
        self.spawning: gevent.Greenlet | None = None

    def __enter__(self) -> Crowd:
        try:
            self._listen()
            self._gather()
        except BaseException:
            self.stop()
            raise
        return self

    def start(self, users: int, rate: float) -> None:
        self.spawning = gevent.spawn(self.runner.start, users, spawn_rate=rate)

    def check(self) -> None:
        for number, child in enumerate(self.children, 1):
            if ended := child.ended():
                raise UserError(f"worker {number} of {self.workers} {ended}")
        if not self.names:
            return
        here = {node.id for node in self.runner.clients.all if node.state != STATE_MISSING}
        if gone := len(set(self.names) - here):
            raise UserError(f"{gone} of {self.workers} workers left or no longer answered")
        if len(here) > self.workers:
            raise UserError(f"{len(here)} workers came, but WORKERS={self.workers}")

    def pause(self) -> None:
        self._order("pause")

    def resume(self) -> None:
        self._order("resume")

    @property
    def cores(self) -> float:
        cores = [self.meter.cores(), *self.busy.values()]
        # Workers of ours may only use the CPUs that we may, which LOADTEST_CPUS can make fewer than there are of us.
        together = sum(cores) / len(os.sched_getaffinity(0)) if self.children else 0.0
        return max(*cores, together)

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
            self.runner.quit()  # and tells the workers to
            self.runner.server.close(linger=0)
            self.runner = None
        deadline = time.monotonic() + END_S
        while self.children:
            self.children[-1].end(deadline)
            self.children.pop()

    def _listen(self) -> None:
        """Where the workers find us; those that are ours are started."""
        by_themselves = bool(os.environ.get("LOADTEST_BIND"))
        host, port = address("LOADTEST_BIND") if by_themselves else ("127.0.0.1", 0)
        try:
            self.runner = self.environment.create_master_runner(host, port)
        except RPCError as error:
            raise UserError(f"LOADTEST_BIND={host}:{port}: {error}") from None
        self.runner.register_message(ANSWER, self._on_answer)
        self.runner.register_message(SAMPLES, self._on_samples)
        if not by_themselves:
            for _ in range(self.workers):
                self.children.append(Child.start(f"{host}:{self.runner.server.port}"))

    def _gather(self) -> None:
        deadline = time.monotonic() + GATHER_S
        while len(self.answers) < self.workers:
            self.progress(f"{len(self.answers)} of {self.workers} workers are here")
            self.check()
            if time.monotonic() > deadline:
                raise UserError(f"only {len(self.answers)} of {self.workers} workers came within {GATHER_S:.0f} s")
            gevent.sleep(0.05)
        # The order in which Locust deals out the users: who gets one more than the others is always among the first.
        self.names = sorted(self.answers)
        self._order("prepare", asdict(self.job), self.names)

    def _order(self, order: str, *arguments: Any) -> dict[str, Any]:
        """What each worker answers, once all have."""
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

    def _on_answer(self, msg, **_) -> None:
        if not self.names or msg.node_id in self.names:
            self.answers[msg.node_id] = msg.data

    def _on_samples(self, msg, **_) -> None:
        if msg.node_id in self.names:  # and not of a master before us that was killed
            self._add(msg.node_id, msg.data)

    def _add(self, name: str, share: dict) -> None:
        self.meter.samples += map(Sample._make, share["samples"])
        self.busy[name] = share["cores"]


@dataclass
class Child:
    """A worker of this machine. What it says is only read if it ends early."""

    process: subprocess.Popen
    stderr: BinaryIO

    @classmethod
    def start(cls, master: str) -> Child:
        libc = ctypes.CDLL(None)
        stderr = tempfile.TemporaryFile()  # noqa: SIM115
        process = subprocess.Popen(
            [sys.executable, "-m", "loadtest.crowd.worker"],
            cwd=ROOT,
            env={**os.environ, "LOADTEST_MASTER": master},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,  # Ctrl-C is for us: workers go on until they are told
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # and end with us, even if we are killed
        )
        return cls(process, stderr)

    def ended(self) -> str:
        """How; nothing while it lives."""
        code = self.process.poll()
        if code is None:
            return ""
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        self.stderr.seek(0)
        last = self.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
        return f"ended with exit code {code}: {last}"

    def end(self, deadline: float) -> None:
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.stderr.close()
