"""Drills: clients that hold connections, leave, or send what they should not."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from functools import partial

from loadtest.drills.clients import post_json
from loadtest.drills.drill_stack import BrokenError, DrillStack
from loadtest.drills.harness import add
from triton_transformers.load import Connection, outcome, post

# Clients of each attack, and how long they hold their connections.
IDLE, SLOW, LEAVING, WRONG = 500, 200, 100, 100
HELD_S = 6.0
# More than GATEWAY_BODY allows, which is 4 MiB.
LARGE = 5 << 20

# The setting with the port, and the path.
Route = tuple[str, str]
EMBEDDINGS, INFER = ("GATEWAY_PORT", "/v1/embeddings"), ("TRITON_HTTP_PORT", "/v2/models/embedding/infer")

Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]]


async def send_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
    await asyncio.sleep(HELD_S)


async def send_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
    for byte in request[: int(HELD_S)]:
        writer.write(bytes([byte]))
        await asyncio.sleep(1)


async def send_body_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
    head, separator, body = request.partition(b"\r\n\r\n")
    writer.write(head + separator)
    await send_slowly(reader, writer, body)


async def send_half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
    writer.write(request[: len(request) // 2])
    writer.write_eof()
    await asyncio.wait_for(reader.read(), HELD_S)


async def send_and_leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
    writer.write(request)
    await writer.drain()
    await asyncio.sleep(0.01)


async def send_noise(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
    writer.write(bytes(range(256)) * 16)
    await writer.drain()


# Name -> what the attack does (to {}, a target), the number of its clients, the function that each client runs.
ATTACKS: dict[str, tuple[str, int, Client]] = {
    "idle": (f"{IDLE} connections to {{}} that send nothing for {HELD_S:g} s", IDLE, send_nothing),
    "slow": (f"{SLOW} clients that send {{}} a byte of a request per second", SLOW, send_slowly),
    "slow-bodies": (f"{SLOW} clients that send {{}} a byte of a request's body per second", SLOW, send_body_slowly),
    "half-closed": (f"{LEAVING} clients that send {{}} half a request and close their side", LEAVING, send_half),
    "leaving": (f"{LEAVING} clients that leave {{}} in the middle of their request", LEAVING, send_and_leave),
    "noise": (f"{LEAVING} connections to {{}} that send 4 KiB of noise", LEAVING, send_noise),
}
TARGETS = {
    "gateway": ("the gateway", "GATEWAY_PORT"),
    "triton": ("Triton's HTTP port", "TRITON_HTTP_PORT"),
    "grpc": ("Triton's gRPC port", "TRITON_GRPC_PORT"),
}


def attack(stack: DrillStack, port_name: str, count: int, client: Client) -> None:
    """Open `count` connections, and let a client act on each. The server may close them."""
    text = "a text of a client that behaves badly"
    route, body = INFER, tensor("BYTES", [text])
    if port_name == "GATEWAY_PORT":
        route, body = EMBEDDINGS, {"model": "embedding", "input": text}
    request = post("localhost", route[1], json.dumps(body).encode())

    async def one() -> None:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", stack.port(port_name))
            try:
                await client(reader, writer, request)
            finally:
                writer.close()

    async def together() -> None:
        await asyncio.gather(*(one() for _ in range(count)))

    asyncio.run(together())


for name, (done, count, client) in ATTACKS.items():
    for target, (noun, port_name) in TARGETS.items():
        if target != "grpc" or client in (send_nothing, send_noise):
            add(f"{name}-{target}", done.format(noun), partial(attack, port_name=port_name, count=count, client=client))


def check_refusals(stack: DrillStack, route: Route, body: dict[str, object], count: int, status: str) -> None:
    """Send a request `count` times, ten at a time. Raise unless each gets this status."""
    path, address = route[1], f"127.0.0.1:{stack.port(route[0])}"

    async def one(limit: asyncio.Semaphore) -> str:
        async with limit:
            return (await outcome(path, post_json(Connection(address), path, body))).error

    async def together() -> set[str]:
        limit = asyncio.Semaphore(10)
        errors = await asyncio.gather(*(one(limit) for _ in range(count)))
        return {error[:3] if error[:3].isdigit() else error or "200" for error in errors}

    if (statuses := asyncio.run(together())) != {status}:
        raise BrokenError(f"{path} answered {', '.join(sorted(statuses))} instead of {status}")


def tensor(datatype: str, data: list[object], rows: int = 1) -> dict[str, object]:
    return {"inputs": [{"name": "input_text", "shape": [rows, 1], "datatype": datatype, "data": data}]}


# Name -> what is sent, the route, the body of the request, how many of it, and the status that each gets.
REFUSED: dict[str, tuple[str, Route, dict[str, object], int, str]] = {
    "large-bodies-on-gateway": (
        "20 bodies of 5 MiB to the gateway, which answers 413", EMBEDDINGS, {"input": "x" * LARGE}, 20, "413",
    ),
    "large-bodies-on-triton": (
        "20 requests to Triton with a text of 5 MiB in a tensor of another shape, which it answers with 400",
        INFER, tensor("BYTES", ["x" * LARGE], rows=2), 20, "400",
    ),
    "wrong-requests-to-gateway": (
        "100 requests to the gateway for a model that does not exist, which get 404",
        EMBEDDINGS, {"model": "none", "input": "a"}, WRONG, "404",
    ),
    "wrong-requests-to-triton": (
        "100 requests to Triton with a tensor of the wrong type, which get 400",
        INFER, tensor("INT32", [1]), WRONG, "400",
    ),
}  # fmt: skip
for name, (done, route, body, count, status) in REFUSED.items():
    add(name, done, partial(check_refusals, route=route, body=body, count=count, status=status))
