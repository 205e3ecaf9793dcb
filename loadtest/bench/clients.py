"""The clients of one window, in a process of their own, and the requests that they send to each kind of server.

Run python -m loadtest.bench.clients with the fields of Clients as JSON. It prints those of Window.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from gateway.edge.server import raise_file_limit
from loadtest.load.examples import HttpRequest, http_request
from triton_transformers.corpus import MIXED
from triton_transformers.load import JSON, RIGHT, Connection, Load, WrongError, post
from triton_transformers.settings import ROOT, UserError
from triton_transformers.tensors import Tensor

CONNECTING_AT_ONCE = 100
DIMENSIONS = 384


@dataclass(frozen=True)
class RequestForm:
    """The form of a request and of its response: one text in, one vector out. `triton_form` takes several texts."""

    path: str
    body: Callable[..., bytes]
    vector: Callable[[bytes], Any]  # the vector in the body of a response
    headers: Callable[..., dict[str, str]] = field(default=lambda *texts: JSON)


def triton_form(system: str, output: str) -> RequestForm:
    def request(*texts: str) -> HttpRequest:
        return http_request([Tensor.from_texts("input_text", list(texts), [len(texts), 1])], [output])

    def headers(*texts: str) -> dict[str, str]:
        length = request(*texts).header_length
        return {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(length)}

    return RequestForm(
        f"/v2/models/{system}/infer",
        lambda *texts: request(*texts).body,
        lambda body: np.frombuffer(body[-DIMENSIONS * 4 :], np.float32),
        headers,
    )


def openai_form(path: str, model: str) -> RequestForm:
    return RequestForm(
        path,
        lambda text: json.dumps({"model": model, "input": [text], "encoding_format": "base64"}).encode(),
        lambda body: np.frombuffer(base64.b64decode(json.loads(body)["data"][0]["embedding"]), np.float32),
    )


FORMS = {
    # The servers whose source is in peers/.
    "embed": RequestForm(
        "/embed",
        lambda text: json.dumps({"text": text}).encode(),
        lambda body: json.loads(body)["embedding"],
    ),
    "openai": openai_form("/embeddings", "model"),
    "completions": RequestForm(
        "/v1/completions",
        lambda text: json.dumps({"model": "story", "prompt": text, "max_tokens": 1}).encode(),
        lambda body: json.loads(body)["usage"]["completion_tokens"],
    ),
    "gateway": openai_form("/v1/embeddings", "embedding"),
    "triton": triton_form("embedding", "output__0"),
    "minilm": triton_form("minilm", "sentence_embedding"),
}


@dataclass(frozen=True)
class Clients:
    """Each client sends a request, waits for the response, and sends the next one.

    A client that got 429 waits first, as long as retry-after-ms asks for, as OpenAI's clients do.
    """

    url: str
    form: str
    clients: int
    warmup_s: float
    window_s: float
    texts: int = 1  # of a request


@dataclass
class Window:
    """The latencies of the responses of one window, in milliseconds: those with the status 200, and those with 429."""

    seconds: float
    accepted: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # all others
    oldest_s: float = 0.0  # how long the oldest request without a response has waited at the end

    @property
    def rate(self) -> float:
        return len(self.accepted) / self.seconds

    @property
    def p50_ms(self) -> float:
        return percentile(self.accepted, 50)

    @property
    def p95_ms(self) -> float:
        return percentile(self.accepted, 95)

    def check(self) -> Window:
        """Raise UserError unless every request got its answer."""
        if self.failures or self.refused or not self.accepted:
            problem = self.failures[0] if self.failures else f"{len(self.refused)} requests were refused"
            raise UserError(f"not every request of a window got its answer: {problem}")
        return self


def percentile(values: list[float], share: float) -> float:
    return float(np.percentile(values, share)) if values else 0.0


def measure(clients: Clients, cpus: str = "") -> Window:
    """Run the clients, on these CPUs if any are given."""
    pin = ["taskset", "-c", cpus] if cpus else []
    command = [*pin, sys.executable, "-m", "loadtest.bench.clients", json.dumps(asdict(clients))]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"the clients failed: {done.stderr.strip().rpartition(chr(10))[2]}")
    return Window(**json.loads(done.stdout))


def run(clients: Clients) -> Window:
    form, address = FORMS[clients.form], urlsplit(clients.url).netloc
    draw = random.Random(0).choices
    groups = [draw(MIXED.texts, k=clients.texts) for _ in MIXED.texts] if clients.texts > 1 else zip(MIXED.texts)
    requests = [post(address, form.path, form.body(*texts), form.headers(*texts)) for texts in groups]
    connected = threading.Event()

    async def send(load: Load) -> None:
        connections = [Connection(address) for _ in range(clients.clients)]
        try:
            for first in range(0, len(connections), CONNECTING_AT_ONCE):
                batch = connections[first : first + CONNECTING_AT_ONCE]
                await asyncio.gather(*(connection.open() for connection in batch))
        finally:
            connected.set()

        async def client(number: int) -> None:
            choose, wait_s = random.Random(number).choice, 0.0

            async def ask() -> None:
                nonlocal wait_s
                response = await connections[number].exchange(choose(requests))
                wait_s = int(response.header("retry-after-ms") or 0) / 1000
                if not response.check().body:
                    raise WrongError("the response is empty")

            while not load.is_ending:
                await load.send("", ask())
                if wait_s:
                    await load.pause(wait_s)

        await load.closed_loop(clients.clients, client)

    with Load(send) as load:
        connected.wait()
        time.sleep(clients.warmup_s)
        opened = time.monotonic()
        time.sleep(clients.window_s)
        closed = time.monotonic()
    if load.problems:
        raise UserError(load.problems[0])
    window = Window(closed - opened)
    for end in load.outcomes:
        ended = end.sent_at + end.seconds
        if opened <= ended < closed:
            if end.kind == RIGHT:
                window.accepted.append(end.seconds * 1000)
            elif end.status == HTTPStatus.TOO_MANY_REQUESTS:
                window.refused.append(end.seconds * 1000)
            else:
                window.failures.append(end.error)
        elif end.sent_at < closed <= ended:
            window.oldest_s = max(window.oldest_s, closed - end.sent_at)
    return window


if __name__ == "__main__":
    import uvloop

    raise_file_limit()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    # Write in pieces: with PYTHONUNBUFFERED, Python may write only the first part of a long text.
    json.dump(asdict(run(Clients(**json.loads(sys.argv[1])))), sys.stdout)
