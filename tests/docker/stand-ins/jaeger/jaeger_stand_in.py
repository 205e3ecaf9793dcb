"""Stand in for a Jaeger that cannot be pulled: receive traces as OTLP in JSON, and show their ids as its page."""

from __future__ import annotations

import json
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

HEALTH, RECEIVER, PAGE = 13133, 4318, 16686
traces: set[str] = set()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        paths = {HEALTH: "/status", PAGE: "/"}
        self.respond(self.path == paths.get(self.server.server_port), sorted(traces))

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        scopes = [scope for resource in message["resourceSpans"] for scope in resource["scopeSpans"]]
        traces.update(span["traceId"] for scope in scopes for span in scope["spans"])
        self.respond((self.server.server_port, self.path) == (RECEIVER, "/v1/traces"), {})

    def respond(self, known: bool, answer: object) -> None:
        body = json.dumps(answer if known else {"message": "This is a stand-in for Jaeger."}).encode()
        self.send_response(200 if known else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # process 1 ignores SIGTERM by default
    servers = [ThreadingHTTPServer(("", port), Handler) for port in (HEALTH, RECEIVER, PAGE)]
    for server in servers[1:]:
        Thread(target=server.serve_forever, daemon=True).start()
    servers[0].serve_forever()
