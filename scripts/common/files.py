"""Files that two commands may want at the same moment, or that a kill may catch half-written."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from scripts.common.cli import err
from scripts.common.settings import Settings, UserError
from scripts.common.triton import Triton


@contextlib.contextmanager
def exclusive(path: Path, who: str, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a folder or file. The kernel frees it with the process, so a kill leaves nothing to sweep."""
    lock = os.open(path, os.O_RDONLY if path.is_dir() else os.O_CREAT | os.O_RDWR, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise UserError(f"{who}: wait for it, or stop it") from None
            with err.status(f"{who}: waiting"):
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # where Locust is about, its gevent closes files at its leisure
        os.close(lock)


def comparison_lock(settings: Settings) -> Path:
    """Held while a comparison runs against this server."""
    folder = settings.path("REPORTS")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f".lock-{Triton(settings.url('TRITON_HTTP_PORT')).name}"


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)
