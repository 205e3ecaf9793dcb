"""A steady load in an open loop: requests leave at fixed times, however slowly the stack answers.

Each text has a known answer. A third of the requests goes through the gateway, the others to Triton over HTTP and gRPC.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from drills.outcomes import FAILED, GATEWAY, LOST, RATE, RIGHT, WRONG, Outcome
from gateway.inference import Inference, Tensor
from triton_transformers.corpus import MIXED

HTTP, GRPC = "Triton's HTTP", "Triton's gRPC"
# Longer than the gateway holds a request and then waits for Triton (GATEWAY_TIMEOUT), and than a slow machine loads
# models: Triton answers a request late whose connection shares a thread with a load.
LOST_S = 90.0
# Engines differ in the last digits between batches. Two of the texts have a cosine of at most 0.9.
MIN_COSINE = 0.99
TEXTS = MIXED.texts[:64:4]
INFER, OUTPUT = "/v2/models/embedding/infer", "output__0"
OWN_CONNECTION = {
    # gRPC's channels to one address share a connection, unless each has subchannels of its own.
    "grpc.use_local_subchannel_pool": 1,
    # The time to connect. The gateway's 100 ms are too short for new clients on a busy machine.
    "grpc.min_reconnect_backoff_ms": 20_000,
}

Vector = npt.NDArray[Any]


class RefusedError(Exception):
    """The server answered with another HTTP status than 200."""


class Clients:
    """Sends requests to a stack, on each of its routes.

    With `keep`, its connections belong to this object alone and stay open. Otherwise each HTTP request has its own.
    """

    def __init__(self, gateway_port: int, http_port: int, grpc_port: int, keep: bool = False) -> None:
        self.gateway, self.http = Connections(gateway_port, keep), Connections(http_port, keep)
        options = OWN_CONNECTION if keep else None
        self.inference = Inference(f"127.0.0.1:{grpc_port}", LOST_S, options)
        self.routes: dict[str, Callable[[Sequence[str]], Awaitable[Vector]]] = {
            GATEWAY: self._through_gateway,
            HTTP: self._over_http,
            GRPC: self._over_grpc,
        }

    async def close(self) -> None:
        self.gateway.close()
        self.http.close()
        await self.inference.close()

    async def _through_gateway(self, texts: Sequence[str]) -> Vector:
        answer = await self.gateway.post("/v1/embeddings", {"model": "embedding", "input": texts})
        return np.array([item["embedding"] for item in answer["data"]])

    async def _over_http(self, texts: Sequence[str]) -> Vector:
        tensor = {"name": "input_text", "shape": [len(texts), 1], "datatype": "BYTES", "data": texts}
        # Without names, a request asks for all outputs, so that both steps run.
        answer = await self.http.post(INFER, {"inputs": [tensor]})
        (output,) = (output for output in answer["outputs"] if output["name"] == OUTPUT)
        return np.array(output["data"]).reshape(output["shape"])

    async def _over_grpc(self, texts: Sequence[str]) -> Vector:
        tensor = Tensor.from_texts("input_text", texts, [len(texts), 1])
        return (await self.inference.infer("embedding", [tensor], [OUTPUT]))[OUTPUT].array()


class Connections:
    """HTTP connections to one port. With `keep`, a request takes one that is idle."""

    def __init__(self, port: int, keep: bool = False) -> None:
        self._port, self._keep = port, keep
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send a request, and return the JSON of the response. Raise RefusedError unless its status is 200."""
        while self._idle and (self._idle[-1][0].at_eof() or self._idle[-1][1].is_closing()):
            self._idle.pop()[1].close()
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port)
        reusable = False
        try:
            data = json.dumps(body).encode()
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(data)}\r\n" + ("" if self._keep else "Connection: close\r\n")
            writer.write(f"{head}\r\n".encode() + data)
            # Do not wait for the end of the connection: it is not what a client waits for.
            response = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: *(\d+)", response, re.IGNORECASE)
            content = await reader.readexactly(int(length[1]) if length else 0)
            reusable = self._keep and not re.search(rb"connection: *close", response, re.IGNORECASE)
        except asyncio.IncompleteReadError:
            raise ConnectionResetError("the connection was closed without an answer") from None
        finally:
            if reusable:
                self._idle.append((reader, writer))
            else:
                writer.close()
        if (status := response.split()[1]) != b"200":
            raise RefusedError(f"{status.decode()} {content[:120].decode(errors='replace')}")
        return json.loads(content)


async def post(port: int, path: str, body: dict[str, Any]) -> Any:
    """Send a request as Connections.post does, on a connection of its own."""
    return await Connections(port).post(path, body)


class SteadyLoad:
    """The load from the beginning of a `with` block until its end, and until all its requests have ended."""

    def __init__(self, clients: Callable[[], Clients], answers: Sequence[Vector]) -> None:
        self._clients = clients
        self._answers = answers
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.outcomes: list[Outcome] = []

    def __enter__(self) -> SteadyLoad:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        clients = self._clients()
        tasks = []
        begin = time.monotonic()
        for number in itertools.count():
            await asyncio.sleep(max(0.0, begin + number / RATE - time.monotonic()))
            if self._stop.is_set():
                break
            for offset, route in enumerate(clients.routes):
                index = (number + offset) % len(TEXTS)
                tasks.append(asyncio.create_task(self._send(clients, route, index)))
        await asyncio.gather(*tasks)
        await clients.close()

    async def _send(self, clients: Clients, route: str, index: int) -> None:
        sent_at = time.monotonic()
        kind, error = await outcome(clients.routes[route]([TEXTS[index]]), self._answers[index])
        self.outcomes.append(Outcome(route, sent_at, time.monotonic() - sent_at, kind, error))


async def outcome(answer: Awaitable[Vector], expected: Vector, timeout: float = LOST_S) -> tuple[str, str]:
    """Return the kind of the request's outcome, and its error."""
    try:
        async with asyncio.timeout(timeout):
            vector = await answer
    except TimeoutError:
        return LOST, f"no answer within {timeout:g} s"
    except grpc.RpcError as error:
        return FAILED, f"{error.code().name} {(error.details() or '')[:120]}"
    except (RefusedError, OSError) as error:
        return FAILED, str(error)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return WRONG, f"the answer cannot be read ({error})"
    if vector.shape != expected.shape or not (vector * expected).sum(-1).min() >= MIN_COSINE:
        return WRONG, "another vector than before"
    return RIGHT, ""


async def known_answers(clients: Clients) -> list[Vector]:
    """Return the answer to each text, alone. Raise if Triton gives two texts the same one."""
    answers = [await clients.routes[GRPC]([text]) for text in TEXTS]
    rows = np.concatenate(answers)
    cosines = rows @ rows.T - 2 * np.eye(len(rows))
    if cosines.max() >= MIN_COSINE - 0.05:
        raise ValueError("two of the texts have nearly the same answer, so a wrong one would not be seen")
    return answers


async def answers_on_every_route(clients: Clients, answers: Sequence[Vector], timeout: float) -> bool:
    """Return whether each route gives the right answer now."""
    ends = [outcome(send(TEXTS[:1]), answers[0], timeout) for send in clients.routes.values()]
    return all(kind == RIGHT for kind, _ in await asyncio.gather(*ends))
