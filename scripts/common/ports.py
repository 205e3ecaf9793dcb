"""Which ports are free, and who has one that is not."""

from __future__ import annotations

import socket
from collections.abc import Collection
from contextlib import ExitStack

import psutil

from scripts.common.settings import Settings, UserError


def check_free(settings: Settings, names: list[str], ours: Collection[int] = ()) -> None:
    """A UserError for a port that somebody else has; `ours` are those that this stack holds already."""
    address = str(settings.bind_address())
    taken: dict[int, str] = {}
    for name in names:
        port = settings.port(name)
        if port in taken:
            raise UserError(f"{name} and {taken[port]} are both {port}: set one of them in .env")
        taken[port] = name
        if port in ours:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                raise UserError(
                    f"port {port} cannot be opened on {address} ({_holder(port) or error.strerror}): "
                    f"stop what holds it, or set another {name} in .env"
                ) from None


def free_ports(count: int) -> list[int]:
    """As many that nobody has now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _holder(port: int) -> str:
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return ""
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            try:
                return f"taken by {psutil.Process(connection.pid).name()}, pid {connection.pid}"
            except psutil.NoSuchProcess:
                break
    return ""
