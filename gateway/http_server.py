"""The HTTP server of the gateway."""

from __future__ import annotations

import resource
import socket

import uvicorn

from gateway.admission import Admission
from gateway.config import Config
from gateway.http_protocol import GatewayProtocol
from triton_transformers.settings import UserError

# Longer than clients keep idle connections, so that the client closes them, and not the server under a new request.
KEEP_ALIVE_S = 75
# Seconds that requests in flight have to end after SIGTERM: the default of GATEWAY_TIMEOUT. The runtimes wait longer
# before they kill the gateway.
GRACE_S = 60
BACKLOG = 4096  # connections that wait to be accepted; the kernel's limit may be lower


def listen(config: Config) -> socket.socket:
    """Open the port. Raise UserError if that is not possible."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise unusable_port("GATEWAY_PORT", config.port, config.host, error) from None
    return listener


def unusable_port(name: str, port: int, host: str, error: OSError) -> UserError:
    return UserError(
        f"{name}={port} cannot be opened on {host} ({error.strerror}): stop the program that holds it, or set another "
        f"{name}"
    )


def server(app: Admission, config: Config) -> uvicorn.Server:
    """Return the server; `run([listen(config)])` ends after SIGTERM, when requests in flight have their responses."""
    raise_file_limit()
    certificate, key = config.tls or (None, None)
    return uvicorn.Server(
        uvicorn.Config(
            app,
            loop="uvloop",
            http=GatewayProtocol,
            ws="none",
            ssl_certfile=certificate,
            ssl_keyfile=key,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            log_level="error",
        )
    )


def raise_file_limit() -> None:
    """Allow as many open files as the system permits: each connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
