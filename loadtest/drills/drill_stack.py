"""The stack that the drills break: ports, folders and models of its own, and what a drill does to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil

from loadtest.drills.clients import Clients
from loadtest.server.machine import OtherPrograms, process_seconds
from loadtest.server.own_stack import Make, OwnStack, with_names
from scripts.stack.local.supervisor import Supervisor
from triton_transformers.http import answers as is_up
from triton_transformers.load import KnownVectors
from triton_transformers.settings import Settings, UserError
from triton_transformers.triton import TritonError

Value = TypeVar("Value")

SYSTEM = ("embedding", "tokenizer", "encoder")
# A comparison that ends in half a minute. Its ratio proves nothing.
SHORT = {"MODES": "none dynamic", "ROUNDS": "3", "WINDOW": "2", "WARMUP": "1", "USERS": "8"}
COMMAND_S = 240
STATE_BYTES = 512 << 20


class NotRunError(Exception):
    """The reason why a drill cannot run on this machine."""


class BrokenError(Exception):
    """A command or a program did something that it should not do."""


class DrillStack(OwnStack):
    """A stack under a folder of its own. Use as a context manager: its end stops the stack and removes the folder."""

    def __init__(self, repository: Path, state: Path) -> None:
        folder = Path(tempfile.mkdtemp(prefix="drill-"))
        super().__init__(folder, SYSTEMS="embedding", TRITON_ADMIN_KEY=secrets.token_hex(8))
        self.variables = with_names(self.variables) | {"TRITON_SETTINGS_FILE": f"{folder}/.env"}
        for name in SYSTEM:
            shutil.copytree(repository / name, self.models / name)
        self.state.mkdir()
        self.has_small_state = self._mount(self.state, STATE_BYTES)
        if (state / "debian").is_dir():  # Debian's Prometheus, which `make up` has unpacked before
            (self.state / "debian").symlink_to(state / "debian")
        self.supervisor = Supervisor(self.state)
        self.fault_at: float | None = None
        self.printed: list[str] = []
        # One loop for all questions. gRPC hands its events to any loop of the process, and fails at those of a closed
        # loop: the ends of requests that were cancelled with their channel.
        self.runner = asyncio.Runner()

    def clients(self, keep: bool = False) -> Clients:
        return Clients(self.port("GATEWAY_PORT"), self.port("TRITON_HTTP_PORT"), self.port("TRITON_GRPC_PORT"), keep)

    # --- commands ---------------------------------------------------------------------------------------------------

    def environment(self, **settings: str) -> dict[str, str]:
        own = {name: value for name, value in self.variables.items() if not name.startswith(("MAKE", "MFLAGS"))}
        return with_names(own | settings)

    def start_make(self, target: str, **settings: str) -> Make:
        return Make(target, self.environment(**settings))

    def make(self, target: str, **settings: str) -> str:
        """Run a command that must succeed."""
        code, text = self.run(target, **settings)
        if code:
            raise BrokenError(f"`make {target}` ended with {code}: {text[-300:]}")
        return text

    def refused(self, target: str, **settings: str) -> None:
        """Run a command that must fail, without a traceback."""
        code, text = self.run(target, **settings)
        if not code or "Traceback" in text:
            raise BrokenError(f"`make {target}` ended with {code}: {text[-300:]}")

    def run(self, target: str, **settings: str) -> tuple[int, str]:
        """Run a command, and return its exit code and what it printed."""
        with self.start_make(target, **settings) as process:
            try:
                text = self.printed_by(process, COMMAND_S)
            except subprocess.TimeoutExpired:
                process.end(signal.SIGKILL, COMMAND_S)
                raise BrokenError(f"`make {target}` did not end within {COMMAND_S} s") from None
        return process.returncode, text

    def printed_by(self, process: Make, timeout: float | None = None) -> str:
        """Wait until a command ends, and return what it printed."""
        text = process.communicate(timeout=timeout)[0]
        self.printed.append(text)
        return text

    def listen(self) -> None:
        """Forget what was printed and logged until now."""
        self.printed, self.logged = [], len(self.log())

    def log(self) -> str:
        return (self.state / "log/triton.log").read_text(errors="replace")

    def said(self) -> str:
        """Return what commands printed and Triton logged since listen()."""
        return "".join([self.log()[self.logged :], *self.printed])

    # --- processes --------------------------------------------------------------------------------------------------

    def program(self, name: str) -> psutil.Process:
        """Return the process of a program of supervisord, or supervisord's own."""
        if name == "supervisord":
            return psutil.Process(self.supervisor.rpc.getPID())
        if name not in [info["name"] for info in self.supervisor.rpc.getAllProcessInfo() if info["pid"]]:
            raise NotRunError(f"{name} does not run here")
        return psutil.Process(self.supervisor.program(name)["pid"])

    def stub(self, model: str) -> psutil.Process:
        """Return the Python process of a model that has one instance. After a reload the old one may linger."""
        path = f"{self.models}/{model}/"

        def only() -> psutil.Process | None:
            own = [p for p in self.processes(f"backend_stub {path}") if p.cmdline()[0].endswith("_backend_stub")]
            return own[0] if len(own) == 1 else None

        process = self.until(only, f"exactly one process of {model}")
        assert process
        return process

    def processes(self, text: str = "") -> list[psutil.Process]:
        """Return the living processes of this stack whose command line has this text."""
        own = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if text in line and str(self.folder) in " ".join([line, *process.environ().values()]):
                    own.append(process)
        return own

    def other_programs(self) -> OtherPrograms:
        """Begin to measure what other programs than the stack and its clients use."""
        return OtherPrograms(lambda: process_seconds([os.getpid(), self.supervisor.rpc.getPID()]))

    def pause(self, process: psutil.Process, seconds: float = 3.0) -> None:
        """Stop a process for some seconds."""
        process.suspend()
        try:
            time.sleep(seconds)
        finally:
            process.resume()

    def mark(self) -> None:
        """Count the recovery from now on, and not from the end of the drill's function."""
        self.fault_at = time.monotonic()

    # --- health -----------------------------------------------------------------------------------------------------

    def until(self, condition: Callable[[], Value], description: str, seconds: float = 60) -> Value:
        """Wait until the condition is true, and return its value."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise BrokenError(f"waited {seconds:g} s for {description}")
            time.sleep(0.1)
        return value

    def learn(self) -> None:
        """Learn the right answers from the stack, which nothing disturbs yet."""

        async def ask() -> KnownVectors:
            async with contextlib.aclosing(self.clients()) as clients:
                return await clients.learn()

        self.known = self.runner.run(ask())
        self.until(self.is_whole, "right answers on every route")

    def is_whole(self) -> bool:
        """Return whether every program runs and every route gives a right answer."""

        async def ask() -> bool:
            async with contextlib.aclosing(self.clients()) as clients:
                return await clients.are_answered(self.known, timeout=3)

        if not self.supervisor.answers():
            return False
        programs = [info for info in self.supervisor.rpc.getAllProcessInfo() if info["statename"] != "STOPPED"]
        running = {info["name"] for info in programs if info["statename"] in ("RUNNING", "STARTING")}
        if not {"gateway", "triton"} <= running or len(running) < len(programs):
            return False
        if "prometheus" in running and not is_up(self.url("PROMETHEUS_PORT") + "/-/ready"):
            return False
        return self.runner.run(ask())

    def reload_s(self) -> float:
        """Return how long the models take to load while they serve no requests, as after a crash."""
        start = time.monotonic()
        for model in SYSTEM[1:]:
            config = self.triton.config(model)
            # TRITON-FAULTS.md#unchanged-loads
            config.setdefault("parameters", {})["measured"] = {"string_value": secrets.token_hex(4)}
            self.triton.load(model, config)
        return time.monotonic() - start

    def settle(self) -> None:
        """Wait until the stack is as after `make up`: whole, with the original models and nothing that still loads."""
        with contextlib.suppress(TritonError, BrokenError):
            self.until(self.is_whole, "a whole stack", 20)
            if set(self.triton.index()) == set(SYSTEM):
                return
        self.restart()

    def restart(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.resume()
        with contextlib.suppress(BrokenError):
            self.make("down")
        self.kill_all()
        self.make("up")
        self.until(self.is_whole, "a whole stack")

    def kill_all(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()

    # --- folders ----------------------------------------------------------------------------------------------------

    def _mount(self, folder: Path, size: int) -> bool:
        """Mount a file system of this size in memory; return whether that is allowed here."""
        folder.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "drill", str(folder)]
        try:
            return subprocess.run(command, capture_output=True).returncode == 0
        except FileNotFoundError:
            return False

    @contextlib.contextmanager
    def small_disk(self, name: str, size: int) -> Iterator[Path]:
        """Yield a folder on a file system of this size."""
        folder = self.folder / name
        if not self._mount(folder, size):
            raise NotRunError("only root may mount a small file system")
        try:
            yield folder
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)

    def __enter__(self) -> DrillStack:
        try:
            self.make("up")
            self.learn()
        except BaseException as error:
            self.__exit__()
            if isinstance(error, BrokenError | ValueError | OSError):
                raise UserError(f"the drills' own stack does not start: {error}") from None
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.close()
        with contextlib.suppress(BrokenError):
            self.make("down")
        self.kill_all()
        if self.has_small_state:
            subprocess.run(["umount", "--lazy", self.state], check=True)
        shutil.rmtree(self.folder)


def repository_of(settings: Settings) -> Path:
    """Return the model repository that has the embedding system."""
    repository = settings.model_repository
    if not (repository / "encoder/1/model.onnx").exists():
        raise UserError(f"{repository} lacks the system 'embedding': run make models SYSTEMS=embedding")
    return repository
