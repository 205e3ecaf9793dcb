"""A server that was started for the comparison. It and all its processes are one session of the kernel."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from loadtest.bench.clients import FORMS, RequestForm
from loadtest.bench.embedder import LARGE_PAGES
from triton_transformers.answers import LIMITS, smallest_cosine
from triton_transformers.http import opener
from triton_transformers.settings import ROOT, UserError

START_S = 900.0  # on a busy machine, vLLM on one core takes more than 5 minutes
ANSWER_S = 30.0
STOP_S = 5.0
END_S = 5.0
# Programs that would report their use to their makers, or look for a newer model on the Hub.
QUIET = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "INFINITY_ANONYMOUS_USAGE_STATS": "0",
    "ORT_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@dataclass(frozen=True)
class Running:
    """A server's address and the process that leads its session."""

    url: str
    form: str
    leader: int
    precision: str = ""  # fp32, bf16 or int8

    @property
    def processes(self) -> list[psutil.Process]:
        """Return all its processes, also those whose parent has ended."""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(process.pid) == self.leader and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
        return processes

    def pause(self) -> None:
        """Take the CPU from its processes until resume(), so that they do not disturb the others' measurement."""
        self._send(signal.SIGSTOP)
        deadline = time.monotonic() + STOP_S
        while self._any_runs() and time.monotonic() < deadline:  # on a busy machine, a process stops a moment later
            time.sleep(0.005)

    def resume(self) -> None:
        self._send(signal.SIGCONT)

    def check(self, expected: dict[str, Any]) -> float:
        """Return the smallest cosine of its vectors with the expected ones. Raise UserError if a vector is wrong.

        All texts are sent at once, because wrong padding shows only in a batch.
        """
        with ThreadPoolExecutor(len(expected)) as pool:
            vectors = list(pool.map(lambda text: ask(self.url, FORMS[self.form], text), expected))
        cosine = min(map(smallest_cosine, expected.values(), vectors))
        if not LIMITS["peers", "int8" if self.precision == "int8" else ""].allow(cosine, 0):
            raise UserError(f"answers with a wrong embedding: cosine {cosine:.3f} with the reference")
        return cosine

    def _any_runs(self) -> bool:
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_STOPPED:
                    return True
        return False

    def _send(self, number: int) -> None:
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


@contextlib.contextmanager
def started(
    command: list[str], port: int, form: str, cpus: str, variables: dict[str, str], cwd: Path = ROOT
) -> Iterator[Running]:
    """Start a server on these CPUs, yield it once it answers, and end all its processes."""
    folder = Path(tempfile.mkdtemp(prefix="peer-"))  # in /tmp: the path of a socket has at most 107 characters
    log = folder / "log"
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["taskset", "-c", cpus, *command],
                cwd=cwd,
                env={**os.environ, **QUIET, **LARGE_PAGES, "TMPDIR": str(folder), **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the benchmark alone, which then ends its servers
            )
        server = Running(f"http://127.0.0.1:{port}", form, process.pid)
        try:
            wait_for_answer(server, process, log)
            yield server
        finally:
            end(server, process)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_answer(server: Running, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            ask(server.url, FORMS[server.form], "ready")
            return
        except UserError as error:
            reason = str(error)
        if process.poll() is not None:
            raise UserError(f"ended with exit code {process.returncode}: {last_line(log)}")
        if time.monotonic() > deadline:
            raise UserError(f"did not start within {START_S:.0f} s: {reason}")
        time.sleep(0.1)


def end(server: Running, process: subprocess.Popen[bytes]) -> None:
    """End the server, and kill its processes that remain."""
    process.terminate()
    server.resume()  # a paused process would not notice
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    while remaining := server.processes:
        for other in remaining:
            with contextlib.suppress(psutil.NoSuchProcess):
                other.kill()
        process.poll()
        psutil.wait_procs(remaining, END_S)


def ask(url: str, form: RequestForm, text: str) -> Any:
    """Return the vector of a text; raise UserError if there is none."""
    request = urllib.request.Request(url + form.path, form.body(text), form.headers(text))
    try:
        with opener.open(request, timeout=ANSWER_S) as response:
            return np.asarray(form.vector(response.read()), np.float64)
    except urllib.error.HTTPError as error:
        raise UserError(f"answered {error.code}: {error.read()[:200].decode(errors='replace')}") from None
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UserError(f"gave no embedding: {error!r}") from None


def last_line(log: Path) -> str:
    """Return the last line that a person can read."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line[:200] for line in reversed(lines) if line), "it printed nothing")


def reference(weights: Path, texts: list[str]) -> dict[str, Any]:
    """Return each text's vector by sentence-transformers."""
    code = (
        "import json, sys; from sentence_transformers import SentenceTransformer;"
        "model = SentenceTransformer(sys.argv[1], device='cpu');"
        "print(json.dumps(model.encode(json.load(sys.stdin)).tolist()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(weights)],
        input=json.dumps(texts),
        env=os.environ | QUIET,
        capture_output=True,
        check=True,
        text=True,
    )
    return {text: np.array(vector) for text, vector in zip(texts, json.loads(done.stdout), strict=True)}
