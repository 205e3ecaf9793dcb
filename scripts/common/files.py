"""Locks between commands, and files that are never half-written."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from scripts.common.cli import err
from scripts.common.settings import Settings, UserError
from scripts.common.triton import Triton

# `make loadtest` and `make tune` hold the same lock.
ANOTHER_COMPARISON = "another comparison or search is running against this stack"
# Ends the name of a folder that is not complete yet.
WRITING = ".writing"


@contextlib.contextmanager
def exclusive(path: Path, holder: str, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a folder or file; wait for it, or raise UserError. `holder` names the other command in messages.

    The kernel releases the lock with the process, so a killed command leaves no stale lock.
    """
    lock = os.open(path, os.O_RDONLY if path.is_dir() else os.O_CREAT | os.O_RDWR, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise UserError(f"{holder}: wait for it, or stop it") from None
            with err.status(f"{holder}: waiting"):
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough: gevent, which Locust loads, delays it
        os.close(lock)


def comparison_lock(settings: Settings) -> Path:
    """Return the file whose lock a comparison against this server holds."""
    folder = settings.path("REPORTS")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f".lock-{Triton(settings.url('TRITON_HTTP_PORT')).name}"


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def complete_folder(target: Path, latest: str) -> Iterator[Path]:
    """Yield a folder to fill, move it to `target`, and let the link `latest` beside it point there.

    After an error the folder is deleted, and the link stays as it was.
    """
    work = target.with_name(f".{target.name}{WRITING}")
    work.mkdir(parents=True)
    try:
        yield work
        work.rename(target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    link = target.with_name(f".{latest}.new")
    link.unlink(missing_ok=True)
    link.symlink_to(target.name)
    os.replace(link, target.with_name(latest))


def write_json(content: object, path: Path) -> None:
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
