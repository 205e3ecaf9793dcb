"""Find the replicas of Triton behind one host name, such as a headless Service of Kubernetes.

gRPC's own resolver asks the name server again only after a failure: a new replica would get no request as long as the
others answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable, Sequence

# Kubernetes' name server keeps an answer for 5 s, so asking more often finds a new replica hardly sooner.
RESOLVE_S = 2.0


class Replicas:
    """The addresses of a host name, and the clients that share their requests among them."""

    def __init__(self, host: str, clients: Sequence[Callable[[Sequence[str]], None]]) -> None:
        self._host = host
        self._clients = clients
        self._addresses: list[str] = []

    async def watch(self) -> None:
        """Pass every change of the addresses to the clients, until the task is cancelled."""
        while not is_address(self._host):
            # While the name has no address, because no replica is ready, the last ones stay. UnicodeError: the name is
            # none that a name server knows.
            with contextlib.suppress(OSError, UnicodeError):
                self._use(await resolved(self._host))
            await asyncio.sleep(RESOLVE_S)

    def _use(self, addresses: list[str]) -> None:
        if addresses != self._addresses:
            self._addresses = addresses
            for use in self._clients:
                use(addresses)


async def resolved(host: str) -> list[str]:
    """Return the IPv4 addresses of the host; those of IPv6 if it has no others. Raise OSError if it has none.

    gRPC takes addresses of one family, and Triton listens on IPv4 by default.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    families = {family: {str(address[0]) for other, *_, address in found if other == family} for family, *_ in found}
    return sorted(families.get(socket.AF_INET) or families[found[0][0]])


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
