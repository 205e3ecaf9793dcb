"""Locks between commands, what the holder of one does, and files that are never half-written."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from triton_transformers.cli import err
from triton_transformers.settings import Settings, UserError
from triton_transformers.triton import Triton

# `make loadtest` and `make tune` hold the same lock.
ANOTHER_COMPARISON = "another comparison or search is running against this stack"
# Ends the name of a folder that is not complete yet.
WRITING = ".writing"


@contextlib.contextmanager
def exclusive(path: Path, holder: str, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a folder or file; wait for it, or raise UserError. `holder` names the other command in messages.

    The kernel releases the lock with the process, so a killed command leaves no stale lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path, os.O_RDONLY if path.is_dir() else os.O_CREAT | os.O_RDWR, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise UserError(f"{holder}: wait for it, or stop it") from None
            err.print(f"{holder}: waiting until it ends")  # a status shows on a terminal only
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough: gevent, which Locust loads, delays it
        os.close(lock)


# Kind of a measurement that holds the lock -> the beginning of a sentence about it, and the end if it loads models.
RELOADS = " It loads {system} in one mode after the other, so {system} may not be ready for seconds."
KINDS = {
    "comparison": ("A comparison of", RELOADS),
    "search": ("A search for the best configuration of", RELOADS),
    "overload": ("A measurement of an overload of", ""),
}


@dataclass(frozen=True)
class Measurement:
    """The note of a command that holds the lock of comparisons, in its file: the page and `make status` read it."""

    kind: str  # one of KINDS
    system: str
    doing: str = ""
    ends_at: float = 0.0  # 0: unknown

    @property
    def reloads(self) -> bool:
        """Return whether it loads the system in one mode after another."""
        return bool(KINDS[self.kind][1])

    def write(self, lock: Path) -> None:
        with contextlib.suppress(OSError), lock.open("r+") as file:  # a full disk must not end the measurement
            file.write(json.dumps(asdict(self)) + "\n")
            file.truncate()

    @classmethod
    def read(cls, lock: Path) -> Measurement | None:
        """Return what the holder of the lock does; None if nobody holds it, or it wrote nothing."""
        try:
            with lock.open() as file:
                if not (line := file.readline()):
                    return None  # do not touch the lock, which another command may want now
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    held = cls(**json.loads(line))
                    return held if held.kind in KINDS else None
        except (OSError, ValueError, TypeError):  # the last two: another release wrote it
            pass
        return None  # its holder was killed

    def __str__(self) -> str:
        begin, end = KINDS[self.kind]
        doing = f" ({self.doing})" if self.doing else ""
        minutes = max(1, math.ceil((self.ends_at - time.time()) / 60))
        left = f", for about {minutes} more minute{'s' * (minutes > 1)}" if self.ends_at else ""
        return f"{begin} {self.system} is running{doing}{left}.{end.format(system=self.system)}"


def comparison_lock(settings: Settings) -> Path:
    """Return the file whose lock a comparison against this server holds."""
    return settings.reports / f".lock-{Triton(settings.url('TRITON_HTTP_PORT')).name}"


@contextlib.contextmanager
def complete_file(path: Path) -> Iterator[Path]:
    """Yield the path of a file to write, and move it to `path`. After an error the file is deleted.

    An OSError names `path`: that of a full disk names no file.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    with complete_file(path) as file:
        file.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def complete_folder(target: Path, latest: str) -> Iterator[Path]:
    """Yield a folder to fill, move it to `target`, and let the link `latest` beside it point there.

    If a file cannot be written, as on a full disk, keep the files that are complete, and raise UserError. After another
    error the folder is deleted. The link then stays as it was.
    """
    work = target.with_name(f".{target.name}{WRITING}")
    try:
        work.mkdir(parents=True)
        yield work
        work.rename(target)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or error}. {_kept(work, target)}") from None
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    link = target.with_name(f".{latest}.new")
    link.unlink(missing_ok=True)
    link.symlink_to(target.name)
    os.replace(link, target.with_name(latest))


def _kept(work: Path, target: Path) -> str:
    """Keep the complete files of a folder that cannot be completed. Return a sentence that names them."""
    remedy = "Free space there, or set REPORTS to another folder"
    with contextlib.suppress(OSError):
        if kept := sorted(path.name for path in work.iterdir()):
            work.rename(target)
            return f"These files are complete there: {', '.join(kept)}. {remedy}"
        work.rmdir()
    return remedy


def write_json(content: object, path: Path) -> None:
    write_atomically(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
