"""Clients inside a cluster: half send requests over HTTP to the gateway, half over gRPC to Triton's pods.

Runs in a pod with the gateway's image. Prints its totals as a line of JSON once per second. Each client keeps its
connection and repeats no request, so each error of a request counts.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import time
from typing import Any

import numpy as np

from gateway.triton.inference import Inference
from triton_transformers.load import (
    FAILED,
    JSON,
    LOST,
    RIGHT,
    TEXTS,
    WRONG,
    Connection,
    KnownVectors,
    Load,
    Vectors,
    WrongError,
    outcome,
    post,
)
from triton_transformers.tensors import Tensor

CLIENTS = int(os.environ.get("CLIENTS", 16))  # over each protocol
PAUSE_S = float(os.environ.get("PAUSE_S", 0.2))
TIMEOUT_S = 70
# Texts of a request to the gateway.
BATCHES = (1, 9)
OUTPUT = "output__0"
GATEWAY, PODS = "gateway:8080", "triton-pods"


class Clients:
    """The totals and the right answers, which all clients share."""

    def __init__(self) -> None:
        self.load = Load(self.run, TIMEOUT_S)
        self.sent = self.duplicated = 0
        self.first_answer = 0.0  # Unix time
        self.answered: set[str] = set()
        self.counts: collections.Counter[str] = collections.Counter()
        self.errors: collections.Counter[str] = collections.Counter()
        self.slowest_s, self.reported = 0.0, 0

    async def run(self, load: Load) -> None:
        await ask_until_answered(TEXTS[:1])
        self.first_answer = time.time()
        # Another gateway may find Triton two seconds later.
        self.known = KnownVectors(np.concatenate([await ask_until_answered([text]) for text in TEXTS]))
        inference = Inference(f"{PODS}:8001", TIMEOUT_S)
        replicas = asyncio.create_task(inference.watch_replicas())
        await load.closed_loop(2 * CLIENTS, lambda number: self.client(number, inference))
        replicas.cancel()

    async def client(self, number: int, inference: Inference) -> None:
        connection, size = Connection(GATEWAY), BATCHES[number // 2 % len(BATCHES)]
        while not self.load.is_ending:
            if number % 2:
                await self.load.send("grpc", self.over_grpc(inference, *self.next_request(1)))
            else:
                await self.load.send(f"http, {size} texts", self.over_http(connection, *self.next_request(size)))
            await self.load.pause(PAUSE_S)

    def next_request(self, size: int) -> tuple[str, list[int]]:
        """Return the id of the next request, and its texts."""
        number, self.sent = self.sent, self.sent + 1
        return f"request-{number}", [(number + offset) % len(TEXTS) for offset in range(size)]

    async def over_http(self, connection: Connection, id: str, chosen: list[int]) -> None:
        vectors, answered = await ask(connection, [TEXTS[i] for i in chosen], id)
        self.duplicated += answered in self.answered
        self.answered.add(answered)
        if answered != id:
            raise WrongError(f"the answer to {answered} came for {id}")
        self.known.check(chosen, vectors)

    async def over_grpc(self, inference: Inference, id: str, chosen: list[int]) -> None:
        tensor = Tensor.from_texts("input_text", [TEXTS[i] for i in chosen], [len(chosen), 1])
        self.known.check(chosen, (await inference.infer("embedding", [tensor], [OUTPUT]))[OUTPUT].array())

    def report(self) -> dict[str, Any]:
        """Return the outcomes of all requests so far."""
        new = self.load.outcomes[self.reported :]
        self.reported += len(new)
        for end in new:
            self.counts[end.kind] += 1
            self.slowest_s = max(self.slowest_s, end.seconds)
            if end.error:
                self.errors[f"{end.route}: {end.error}"[:200]] += 1
        return {
            "time": time.time(),
            "first_answer": self.first_answer,
            "sent": self.sent,
            "right": self.counts[RIGHT],
            "wrong": self.counts[WRONG],
            "duplicated": self.duplicated,
            "failed": self.counts[FAILED] + self.counts[LOST],
            "slowest_s": self.slowest_s,
            "errors": self.errors,
        }


async def ask(connection: Connection, texts: list[str], id: str = "learning") -> tuple[Vectors, str]:
    """Return the vectors of the texts, and the id of the request that the response names."""
    headers = JSON | {"Authorization": f"Bearer {os.environ['API_KEYS']}", "X-Request-Id": id}
    body = json.dumps({"model": "embedding", "input": texts}).encode()
    response = await connection.ask(post(GATEWAY, "/v1/embeddings", body, headers))
    vectors = np.array([row["embedding"] for row in json.loads(response.body)["data"]], np.float32)
    return vectors, response.header("x-request-id")


async def ask_until_answered(texts: list[str]) -> Vectors:
    """Return the vectors of the texts. Send them on a new connection each time, so that every gateway gets some."""
    answers: list[Vectors] = []

    async def one() -> None:
        connection = Connection(GATEWAY)
        try:
            answers.append((await ask(connection, texts))[0])
        finally:
            connection.close()

    while (await outcome("", one())).kind != RIGHT:
        await asyncio.sleep(0.2)
    return answers[0]


def main() -> None:
    clients = Clients()
    with clients.load:
        while not clients.load.problems:
            time.sleep(1)
            if clients.first_answer:
                print(json.dumps(clients.report()), flush=True)
    raise SystemExit(clients.load.problems[0])


if __name__ == "__main__":
    main()
