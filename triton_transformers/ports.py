"""Check that ports are free, find free ones, and name the program that holds a port."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from triton_transformers.settings import Settings, UserError

# The first port of those that free_ports() chooses from.
FIRST_FREE = 10_000
OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
DEFAULT_OUTGOING = range(32_768, 61_000)


def check_free(settings: Settings, names: list[str], ours: Collection[int] = ()) -> None:
    """Raise UserError if a port of these settings is taken. The ports in `ours` are held by this stack already."""
    used: dict[int, str] = {}
    for name in names:
        port = settings.value(name)
        if port in used:
            raise UserError(f"{name} and {used[port]} are both {port}: set one of them in .env")
        used[port] = name
        address = str(settings.bind(name))
        _check_address(address)
        if port in ours:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                raise UserError(
                    f"port {port} cannot be opened on {address} {_obstacle(name, port, error.strerror or '')}"
                ) from None


def _check_address(address: str) -> None:
    """Raise UserError if no program on this machine can listen on the address, whatever the port."""
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            raise UserError(
                f"this machine has no address {address} ({error.strerror}): set BIND_ADDRESS or GATEWAY_BIND to one "
                "that `ip address` shows, or to 0.0.0.0 for all"
            ) from None


def free_ports(count: int) -> list[int]:
    """Return ports that are free now and that the kernel gives to no outgoing connection.

    Otherwise a client that reconnects to a restarting server may connect to itself on the server's port, and keep it.
    """
    last = max(FIRST_FREE + 1000, outgoing_ports().start)
    with ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            server = stack.enter_context(socket.socket())
            port = random.SystemRandom().randrange(FIRST_FREE, last)
            with suppress(OSError):
                server.bind(("127.0.0.1", port))
                ports.append(port)
        return ports


def outgoing_ports() -> range:
    """Return the ports that the kernel gives to outgoing connections."""
    try:
        first, last = map(int, OUTGOING.read_text().split())
    except OSError:  # not Linux
        return DEFAULT_OUTGOING
    return range(first, last + 1)


def _obstacle(name: str, port: int, error: str) -> str:
    """Return why the port of a setting cannot be opened, as far as this user may know, and what to do."""
    holder = _holder(port)
    program = holder and _program(holder.pid)
    outgoing = outgoing_ports()
    if not holder or holder.status == psutil.CONN_LISTEN or port not in outgoing:
        cause = f"taken by {program}" if program else error
        return f"({cause}): set another {name} in .env, or stop the program that holds the port"
    cause = f"an outgoing connection of {program or 'another program'} uses it"
    if holder.status == psutil.CONN_TIME_WAIT:
        cause = "the kernel keeps it for a minute after an outgoing connection"
    return (
        f"({cause}): set {name} in .env to a port outside {outgoing[0]}-{outgoing[-1]}, which the kernel gives to "
        "outgoing connections (net.ipv4.ip_local_port_range), or try again in a minute"
    )


def _holder(port: int) -> Any:
    """Return psutil's connection that holds the port, rather one that listens; None if it is hidden from this user."""
    try:
        connections = [c for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port]
    except psutil.AccessDenied:
        return None
    return min(connections, key=lambda connection: connection.status != psutil.CONN_LISTEN, default=None)


def _program(pid: int | None) -> str:
    with suppress(psutil.NoSuchProcess):
        return f"{psutil.Process(pid).name()}, pid {pid}" if pid else ""
    return ""
