"""Stands for Grafana where its image cannot be had: answers health, and shows what it would have provisioned."""

from __future__ import annotations

import json
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PROVISIONING = Path("/etc/grafana/provisioning")


def provisioned(kind: str) -> list[dict[str, str]]:
    return [{"file": path.name, "text": path.read_text()} for path in sorted((PROVISIONING / kind).glob("*.y*ml"))]


ANSWERS = {
    "/api/health": lambda: {"database": "ok", "version": "stand-in"},
    "/api/datasources": lambda: provisioned("datasources"),
    "/api/provisioned": lambda: provisioned("dashboards"),
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        answer = ANSWERS.get(self.path)
        body = json.dumps(answer() if answer else {"message": "This is a stand-in for Grafana."}).encode()
        self.send_response(200 if answer else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # process 1 would ignore it
    ThreadingHTTPServer(("", 3000), Handler).serve_forever()
