"""Receive traces as OTLP over HTTP, in JSON, and keep the newest in files: each line is a message of OTLP.

OpenTelemetry's file exporter writes the same format, so its collector and other tools can read these files. The
receiver can also pass all messages on, to a program that shows them.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import queue
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PATH = "/v1/traces"
# The size of a file, of which there are two: a full one replaces the older one.
MAX_FILE = 128 << 20
MAX_BODY = 8 << 20
# Seconds until an idle connection is closed.
IDLE_S = 60
# Messages that wait to be passed on. Further ones are dropped. All of them fit into the memory of the container.
MAX_WAITING = 32
FORWARD_TIMEOUT_S = 5


@dataclass(frozen=True)
class Span:
    trace: str
    id: str
    parent: str
    name: str
    scope: str
    start: int  # nanoseconds since 1970, as the others
    end: int
    attributes: dict[str, str]
    events: dict[str, int]
    links: list[str]  # traces of other requests

    @classmethod
    def from_otlp(cls, span: dict[str, Any], scope: str) -> Span:
        return cls(
            span["traceId"],
            span["spanId"],
            span.get("parentSpanId", ""),
            span["name"],
            scope,
            int(span["startTimeUnixNano"]),
            int(span["endTimeUnixNano"]),
            {pair["key"]: str(*pair["value"].values()) for pair in span.get("attributes", [])},
            {event["name"]: int(event["timeUnixNano"]) for event in span.get("events", [])},
            [link["traceId"] for link in span.get("links", [])],
        )


class TraceFiles:
    """The newest messages: those of spans.jsonl, and before them those of spans.1.jsonl."""

    def __init__(self, folder: Path, max_bytes: int = MAX_FILE) -> None:
        self.newer, self.older = folder / "spans.jsonl", folder / "spans.1.jsonl"
        self.max_bytes = max_bytes
        self.lock = threading.Lock()

    def append(self, message: object) -> None:
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        with self.lock:
            self.newer.parent.mkdir(mode=0o700, exist_ok=True)
            if self.newer.exists() and self.newer.stat().st_size + len(line) > self.max_bytes:
                self.newer.replace(self.older)
            with self.newer.open("ab") as file:
                file.write(line)

    def spans(self) -> Iterator[Span]:
        """Yield all spans, those that arrived first before the others. Skip what is no message of spans."""
        for path in (self.older, self.newer):
            if path.exists():
                with path.open("rb") as lines:
                    for line in lines:
                        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                            yield from [
                                Span.from_otlp(span, scope["scope"]["name"])
                                for resource in json.loads(line)["resourceSpans"]
                                for scope in resource["scopeSpans"]
                                for span in scope["spans"]
                            ]


class Forwarder:
    """Passes messages on to another receiver. If that one is slow or does not answer, it drops them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.waiting: queue.Queue[bytes] = queue.Queue(MAX_WAITING)
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, body: bytes) -> None:
        with contextlib.suppress(queue.Full):
            self.waiting.put_nowait(body)

    def _run(self) -> None:
        # The other receiver is in the same network, so no proxy reaches it.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while True:
            request = urllib.request.Request(self.url, self.waiting.get(), {"Content-Type": "application/json"})
            with contextlib.suppress(OSError, http.client.HTTPException):
                opener.open(request, timeout=FORWARD_TIMEOUT_S).close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    files: TraceFiles
    forwarder: Forwarder | None

    def do_POST(self) -> None:
        if error := self.refusal():
            # The body stays unread, so the connection cannot go on.
            self.close_connection = True
            return self.respond(*error)
        try:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            message = json.loads(body)
            if not isinstance(message["resourceSpans"], list):
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            return self.respond(HTTPStatus.BAD_REQUEST, "the body is not a message of traces in OTLP's JSON")
        if self.forwarder:
            self.forwarder.add(body)
        try:
            self.files.append(message)
        except OSError as error:
            return self.respond(HTTPStatus.INSUFFICIENT_STORAGE, f"could not write {self.files.newer}: {error}")
        self.respond(HTTPStatus.OK)

    def refusal(self) -> tuple[HTTPStatus, str] | None:
        """Return the answer to a request whose body is not worth reading."""
        length = self.headers.get("Content-Length", "")
        if self.path != PATH:
            return HTTPStatus.NOT_FOUND, f"traces go to {PATH}"
        if self.headers.get_content_type() != "application/json":
            return (
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                "only OTLP in JSON is supported: set Content-Type: application/json",
            )
        if not length.isdecimal():
            return HTTPStatus.LENGTH_REQUIRED, "the header Content-Length is required"
        if int(length) > MAX_BODY:
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a message may have {MAX_BODY} bytes"
        return None

    def respond(self, status: HTTPStatus, message: str = "") -> None:
        body = json.dumps({"message": message} if message else {}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log refusals only."""
        if code != HTTPStatus.OK:
            super().log_request(code, size)


def server(
    port: int, files: TraceFiles, address: str = "127.0.0.1", forwarder: Forwarder | None = None
) -> ThreadingHTTPServer:
    """Open the port. Raise OSError if that is not possible."""
    return ThreadingHTTPServer((address, port), type("Receiver", (Handler,), {"files": files, "forwarder": forwarder}))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m monitoring.traces")
    parser.add_argument("port", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--address", default="127.0.0.1", help="the default is loopback")
    parser.add_argument("--forward", help="the URL of another receiver that gets all messages, too")
    options = parser.parse_args()
    try:
        forwarder = Forwarder(options.forward) if options.forward else None
        receiver = server(options.port, TraceFiles(options.folder), options.address, forwarder)
    except OSError as error:
        sys.exit(
            f"TRACE_PORT={options.port} cannot be opened: {error.strerror}. "
            "Stop the program that holds it, or set another"
        )
    os.umask(0o077)  # only the user may read the files
    receiver.serve_forever()


if __name__ == "__main__":
    main()
