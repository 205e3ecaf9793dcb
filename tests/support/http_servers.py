"""Run small HTTP servers in a thread of the test's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread


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
