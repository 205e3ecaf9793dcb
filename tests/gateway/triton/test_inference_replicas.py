"""Several Tritons behind one host name: their share of the requests as they come and go; stand-ins on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest

from gateway.edge.config import Config
from gateway.triton import inference
from gateway.triton.inference import Inference
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.triton_stand_in import TritonStandIn, embedding

PATH = "/v1/embeddings"
BODY = {"model": "embedding", "input": "a text"}
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


class NameServer:
    """Stands in for the name server: the addresses of every name, and how often it was asked."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.asked = 0
        self.failure: Exception = socket.gaierror(socket.EAI_NONAME, "no such name")

    async def resolved(self, host: str) -> list[str]:
        self.asked += 1
        if not self.addresses:
            raise self.failure
        return self.addresses


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> NameServer:
    names = NameServer()
    monkeypatch.setattr(inference, "resolved", names.resolved)
    monkeypatch.setattr(inference, "RESOLVE_S", 0.01)
    return names


@pytest.fixture
def tritons() -> Iterator[list[TritonStandIn]]:
    """Run three servers with the same port on three addresses."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(TritonStandIn(embedding()))
        others = [TritonStandIn(embedding(), port=first.port, host=host) for host in HOSTS[1:]]
        yield [first, *map(stack.enter_context, others)]


@pytest.fixture
def gateway(tritons: list[TritonStandIn], names: NameServer) -> Iterator[RunningGateway]:
    with running_gateway(Config(triton=f"localhost:{tritons[0].port}", systems=("embedding",))) as running:
        yield running


def use(gateway: RunningGateway, names: NameServer, *addresses: str) -> None:
    """Change the addresses, and wait until the gateway has read them."""
    names.addresses = list(addresses)
    asked = names.asked
    gateway.wait_until(lambda: names.asked >= asked + 2)


def shares(gateway: RunningGateway, tritons: list[TritonStandIn], requests: int = 30) -> list[int]:
    """Return how many of the requests each server gets."""
    before = [len(triton.received) for triton in tritons]
    for _ in range(requests):
        assert gateway.post(PATH, BODY).status == 200
    return [len(triton.received) - count for triton, count in zip(tritons, before, strict=True)]


def test_new_replica_gets_its_share(gateway, tritons, names):
    use(gateway, names, *HOSTS[:2])
    gateway.wait_until(lambda: shares(gateway, tritons) == [15, 15, 0])
    use(gateway, names, *HOSTS)
    gateway.wait_until(lambda: shares(gateway, tritons) == [10, 10, 10])


def test_request_ends_at_the_replica_that_leaves(gateway, tritons, names):
    use(gateway, names, HOSTS[0])
    model = tritons[0].models["embedding"]
    gateway.post(PATH, BODY)
    model.gate.clear()
    with gateway.sent("POST", PATH, BODY) as response:
        tritons[0].wait_until(lambda: bool(tritons[0].running))
        use(gateway, names, HOSTS[1])
        gateway.wait_until(lambda: shares(gateway, tritons) == [0, 30, 0])
        model.gate.set()
        assert response().status == 200


def test_replicas_stay_while_the_name_has_no_address(gateway, tritons, names):
    use(gateway, names, HOSTS[2])
    use(gateway, names)
    names.failure = UnicodeError("label too long")
    use(gateway, names)
    assert shares(gateway, tritons) == [0, 0, 30]


def test_replica_that_refuses_connections_fails_no_request(gateway, tritons, names):
    use(gateway, names, "127.0.0.4", HOSTS[1])
    assert shares(gateway, tritons) == [0, 30, 0]


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]"])
def test_address_is_not_looked_up(names, address):
    async def watch() -> None:
        await Inference(f"{address}:8001", 1).watch_replicas()

    asyncio.run(watch())
    assert names.asked == 0


@pytest.mark.parametrize(
    ("unsorted", "addresses"),
    [
        (["::2", "10.0.0.2", "::1", "10.0.0.1"], ["10.0.0.1", "10.0.0.2"]),
        (["::2", "::1"], ["::1", "::2"]),
    ],
)
def test_ipv4_comes_before_ipv6(monkeypatch, unsorted, addresses):
    answers = [
        (socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))
        for address in unsorted
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: answers)
    assert asyncio.run(inference.resolved("triton-pods")) == addresses
