"""Serve HTTP/1.1: uvicorn with limits for heads, errors in OpenAI's form, and a short way to refuse requests.

A refusal through a task and an ASGI application costs 0.12 ms of CPU time, the short way 0.03 ms. Of 2,000 clients that
arrive at once, the last waits as long as all refusals take.
"""

from __future__ import annotations

import asyncio
import re
import resource
import socket
from types import SimpleNamespace
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway.edge.admission import Admission
from gateway.edge.config import Config
from gateway.edge.errors import ApiError
from triton_transformers.settings import UserError

# Longer than clients keep idle connections, so that the client closes them, and not the server under a new request.
KEEP_ALIVE_S = 75
# Seconds that requests in flight have to end after SIGTERM: the default of GATEWAY_TIMEOUT. The runtimes wait longer
# before they kill the gateway.
GRACE_S = 60
BACKLOG = 4096  # connections that wait to be accepted; the kernel's limit may be lower
# Seconds for a request's head, or for the rest of a body that the gateway does not read.
HEAD_S = 20
# Bytes of a request besides its body: its head, the framing of one chunk, trailers. uvicorn does not limit them.
MAX_HEAD = 65_536
# Java's HTTP client offers HTTP/2 in its requests, and the parser takes the body after such an offer for HTTP/2. The
# gateway upgrades to nothing. JSON cannot contain this text.
UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
# Seconds until the next request is read from a connection that got 429: less than any pause that a 429 asks for.
# Clients that ignore the pause would take the time that admitted requests need: beside 2,000 of them, these took 4 s
# instead of 0.1 s.
BRAKE_S = 0.5
# After SIGTERM, the time for one more request of each idle connection, whose response announces its end.
# A connection that is closed without that may have a request on its way, which would be lost.
FAREWELL_S = 1.0


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


class GatewayProtocol(HttpToolsProtocol):
    """One connection. Its application is an Admission."""

    _head_timer: asyncio.TimerHandle | None = None
    _head_size = 0
    _is_ending = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]  # uvicorn narrows the type
        self.transport = cast(asyncio.Transport, JoinedWrites(self.transport, self.loop))
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        if not self._is_idle:
            self.app.client_left(self.cycle.scope)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_size += len(data)
        super().data_received(UPGRADE.sub(b"\r\nignored:", data) if self._is_idle else data)
        if self._head_size > MAX_HEAD:
            if self._is_idle:
                self._send_error(431, f"The head of the request is larger than {MAX_HEAD} bytes.")
            self.transport.close()
        # uvicorn has stopped its timer for idle connections, and a part of a head may never have a rest.
        elif self._is_idle and self._head_timer is None and self.timeout_keep_alive_task is None:
            self._start_head_timer()

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        if self._is_idle and not self.expect_100_continue and self.parser.get_method() == b"POST":
            response = self.app.refuse_at_once(self.url, self.headers)
            if response:
                self.cycle = _refused()
                self.transport.write(response)
                self.flow.pause_reading()
                self.loop.call_later(BRAKE_S, self._release_brake)
                return
        super().on_headers_complete()
        if self._is_ending:
            self.cycle.keep_alive = False

    def shutdown(self) -> None:
        """Announce the end of the connection with its next response; close it if it has none soon."""
        self._is_ending = True
        if self._is_idle:
            self.loop.call_later(FAREWELL_S, super().shutdown)
        else:
            super().shutdown()

    def on_chunk_header(self) -> None:
        self._head_size = 0  # the framing of thousands of small chunks is no large head

    def on_body(self, body: bytes) -> None:
        self._head_size -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_size = 0
        self._stop_head_timer()
        super().on_message_complete()
        if isinstance(self.cycle, SimpleNamespace):
            if self.parser.should_keep_alive():
                self._unset_keepalive_if_required()
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
            else:
                self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        # close() would wait for ever for a client that does not read its response.
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        self._send_error(400, msg)
        self.transport.close()

    def _send_error(self, status: int, message: str) -> None:
        body = bytes(ApiError(status, message).response().body)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)

    @property
    def _is_idle(self) -> bool:
        """Return whether no request of this connection waits for its response."""
        return self.cycle is None or self.cycle.response_complete

    def _release_brake(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_head_timer(self) -> None:
        if self._head_timer:
            self._head_timer.cancel()
            self._head_timer = None


class JoinedWrites:
    """A transport that writes the head of a response together with the beginning of its body.

    Each write is a system call that wakes the client: the first token of a stream came 0.06 to 0.25 ms later.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        data, self._head = self._head + data, b""
        if data.startswith(b"HTTP/1.1 ") and data.endswith(b"\r\n\r\n"):
            self._head = data
            self._loop.call_soon(self._flush)  # a head without a body
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head:
            self._transport.write(head)


def _refused() -> Any:
    """Return a stand-in for an answered request, so that uvicorn ignores the rest of its body."""
    return SimpleNamespace(response_complete=True, message_event=asyncio.Event())
