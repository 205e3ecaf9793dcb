"""The clients of drills and soaks: requests with known answers on each route of a stack, and wrong requests."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from gateway.triton.inference import Inference
from triton_transformers.load import (
    JSON,
    RIGHT,
    TEXTS,
    TIMEOUT_S,
    Connection,
    KnownVectors,
    Load,
    Outcome,
    RefusedError,
    Vectors,
    WrongError,
    outcome,
    post,
)
from triton_transformers.tensors import Tensor

GATEWAY, HTTP, GRPC = "gateway", "Triton's HTTP", "Triton's gRPC"
RATE = 8  # requests per second on each route
# Requests that wait on a route. More would only measure how many the gateway lets wait on a machine that is too slow.
MAXIMUM_WAITING = 64
INFER, OUTPUT = "/v2/models/embedding/infer", "output__0"
# gRPC's own timeout of an attempt to connect: a new client must not fail because the machine is busy, as one of the
# gateway may, which tries again.
SLOW_CONNECT = {"grpc.min_reconnect_backoff_ms": 20_000}
# gRPC's channels to one address share a connection, unless each has subchannels of its own.
OWN_CONNECTION = {"grpc.use_local_subchannel_pool": 1}
# The soak sends requests of 1 to MAXIMUM_TEXTS texts, and a share of bad requests.
MAXIMUM_TEXTS = 8
BAD_SHARE = 0.01
# Requests of a client before it leaves: a stack that keeps something of each connection shows that too.
REQUESTS_PER_VISIT = 10
REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)

Request = Callable[[], Awaitable[object]]


async def post_json(connection: Connection, path: str, body: dict[str, Any], keep: bool = False) -> Any:
    """Send a request, and return the JSON of the response. Close the connection unless `keep` is set."""
    headers = JSON if keep else JSON | {"Connection": "close"}
    try:
        request = post(connection.address, path, json.dumps(body).encode(), headers)
        return json.loads((await connection.ask(request)).body)
    finally:
        if not keep:
            connection.close()


class Clients:
    """Sends requests to a stack, on each of its routes.

    With `keep`, each route has a connection that stays open, for one request at a time. Otherwise each HTTP request has
    its own.
    """

    def __init__(self, gateway_port: int, http_port: int, grpc_port: int, keep: bool = False) -> None:
        self._addresses = {GATEWAY: f"127.0.0.1:{gateway_port}", HTTP: f"127.0.0.1:{http_port}"}
        self._kept = {route: Connection(address) for route, address in self._addresses.items()} if keep else {}
        self.inference = Inference(f"127.0.0.1:{grpc_port}", TIMEOUT_S, SLOW_CONNECT | (OWN_CONNECTION if keep else {}))
        self.routes: dict[str, Callable[[Sequence[str]], Awaitable[Vectors]]] = {
            GATEWAY: self._through_gateway,
            HTTP: self._over_http,
            GRPC: self._over_grpc,
        }

    async def aclose(self) -> None:
        for connection in self._kept.values():
            connection.close()
        await self.inference.close()

    async def send(self, route: str, chosen: Sequence[int], known: KnownVectors) -> None:
        """Send some of TEXTS. Raise an error unless the answer is right."""
        known.check(chosen, await self.routes[route]([TEXTS[i] for i in chosen]))

    async def learn(self) -> KnownVectors:
        """Return the answer to each text, alone."""
        return KnownVectors(np.concatenate([await self.routes[GRPC]([text]) for text in TEXTS]))

    async def are_answered(self, known: KnownVectors, timeout: float) -> bool:
        """Return whether each route gives the right answer now."""
        ends = [outcome(route, self.send(route, [0], known), timeout) for route in self.routes]
        return all(end.kind == RIGHT for end in await asyncio.gather(*ends))

    async def post(self, route: str, path: str, body: dict[str, Any]) -> Any:
        connection = self._kept.get(route) or Connection(self._addresses[route])
        return await post_json(connection, path, body, keep=route in self._kept)

    async def _through_gateway(self, texts: Sequence[str]) -> Vectors:
        answer = await self.post(GATEWAY, "/v1/embeddings", {"model": "embedding", "input": texts})
        return np.array([item["embedding"] for item in answer["data"]])

    async def _over_http(self, texts: Sequence[str]) -> Vectors:
        tensor = {"name": "input_text", "shape": [len(texts), 1], "datatype": "BYTES", "data": texts}
        # Without names, a request asks for all outputs, so that both steps run.
        answer = await self.post(HTTP, INFER, {"inputs": [tensor]})
        (output,) = (output for output in answer["outputs"] if output["name"] == OUTPUT)
        return np.array(output["data"]).reshape(output["shape"])

    async def _over_grpc(self, texts: Sequence[str]) -> Vectors:
        tensor = Tensor.from_texts("input_text", texts, [len(texts), 1])
        return (await self.inference.infer("embedding", [tensor], [OUTPUT]))[OUTPUT].array()

    def bad_requests(self, route: str) -> list[Request]:
        """Return wrong requests: the server itself refuses all but one, which reaches a model."""

        def gateway(**body: object) -> Request:
            return lambda: self.post(GATEWAY, "/v1/embeddings", body)

        def http(datatype: str, data: Sequence[object], model: str = "embedding") -> Request:
            tensor = {"name": "input_text", "shape": [1, 1], "datatype": datatype, "data": data}
            return lambda: self.post(HTTP, INFER.replace("embedding", model), {"inputs": [tensor]})

        def over_grpc(tensor: Tensor, model: str = "embedding") -> Request:
            return lambda: self.inference.infer(model, [tensor])

        if route == GATEWAY:
            return [
                gateway(model="none", input="a"),
                gateway(model="embedding", input=[]),
                gateway(model="embedding", input="a", dimensions=100_000),
            ]
        if route == HTTP:
            return [http("INT32", [1]), http("BYTES", ["a", "b"]), http("BYTES", ["a"], "none")]
        return [
            over_grpc(Tensor("input_text", "BYTES", [1, 1], b"\x01\x00\x00\x00\xff")),  # not UTF-8
            over_grpc(Tensor.from_values("input_text", "INT32", [[1]])),
            over_grpc(Tensor.from_texts("input_text", ["a"], [1, 1]), "none"),
        ]


async def refusal(answer: Awaitable[object]) -> None:
    """Wait for the answer to a bad request. Raise an error unless it blames the client."""
    try:
        await answer
    except RefusedError as error:
        if error.status is None or not 400 <= error.status < 500:
            raise RefusedError(f"a bad request got {error}") from None
    except grpc.RpcError as error:
        if error.code() not in REFUSALS:
            raise RefusedError(f"a bad request got {error.code().name} {error.details()}") from None
    else:
        raise WrongError("a bad request got an answer")


def steady_load(connect: Callable[[], Clients], known: KnownVectors) -> Load:
    """Return a load of RATE requests per second on each route, of which at most MAXIMUM_WAITING wait."""

    async def run(load: Load) -> None:
        clients = connect()
        routes = list(clients.routes)
        waiting = Counter[str]()

        async def send(number: int) -> None:
            turn, place = divmod(number, len(routes))
            route = routes[place]
            if waiting[route] < MAXIMUM_WAITING:
                waiting[route] += 1
                try:
                    await load.send(route, clients.send(route, [(turn + place) % len(TEXTS)], known))
                finally:
                    waiting[route] -= 1

        await load.open_loop(RATE * len(routes), send)
        await clients.aclose()

    return Load(run)


@dataclass(frozen=True)
class Pace:
    """The number of clients, and the seconds that each thinks: minimum and maximum."""

    clients: int
    wait: tuple[float, float]
    seed: int


class ManyClients(Load):
    """Many clients in a closed loop: each sends a request, waits for the response, thinks, and sends the next.

    Each has a connection of its own, and leaves after some requests, when another comes in its place.
    """

    def __init__(self, pace: Pace, connect: Callable[[], Clients], known: KnownVectors) -> None:
        super().__init__(lambda _: self.closed_loop(pace.clients, self._client))
        self._pace, self._connect, self._known = pace, connect, known
        self.refusals: list[Outcome] = []  # of bad requests

    async def _client(self, number: int) -> None:
        chance = random.Random(f"{self._pace.seed} {number}")
        # Clients that all began at once would go on in step.
        await self.pause(chance.uniform(0, self._pace.wait[1]))
        while not self.is_ending:
            clients = self._connect()
            route = list(clients.routes)[number % len(clients.routes)]
            for _ in range(REQUESTS_PER_VISIT):
                if not self.is_ending:
                    await self._send(clients, route, chance)
                    await self.pause(chance.uniform(*self._pace.wait))
            await clients.aclose()

    async def _send(self, clients: Clients, route: str, chance: random.Random) -> None:
        if chance.random() < BAD_SHARE:
            bad = chance.choice(clients.bad_requests(route))
            self.refusals.append(await outcome(route, refusal(bad())))
        else:
            chosen = chance.choices(range(len(TEXTS)), k=chance.randint(1, MAXIMUM_TEXTS))
            await self.send(route, clients.send(route, chosen, self._known))
