"""The clients of one window, in a process of their own. They take so little CPU time that there can be thousands.

Run python -m bench.light_clients with the fields of Load as JSON. It prints those of Window.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import cast
from urllib.parse import urlsplit

from bench.peers.request_forms import FORMS
from gateway.http_server import raise_file_limit
from triton_transformers.corpus import MIXED
from triton_transformers.settings import ROOT, UserError

CONNECTING_AT_ONCE = 100


@dataclass(frozen=True)
class Load:
    """The work of each client: send a request, wait for the response, and send the next one.

    A client that got 429 waits first, as long as retry-after-ms asks for, as OpenAI's clients do.
    """

    url: str
    form: str
    clients: int
    warmup_s: float
    window_s: float


@dataclass
class Window:
    """The latencies of the responses, in milliseconds: those with the status 200, and those with 429."""

    seconds: float
    accepted: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # all others
    oldest_s: float = 0.0  # how long the oldest request without a response has waited at the end

    @property
    def rate(self) -> float:
        return len(self.accepted) / self.seconds


def measure(load: Load, cpus: str = "") -> Window:
    """Run the clients, on these CPUs if any are given."""
    pin = ["taskset", "-c", cpus] if cpus else []
    command = [*pin, sys.executable, "-m", "bench.light_clients", json.dumps(asdict(load))]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"the clients failed: {done.stderr.strip().rpartition(chr(10))[2]}")
    return Window(**json.loads(done.stdout))


class Client(asyncio.Protocol):
    """One client with one connection."""

    transport: asyncio.Transport

    def __init__(self, requests: list[bytes], choose: random.Random, window: Window) -> None:
        self.requests = requests
        self.choose = choose
        self.window = window
        self.received = b""
        self.sent_at: float | None = None

    async def connect(self, host: str, port: int) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self, host, port)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports have another base

    def send(self) -> None:
        if not self.transport.is_closing():
            self.sent_at = time.perf_counter()
            self.transport.write(self.choose.choice(self.requests))

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, end, body = self.received.partition(b"\r\n\r\n")
        if not end or len(body) < number(rb"content-length: *(\d+)", head):
            return
        self.received = b""
        status, wait_s = number(rb"http/1.1 (\d+)", head), 0.0
        assert self.sent_at is not None
        latency_ms = (time.perf_counter() - self.sent_at) * 1000
        self.sent_at = None
        if status == 200:
            self.window.accepted.append(latency_ms)
        elif status == 429:
            self.window.refused.append(latency_ms)
            wait_s = number(rb"retry-after-ms: *(\d+)", head) / 1000
        else:
            self.window.failures.append(f"{status} {body[:200].decode(errors='replace')}")
        asyncio.get_running_loop().call_later(wait_s, self.send)

    def connection_lost(self, error: Exception | None) -> None:
        if self.sent_at is not None:
            self.window.failures.append(f"the connection was closed: {error}")


def number(pattern: bytes, head: bytes) -> int:
    match = re.search(pattern, head, re.IGNORECASE)
    return int(match[1]) if match else 0


def encoded(load: Load) -> list[bytes]:
    form = FORMS[load.form]
    requests = []
    for text in MIXED.texts:
        body = form.body(text)
        headers = {"Host": urlsplit(load.url).netloc, "Content-Length": str(len(body)), **form.headers(text)}
        lines = [f"POST {form.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        requests.append("\r\n".join([*lines, "", ""]).encode() + body)
    return requests


async def run(load: Load) -> Window:
    raise_file_limit()
    address, requests = urlsplit(load.url), encoded(load)
    window = Window(load.window_s)
    clients = [Client(requests, random.Random(number), window) for number in range(load.clients)]
    for first in range(0, len(clients), CONNECTING_AT_ONCE):
        batch = clients[first : first + CONNECTING_AT_ONCE]
        await asyncio.gather(*(client.connect(address.hostname or "", address.port or 80) for client in batch))
    for client in clients:
        client.send()
    await asyncio.sleep(load.warmup_s)
    window.accepted.clear()
    window.refused.clear()
    window.failures.clear()
    await asyncio.sleep(load.window_s)
    # Copy the lists: responses that arrive after the window, and closed connections, still change them.
    now = time.perf_counter()
    waiting = [now - client.sent_at for client in clients if client.sent_at is not None]
    result = Window(load.window_s, window.accepted[:], window.refused[:], window.failures[:], max(waiting, default=0.0))
    for client in clients:
        client.transport.abort()
    return result


if __name__ == "__main__":
    import uvloop

    # Write in pieces: with PYTHONUNBUFFERED, Python may write only the first part of a long text.
    json.dump(asdict(uvloop.run(run(Load(**json.loads(sys.argv[1]))))), sys.stdout)
