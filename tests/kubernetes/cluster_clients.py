"""Clients inside a cluster: half send requests over HTTP to the gateway, half over gRPC to Triton's pods.

Runs in a pod with the gateway's image. Prints its totals as a line of JSON once per second. Each client keeps its
connection and repeats no request, so each error of a request counts.
"""

from __future__ import annotations

import asyncio
import collections
import http.client
import itertools
import json
import os
import select
import threading
import time
from dataclasses import dataclass, field

import grpc
import numpy as np
import numpy.typing as npt

from gateway.inference import Inference, Tensor
from gateway.replicas import Replicas
from triton_transformers.corpus import MIXED

CLIENTS = int(os.environ.get("CLIENTS", 16))  # over each protocol
PAUSE_S = float(os.environ.get("PAUSE_S", 0.2))
TIMEOUT_S = 70
# Engines differ in the last digits between batches. Two of the texts have a cosine of at most 0.9.
MIN_COSINE = 0.99
TEXTS = MIXED.texts[:64:4]
# The gateway sends requests of one text to Triton over HTTP, and those of nine over gRPC.
BATCHES = (1, 9)
OUTPUT = "output__0"

Vectors = npt.NDArray[np.float32]


@dataclass
class Totals:
    """The outcomes of all requests so far."""

    time: float = 0.0
    first_answer: float = 0.0  # Unix time
    sent: int = 0
    right: int = 0
    wrong: int = 0
    duplicated: int = 0
    failed: int = 0
    slowest_s: float = 0.0
    errors: collections.Counter[str] = field(default_factory=collections.Counter)


class Clients:
    """The totals and the right answers, which all clients share."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.lock = threading.Lock()
        self.numbers = itertools.count()
        self.answered: set[str] = set()
        self.expected = np.empty(0, np.float32)

    def learn(self) -> None:
        """Wait until the stack answers, and learn the right vector of each text. Raise if two are nearly equal."""
        send_until_answered(TEXTS[:1])
        self.totals.first_answer = time.time()
        # Another gateway may find Triton two seconds later.
        self.expected = np.concatenate([send_until_answered([text]) for text in TEXTS])
        cosines = self.expected @ self.expected.T - 2 * np.eye(len(TEXTS))
        if cosines.max() >= MIN_COSINE - 0.05:
            raise ValueError("two of the texts have nearly the same vector, so a wrong one would not be seen")

    def begin(self, size: int) -> tuple[str, list[int]]:
        """Return the id of the next request, and its texts."""
        with self.lock:
            number = next(self.numbers)
            self.totals.sent += 1
        return f"request-{number}", [(number + offset) % len(TEXTS) for offset in range(size)]

    def succeed(self, id: str, chosen: list[int], began: float, vectors: Vectors, answered: str) -> None:
        """Count the response to the request `id`. It names the request `answered`."""
        expected = self.expected[chosen]
        is_right = vectors.shape == expected.shape and (np.sum(vectors * expected, 1) >= MIN_COSINE).all()
        is_right = is_right and answered == id
        with self.lock:
            self.totals.slowest_s = max(self.totals.slowest_s, time.monotonic() - began)
            self.totals.right += bool(is_right)
            self.totals.wrong += not is_right
            self.totals.duplicated += answered in self.answered
            self.answered.add(answered)

    def fail(self, began: float, error: str) -> None:
        with self.lock:
            self.totals.slowest_s = max(self.totals.slowest_s, time.monotonic() - began)
            self.totals.failed += 1
            self.totals.errors[error[:200]] += 1

    def report(self) -> None:
        with self.lock:
            self.totals.time = time.time()
            print(json.dumps(vars(self.totals)), flush=True)


class RefusedError(Exception):
    """A status other than 200."""


class OverHttp:
    """One connection to the gateway, which is opened again when the gateway has announced its end."""

    def __init__(self) -> None:
        self.connection = http.client.HTTPConnection("gateway", 8080, timeout=TIMEOUT_S)
        self.headers = {"content-type": "application/json", "authorization": f"Bearer {os.environ['API_KEYS']}"}

    def send(self, texts: list[str], id: str = "learning") -> tuple[Vectors, str]:
        """Return the vectors of the texts, and the id of the request that the response names."""
        body = json.dumps({"model": "embedding", "input": texts})
        # A server may close an idle connection. Clients look before they send, and http.client does not.
        if self.connection.sock and select.select([self.connection.sock], [], [], 0)[0]:
            self.connection.close()
        self.connection.request("POST", "/v1/embeddings", body, self.headers | {"x-request-id": id})
        response = self.connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise RefusedError(f"{response.status} {content[:150]!r}")
        vectors = np.array([row["embedding"] for row in json.loads(content)["data"]], np.float32)
        return vectors, response.headers["x-request-id"]


def send_until_answered(texts: list[str]) -> Vectors:
    """Return the vectors of the texts. Send them on a new connection each time, so that every gateway gets some."""
    while True:
        try:
            return OverHttp().send(texts)[0]
        except (OSError, http.client.HTTPException, RefusedError):
            time.sleep(0.2)


def run_http(clients: Clients, size: int) -> None:
    gateway = OverHttp()
    while True:
        id, chosen = clients.begin(size)
        began = time.monotonic()
        try:
            clients.succeed(id, chosen, began, *gateway.send([TEXTS[i] for i in chosen], id))
        except (OSError, http.client.HTTPException, RefusedError) as error:
            clients.fail(began, f"http, {size} texts: {error!r}")
            gateway.connection.close()
        time.sleep(PAUSE_S)


async def run_grpc(clients: Clients) -> None:
    async def one(inference: Inference) -> None:
        while True:
            id, (chosen,) = clients.begin(1)
            began = time.monotonic()
            try:
                tensor = Tensor.from_texts("input_text", [TEXTS[chosen]], [1, 1])
                outputs = await asyncio.wait_for(inference.infer("embedding", [tensor], [OUTPUT]), TIMEOUT_S)
                clients.succeed(id, [chosen], began, outputs[OUTPUT].array(), id)
            except (grpc.RpcError, TimeoutError) as error:
                reason = f"{error.code().name} {error.details()}" if isinstance(error, grpc.RpcError) else "timeout"
                clients.fail(began, f"grpc: {reason}")
            await asyncio.sleep(PAUSE_S)

    inference = Inference("triton-pods:8001", TIMEOUT_S)
    await asyncio.gather(Replicas("triton-pods", [inference.use]).watch(), *(one(inference) for _ in range(CLIENTS)))


def main() -> None:
    clients = Clients()
    clients.learn()
    for number in range(CLIENTS):
        threading.Thread(target=run_http, args=(clients, BATCHES[number % len(BATCHES)]), daemon=True).start()
    threading.Thread(target=asyncio.run, args=[run_grpc(clients)], daemon=True).start()
    while True:
        time.sleep(1)
        clients.report()


if __name__ == "__main__":
    main()
