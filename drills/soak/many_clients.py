"""Many clients in a closed loop: each sends a request, waits for the response, thinks, and sends the next.

Each has a connection of its own, and leaves after some requests, when another comes in its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc
import numpy as np

from drills.outcomes import FAILED, GATEWAY, LOST, RIGHT, WRONG, Outcome
from drills.steady_load import GRPC, HTTP, INFER, LOST_S, TEXTS, Clients, RefusedError, Vector, outcome
from gateway.inference import Tensor

MAXIMUM_TEXTS = 8
BAD_SHARE = 0.01
# Requests of a client before it leaves: a stack that keeps something of each connection shows that too.
REQUESTS_PER_VISIT = 10
REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)

Request = Callable[[], Awaitable[object]]


def bad_requests(clients: Clients) -> dict[str, list[Request]]:
    """Return wrong requests by route: the server itself refuses all but one, which reaches a model."""

    def gateway(body: dict[str, object]) -> Request:
        return lambda: clients.gateway.post("/v1/embeddings", body)

    def http(datatype: str, data: Sequence[object], model: str = "embedding") -> Request:
        tensor = {"name": "input_text", "shape": [1, 1], "datatype": datatype, "data": data}
        return lambda: clients.http.post(INFER.replace("embedding", model), {"inputs": [tensor]})

    def over_grpc(tensor: Tensor, model: str = "embedding") -> Request:
        return lambda: clients.inference.infer(model, [tensor])

    not_utf8 = Tensor("input_text", "BYTES", [1, 1], b"\x01\x00\x00\x00\xff")
    return {
        GATEWAY: [
            gateway({"model": "none", "input": "a"}),
            gateway({"model": "embedding", "input": []}),
            gateway({"model": "embedding", "input": "a", "dimensions": 100_000}),
        ],
        HTTP: [http("INT32", [1]), http("BYTES", ["a", "b"]), http("BYTES", ["a"], "none")],
        GRPC: [
            over_grpc(not_utf8),
            over_grpc(Tensor.from_values("input_text", "INT32", [[1]])),
            over_grpc(Tensor.from_texts("input_text", ["a"], [1, 1]), "none"),
        ],
    }


async def refusal(answer: Awaitable[object], timeout: float = LOST_S) -> tuple[str, str]:
    """Return the kind of a bad request's outcome, and its error. Right is only an error that blames the client."""
    try:
        async with asyncio.timeout(timeout):
            await answer
    except TimeoutError:
        return LOST, f"no answer to a bad request within {timeout:g} s"
    except RefusedError as error:
        return (RIGHT, "") if str(error).startswith("4") else (FAILED, f"a bad request got {error}")
    except grpc.RpcError as error:
        code = error.code()
        return (RIGHT, "") if code in REFUSALS else (FAILED, f"a bad request got {code.name} {error.details()}")
    except (OSError, ValueError) as error:
        return FAILED, f"a bad request got {error}"
    return WRONG, "a bad request got an answer"


@dataclass(frozen=True)
class Load:
    """The number of clients, and the seconds that each thinks: minimum and maximum."""

    clients: int
    wait: tuple[float, float]
    seed: int


class ManyClients:
    """The clients from the beginning of a `with` block until its end, and until all their requests have ended."""

    def __init__(self, load: Load, connect: Callable[[], Clients], answers: Sequence[Vector]) -> None:
        self._load, self._connect = load, connect
        self._answers = np.concatenate(answers)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._started = threading.Event()
        self.outcomes: list[Outcome] = []  # of good requests
        self.refusals: list[Outcome] = []  # of bad requests
        self.problems: list[str] = []  # errors that ended the load

    def __enter__(self) -> ManyClients:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._started.set()
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(self._load.clients):
                    group.create_task(self._client(number))
        except* Exception as errors:
            error = errors.exceptions[0]
            place = traceback.extract_tb(error.__traceback__)[-1]
            self.problems.append(f"the clients stopped: {error!r} at {place.filename}:{place.lineno}")
            await self._stop.wait()  # the end of the `with` block needs the loop

    async def _client(self, number: int) -> None:
        chance = random.Random(f"{self._load.seed} {number}")
        # Clients that all began at once would go on in step.
        await self._think(chance.uniform(0, self._load.wait[1]))
        while not self._stop.is_set():
            clients = self._connect()
            route = list(clients.routes)[number % len(clients.routes)]
            for _ in range(REQUESTS_PER_VISIT):
                if not self._stop.is_set():
                    await self._send(clients, route, chance)
                    await self._think(chance.uniform(*self._load.wait))
            await clients.close()

    async def _think(self, seconds: float) -> None:
        """Wait, but not beyond the end of the load."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)

    async def _send(self, clients: Clients, route: str, chance: random.Random) -> None:
        sent_at = time.monotonic()
        if chance.random() < BAD_SHARE:
            kind, error = await refusal(chance.choice(bad_requests(clients)[route])())
            self.refusals.append(Outcome(route, sent_at, time.monotonic() - sent_at, kind, error))
            return
        chosen = chance.choices(range(len(TEXTS)), k=chance.randint(1, MAXIMUM_TEXTS))
        kind, error = await outcome(clients.routes[route]([TEXTS[i] for i in chosen]), self._answers[chosen])
        self.outcomes.append(Outcome(route, sent_at, time.monotonic() - sent_at, kind, error))
