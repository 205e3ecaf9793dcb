"""Stands for Grafana where it cannot be had: answers health, and shows what it would have provisioned.

Takes its settings as Grafana does, from GF_... and from cfg:... arguments, and fills in the variables of its files.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def setting(name: str, default: str) -> str:
    """As section.key."""
    given = [argument.partition("=")[2] for argument in sys.argv if argument.startswith(f"cfg:{name}=")]
    return given[-1] if given else os.environ.get("GF_" + re.sub(r"\W", "_", name).upper(), default)


PROVISIONING = Path(setting("paths.provisioning", "/etc/grafana/provisioning"))


def provisioned(kind: str) -> list[dict[str, str]]:
    files = sorted((PROVISIONING / kind).glob("*.y*ml"))
    return [{"file": path.name, "text": os.path.expandvars(path.read_text())} for path in files]


def dashboards() -> list[dict]:
    """Of the folders that the providers name."""
    folders = [
        Path(path) for file in provisioned("dashboards") for path in re.findall(r'path: "?([^"\s]+)', file["text"])
    ]
    return [json.loads(path.read_text()) for folder in folders for path in sorted(folder.rglob("*.json"))]


ANSWERS = {
    "/api/health": lambda: {"database": "ok", "version": "stand-in"},
    "/api/datasources": lambda: provisioned("datasources"),
    "/api/search": lambda: [{"uid": each["uid"], "title": each["title"]} for each in dashboards()],
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
    address = setting("server.http_addr", ""), int(setting("server.http_port", "3000"))
    ThreadingHTTPServer(address, Handler).serve_forever()
