"""Talk to the local runtime's supervisord over its socket."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import subprocess
import sys
import time
import xmlrpc.client
from pathlib import Path
from typing import Any

import psutil
from supervisor.xmlrpc import Faults, SupervisorTransport

from triton_transformers.settings import ROOT, UserError

CONF = Path(__file__).with_name("supervisord.conf")
MODULE = "supervisor.supervisord"
# supervisord answers within START_S, and ends within STOP_S: the gateway may take 65 s for the requests in flight.
START_S, STOP_S = 60, 90
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
        """Return whether supervisord runs, even if it cannot be reached because its socket was deleted."""
        return self.answers() or self.process() is not None

    def process(self) -> psutil.Process | None:
        """Return the supervisord of this state folder, without its files."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if MODULE in process.cmdline() and process.environ().get("STATE") == str(self.state):
                    found.append(process)
        # A program that supervisord is just starting looks like supervisord.
        return min(found, key=psutil.Process.create_time, default=None)

    def ports(self) -> set[int]:
        """Return the ports on which the programs of supervisord listen."""
        ports: set[int] = set()
        process = self.process()
        for program in process.children(recursive=True) if process else ():
            with contextlib.suppress(psutil.Error):
                connections = program.net_connections("tcp")
                ports |= {
                    connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN
                }
        return ports

    def answers(self) -> bool:
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
        command = [sys.executable, "-m", MODULE, "-c", str(CONF)]
        # Only `make models` needs HF_TOKEN, and the gateway reads API_KEYS from a file.
        own = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "API_KEYS")}
        variables = {**own, **environment, "STATE": str(self.state), "ROOT": str(ROOT)}
        try:
            done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=START_S)
        except subprocess.TimeoutExpired:
            raise UserError(
                f"supervisord did not start within {START_S} s: the machine is too busy, try again"
            ) from None
        if done.returncode:
            raise UserError(f"supervisord did not start: {(done.stderr or done.stdout).strip()}")
        deadline = time.monotonic() + START_S
        while not self.answers():
            if time.monotonic() > deadline:
                raise UserError(f"supervisord does not answer within {START_S} s: its log is {self.log}")
            time.sleep(0.1)

    def stop(self) -> None:
        if process := self.process():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                process.terminate()
            try:
                process.wait(STOP_S)
            except psutil.TimeoutExpired:
                raise UserError(f"supervisord did not stop within {STOP_S} s: its log is {self.log}") from None

    def program(self, name: str) -> dict:
        try:
            return self.rpc.getProcessInfo(name)
        except OSError:
            state = "the stack has just ended" if self.process() is None else f"{self.socket} was deleted"
            raise UserError(
                f"`make` cannot control the stack, because {state}: `make up` starts it again, `make down` stops it"
            ) from None

    def start_program(self, name: str) -> None:
        self.log.parent.mkdir(exist_ok=True)  # someone may have deleted it
        if self.program(name)["statename"] not in ("RUNNING", "STARTING", "BACKOFF"):
            try:
                self.rpc.startProcess(name, False)
            except xmlrpc.client.Fault as fault:
                if fault.faultCode == Faults.ALREADY_STARTED:
                    return
                raise UserError(
                    f"supervisord does not start {name} ({fault.faultString}): its log is {self.log}"
                ) from None

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
