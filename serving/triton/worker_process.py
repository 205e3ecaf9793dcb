"""A process for work that can neither be stopped nor limited inside this one: it may end, and only one request fails.

The parent sends a line of JSON, and the process answers with one. Both ends are in this module.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from serving.triton.types import BadRequest

# A line may take this many times its CPU time: a process that hangs ends, and one that waits for a CPU does not.
WAITING = 6


class WorkerEnded(RuntimeError):
    """Raised when a request took more than a worker may use, which ends the worker."""


def start_module(module: str, inherited: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start a process that runs a module and inherits these files."""
    # Inside Triton, sys.executable is no interpreter.
    version = "{}.{}".format(*sys.version_info)
    interpreter = shutil.which(f"python{version}") or shutil.which("python3") or sys.executable
    return subprocess.Popen(
        [interpreter, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # libraries' warnings quote the request
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        pass_fds=inherited,
    )


class WorkerProcess:
    """Runs a module. The process ends when this object or this process does."""

    def __init__(self, module: str, seconds: float, inherited: Sequence[int] = ()) -> None:
        """Take the CPU seconds that one line may cost, for messages, and the files that the process inherits."""
        self.seconds, self.process = seconds, start_module(module, inherited)

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def ask(self, line: str) -> dict[str, Any]:
        """Return the answer. Raise BadRequest with the error that it names, or WorkerEnded with the limit."""
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
            reply = self.process.stdout.readline()
        except BrokenPipeError:
            reply = b""
        if not reply:
            late = self.process.wait() in (-signal.SIGPROF, -signal.SIGALRM)
            raise WorkerEnded(f"more than {self.seconds} s" if late else "too much memory")
        answer: dict[str, Any] = json.loads(reply)
        if error := answer.get("error"):
            raise BadRequest(error)
        return answer


def serve_lines(answer: Callable[[dict[str, Any]], dict[str, Any]], seconds: float, memory_bytes: int) -> None:
    """Answer each line of the standard input, inside the process, with this much CPU time and additional memory."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory_bytes, used + memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("{}", flush=True)
    for line in sys.stdin:
        limit_time(seconds)
        reply = json.dumps(answer(json.loads(line)))
        limit_time(0)
        print(reply, flush=True)


def limit_time(seconds: float) -> None:
    """Let a signal end this process after these seconds of CPU time, or too long a wait. Zero: no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WAITING * seconds)
