"""Run small HTTP servers in a thread of the test's process."""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler
from threading import Thread
from typing import BinaryIO, NamedTuple


@contextmanager
def serving(handler: Callable, address: tuple[str, int] = ("127.0.0.1", 0), **attributes: object) -> Iterator[str]:
    """Yield the URL of a server with these attributes, which its handlers have as `self.server`."""
    with ThreadingHTTPServer(address, handler) as server:
        server.daemon_threads = True
        vars(server).update(attributes)
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield "http://{}:{}".format(*server.server_address)
        finally:
            server.shutdown()


class FileHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


def files(folder: Path) -> Callable:
    """Return a handler that serves the files of a folder."""
    return partial(FileHandler, directory=folder)


# --- scripts ----------------------------------------------------------------------------------------------------------

# A status, headers and a body; or what the server does instead of answering.
Answer = tuple[int, Mapping[str, str], bytes] | str
HANG, DROP = "hang until the client leaves", "close the connection"


class Received(NamedTuple):
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Script:
    """A server that answers by its script: an answer for each path, or the answers in turn and then the last again."""

    answers: Mapping[str, Answer] | list[Answer] | Callable[[str], Answer]
    url: str = ""
    received: list[Received] = field(default_factory=list)

    def answer(self, path: str) -> Answer:
        if callable(self.answers):
            return self.answers(path)
        if isinstance(self.answers, Mapping):
            return self.answers.get(path, (404, {}, b""))
        return self.answers[min(len(self.received), len(self.answers)) - 1]


class ScriptHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        script = self.server.script
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        script.received.append(Received(self.path, dict(self.headers), body))
        answer = script.answer(self.path)
        if isinstance(answer, str):
            self.close_connection = True
            if answer == HANG:
                self.connection.recv(1)
            return
        status, headers, content = answer
        with suppress(ConnectionError):  # the client has left
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)
            self.wfile.flush()

    do_HEAD = do_POST = do_GET

    def log_message(self, *_: object) -> None: ...


@contextmanager
def script(answers: Mapping[str, Answer] | list[Answer] | Callable[[str], Answer]) -> Iterator[Script]:
    """Run a server that answers by this script."""
    running = Script(answers)
    with serving(ScriptHandler, script=running) as running.url:
        yield running


@dataclass
class Replies:
    """A server that sends raw replies in turn, each in pieces; a reply without pieces closes the connection."""

    replies: Iterator[list[bytes]]
    address: str = ""
    connections: int = 0
    requests: list[bytes] = field(default_factory=list)


def read_head(sent: BinaryIO) -> bytes:
    """Return the lines of a request until the empty one; nothing if the client has left."""
    head = b""
    while not head.endswith(b"\r\n\r\n") and (line := sent.readline()):
        head += line
    return head


class ReplyHandler(BaseRequestHandler):
    def handle(self) -> None:
        server: Replies = self.server.replies
        server.connections += 1
        tls = self.server.tls
        connection = tls.wrap_socket(self.request, server_side=True) if tls else self.request
        with connection, connection.makefile("rb") as sent, suppress(ConnectionError):
            while head := read_head(sent):
                server.requests.append(head + sent.read(int(re.search(rb"Content-Length: (\d+)", head)[1])))
                reply = next(server.replies)
                for piece in reply:
                    connection.sendall(piece)
                    time.sleep(0.01)  # so that the client reads each piece alone
                if not reply:
                    return


@contextmanager
def replying(replies: Iterable[list[bytes]], certificate: tuple[Path, Path] | None = None) -> Iterator[Replies]:
    """Run a server that sends these replies, over TLS if there is a certificate."""
    tls = None
    if certificate:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(*certificate)
    running = Replies(iter(replies))
    with serving(ReplyHandler, replies=running, tls=tls) as url:
        running.address = url.removeprefix("http://")
        yield running


def response(status: str, body: bytes, header: str = "Content-Type: application/json") -> bytes:
    return f"HTTP/1.1 {status}\r\n{header}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
