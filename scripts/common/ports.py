"""Check that ports are free, find free ones, and name the program that holds a port."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from scripts.common.settings import Settings, UserError

# free_ports() chooses from this range. Where it ends, the kernel's range for outgoing connections begins by default.
FIRST_FREE, FIRST_OUTGOING = 10_000, 32_768


def check_free(settings: Settings, names: list[str], ours: Collection[int] = ()) -> None:
    """Raise UserError if a port of these settings is taken. The ports in `ours` are held by this stack already."""
    used: dict[int, str] = {}
    for name in names:
        port = settings.port(name)
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
                    f"port {port} cannot be opened on {address} ({_holder(port) or error.strerror}): "
                    f"set another {name} in .env, or stop the program that holds the port"
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
    last = max(FIRST_FREE + 1000, first_outgoing())
    with ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            server = stack.enter_context(socket.socket())
            port = random.SystemRandom().randrange(FIRST_FREE, last)
            with suppress(OSError):
                server.bind(("127.0.0.1", port))
                ports.append(port)
        return ports


def first_outgoing() -> int:
    """Return the first port that the kernel gives to outgoing connections."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:  # not Linux
        return FIRST_OUTGOING


def _holder(port: int) -> str:
    """Return which program listens on the port, as far as this user may know."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return ""
    for connection in connections:
        address = connection.laddr
        if connection.status == psutil.CONN_LISTEN and address and address.port == port and connection.pid:
            try:
                return f"taken by {psutil.Process(connection.pid).name()}, pid {connection.pid}"
            except psutil.NoSuchProcess:
                break
    return ""
