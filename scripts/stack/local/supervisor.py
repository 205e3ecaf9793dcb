"""Talk to the local runtime's supervisord over its socket."""

from __future__ import annotations

import http.client
import os
import re
import subprocess
import sys
import time
import xmlrpc.client
from collections.abc import Callable
from pathlib import Path
from typing import Any

from supervisor.xmlrpc import SupervisorTransport

from scripts.common.settings import ROOT, UserError

CONF = Path(__file__).with_name("supervisord.conf")
# The kernel's limit on the path of a Unix socket.
MAX_SOCKET_PATH = 107


class Supervisor:
    """The supervisord of one state folder."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.socket = state / "run/supervisor.sock"
        self.log = state / "log/supervisord.log"

    @property
    def rpc(self) -> Any:
        # A new connection each time, because the transport keeps a failed one and never recovers.
        transport = SupervisorTransport(None, None, f"unix://{self.socket}")
        return xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport).supervisor

    def running(self) -> bool:
        try:
            return self.rpc.getState()["statename"] == "RUNNING"
        except (OSError, http.client.HTTPException, xmlrpc.client.Error):  # xmlrpc's while supervisord shuts down
            return False

    def check(self) -> None:
        # supervisord first makes a socket of a longer name, with its pid, then renames it.
        if len(f"{self.socket}.{os.getpid()}") > MAX_SOCKET_PATH:
            raise UserError(f"the path {self.socket} is too long for a socket: set LOCAL_STATE to a shorter folder")

    def start(self, environment: dict[str, str]) -> None:
        for folder in ("run", "log"):
            (self.state / folder).mkdir(parents=True, exist_ok=True)
        for old in (self.state / "log").glob("*.log*"):
            old.unlink()
        command = [sys.executable, "-m", "supervisor.supervisord", "-c", str(CONF)]
        # Only `make models` needs HF_TOKEN, and the gateway reads API_KEYS from a file.
        own = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "API_KEYS")}
        variables = {**own, **environment, "STATE": str(self.state), "ROOT": str(ROOT)}
        try:
            done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired:
            raise UserError("supervisord did not start within 60 s: the machine is too busy, try again") from None
        if done.returncode:
            raise UserError(f"supervisord did not start: {(done.stderr or done.stdout).strip()}")
        self._wait_until(self.running, "start")

    def stop(self) -> None:
        pid = self.rpc.getPID()
        self.rpc.shutdown()
        self._wait_until(lambda: not _alive(pid), "stop")

    def program(self, name: str) -> dict:
        return self.rpc.getProcessInfo(name)

    def start_program(self, name: str) -> None:
        if self.program(name)["statename"] not in ("RUNNING", "STARTING", "BACKOFF"):
            self.rpc.startProcess(name, False)

    def stop_program(self, name: str) -> None:
        if self.program(name)["statename"] in ("RUNNING", "STARTING", "BACKOFF"):
            self.rpc.stopProcess(name)

    def crashes(self, name: str) -> int:
        """Return how often supervisord restarted the program after a crash."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return len(re.findall(rf"exited: {re.escape(name)} \(.*; not expected\)", text))

    def tail(self, name: str, lines: int) -> str:
        log = self.state / f"log/{name}.log"
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""

    def _wait_until(self, done: Callable[[], bool], action: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                raise UserError(f"supervisord did not {action} within {seconds:.0f} s: its log is {self.log}")
            time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
