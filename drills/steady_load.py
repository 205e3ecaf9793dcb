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

from drills.outcomes import FAILED, GATEWAY, LOST, RIGHT, WRONG, Outcome
from gateway.inference import Inference, Tensor
from scripts.common.corpus import MIXED

HTTP, GRPC = "Triton's HTTP", "Triton's gRPC"
RATE = 8  # requests per second on each route
LOST_S = 30.0
# Engines differ in the last digits between batches. Two of the texts have a cosine of at most 0.9.
MIN_COSINE = 0.99
TEXTS = MIXED.texts[:64:4]
OUTPUT = "output__0"

Vector = npt.NDArray[Any]


class RefusedError(Exception):
    """An HTTP status of 400 or more."""


class Clients:
    """One request on each route to a stack."""

    def __init__(self, gateway_port: int, http_port: int, grpc_port: int) -> None:
        self._gateway_port, self._http_port = gateway_port, http_port
        self._inference = Inference(f"127.0.0.1:{grpc_port}")
        self.routes: dict[str, Callable[[str], Awaitable[Vector]]] = {
            GATEWAY: self._through_gateway,
            HTTP: self._over_http,
            GRPC: self._over_grpc,
        }

    async def close(self) -> None:
        await self._inference.close()

    async def _through_gateway(self, text: str) -> Vector:
        answer = await post(self._gateway_port, "/v1/embeddings", {"model": "embedding", "input": text})
        return np.array(answer["data"][0]["embedding"])

    async def _over_http(self, text: str) -> Vector:
        tensor = {"name": "input_text", "shape": [1, 1], "datatype": "BYTES", "data": [text]}
        body = {"inputs": [tensor], "outputs": [{"name": OUTPUT}]}
        answer = await post(self._http_port, "/v2/models/embedding/infer", body)
        return np.array(answer["outputs"][0]["data"])

    async def _over_grpc(self, text: str) -> Vector:
        tensor = Tensor.from_texts("input_text", [text], [1, 1])
        return (await self._inference.infer("embedding", [tensor], [OUTPUT]))[OUTPUT].array().ravel()


async def post(port: int, path: str, body: dict[str, Any]) -> Any:
    """Send a request on a connection of its own, and return the JSON of the response. Raise RefusedError for others."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        # Do not wait for the end of the connection: it is not what a client waits for.
        response = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: *(\d+)", response, re.IGNORECASE)
        content = await reader.readexactly(int(length[1]) if length else 0)
    except asyncio.IncompleteReadError:
        raise ConnectionResetError("the connection was closed without an answer") from None
    finally:
        writer.close()
    if (status := response.split()[1]) != b"200":
        raise RefusedError(f"{status.decode()} {content[:120].decode(errors='replace')}")
    return json.loads(content)


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
        kind, error = await outcome(clients.routes[route](TEXTS[index]), self._answers[index])
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
    if vector.shape != expected.shape or not float(vector @ expected) >= MIN_COSINE:
        return WRONG, "another vector than before"
    return RIGHT, ""


async def known_answers(clients: Clients) -> list[Vector]:
    """Return the answer to each text, alone. Raise if Triton gives two texts the same one."""
    answers = [await clients.routes[GRPC](text) for text in TEXTS]
    cosines = np.array(answers) @ np.array(answers).T - 2 * np.eye(len(answers))
    if cosines.max() >= MIN_COSINE - 0.05:
        raise ValueError("two of the texts have nearly the same answer, so a wrong one would not be seen")
    return answers


async def answers_on_every_route(clients: Clients, answers: Sequence[Vector], timeout: float) -> bool:
    """Return whether each route gives the right answer now."""
    ends = [outcome(send(TEXTS[0]), answers[0], timeout) for send in clients.routes.values()]
    return all(kind == RIGHT for kind, _ in await asyncio.gather(*ends))
