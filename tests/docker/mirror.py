"""What a company hands to its builds: a pip configuration, so that pip in a build finds what this machine's finds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import AF_INET
from threading import Thread

import psutil

PORT = 8470


def setting(name: str) -> list[str]:
    """Of this machine's pip; empty where it has none."""
    command = [sys.executable, "-m", "pip", "config", "get", f"global.{name}"]
    return subprocess.run(command, capture_output=True, text=True).stdout.split()


def gateway() -> str:
    """This machine's address on Docker's bridge: builds reach it, and nobody beyond does."""
    # Read from the interface: an engine 20.10 does not name the gateway until it was restarted once.
    name = '{{index .Options "com.docker.network.bridge.name"}}'
    command = ["docker", "network", "inspect", "bridge", "--format", name]
    bridge = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return next(each.address for each in psutil.net_if_addrs()[bridge] if each.family == AF_INET)


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    handler = partial(QuietHandler, directory=folder)
    try:
        # The address is part of what layers are cached by: the same one every time, where it can be.
        server = ThreadingHTTPServer((gateway(), PORT), handler)
    except OSError:
        server = ThreadingHTTPServer((gateway(), 0), handler)
    with server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield "http://{}:{}/".format(*server.server_address)
        finally:
            server.shutdown()


@contextmanager
def pip_configuration(path: Path) -> Iterator[Path]:
    """Written to `path`, for a build's `--secret id=pip_conf,src=`; its addresses answer while the context lasts."""
    with ExitStack() as stack:
        links = [
            stack.enter_context(served(Path(link))) if Path(link).is_dir() else link for link in setting("find-links")
        ]
        # No `cert`: Debian's pip and any since 24.2 trust the system's certificates, to which base-images.sh adds ours.
        lines = ["[global]"]
        if links:
            lines += [f"find-links = {' '.join(links)}", f"trusted-host = {gateway()}"]
        path.write_text("\n".join(lines) + "\n")
        yield path
