"""Stands in for a server of `make bench BENCH=peers`: PORT BEHAVIOUR.

Its vectors count the letters of a text.
"""

from __future__ import annotations

import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def vector_of(text: str) -> list[float]:
    return [1.0, *(float(text.lower().count(letter)) for letter in LETTERS)]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    behaviour = "right"

    def do_POST(self) -> None:
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"]
        vector = vector_of("another text" if self.behaviour == "wrong" else text)
        body = json.dumps({"embedding": vector}).encode()
        self.send_response(500 if self.behaviour == "fails" and text != "ready" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    port, Handler.behaviour = int(sys.argv[1]), sys.argv[2]
    if Handler.behaviour == "ends":
        print("Traceback (most recent call last):")
        sys.exit("ValueError: the model is missing")
    if Handler.behaviour == "stubborn":  # it and its child ignore SIGTERM
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
