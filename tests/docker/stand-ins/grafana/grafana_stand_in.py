"""Stand in for a Grafana that cannot be pulled: answer health, and show what Grafana would provision.

Like Grafana, it reads settings from GF_... variables and cfg:... arguments, and fills in the variables of its files.
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
    """Return the setting section.key."""
    values = [argument.partition("=")[2] for argument in sys.argv if argument.startswith(f"cfg:{name}=")]
    return values[-1] if values else os.environ.get("GF_" + re.sub(r"\W", "_", name).upper(), default)


PROVISIONING = Path(setting("paths.provisioning", "/etc/grafana/provisioning"))


def provisioned(kind: str) -> list[dict[str, str]]:
    files = sorted((PROVISIONING / kind).glob("*.y*ml"))
    return [{"file": path.name, "text": os.path.expandvars(path.read_text())} for path in files]


def dashboards() -> list[dict]:
    """Return the dashboards in the folders of the providers."""
    folders = [
        Path(path) for file in provisioned("dashboards") for path in re.findall(r'path: "?([^"\s]+)', file["text"])
    ]
    return [json.loads(path.read_text()) for folder in folders for path in sorted(folder.rglob("*.json"))]


ANSWERS = {
    "/api/health": lambda: {"database": "ok", "version": "stand-in"},
    "/api/datasources": lambda: provisioned("datasources"),
    "/api/search": lambda: [{"uid": dashboard["uid"], "title": dashboard["title"]} for dashboard in dashboards()],
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
    if sys.argv[1:] == ["-v"]:
        print("Version 11.0.0 (a stand-in)")
        sys.exit()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # process 1 ignores SIGTERM by default
    address = setting("server.http_addr", ""), int(setting("server.http_port", "3000"))
    ThreadingHTTPServer(address, Handler).serve_forever()
