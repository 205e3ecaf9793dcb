"""Keep the measurements of a load in the folder TRITON_ENGINE_CACHE, so that the next load of the model reads them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnxruntime as ort

Measured = dict[str, Any]


def recall_or_measure(
    name: str, key: Callable[[], Measured], measure: Callable[[], Measured], is_complete: Callable[[Measured], bool]
) -> Measured:
    """Return the kept measurement with this key. If it is missing or incomplete, measure, and keep the result.

    One process measures at a time: another would take CPU from it, and the other instances want the same result.
    """
    folder = _folder()
    if folder is None:
        return measure()
    depends_on = key()
    digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()
    # A comparison and a search load a model with several numbers of threads in turn, so each has a file of its own.
    file = folder / f"{name}-{digest[:12]}.json"
    if (measured := _read(file, is_complete)) is None:
        with _lock(folder):
            if (measured := _read(file, is_complete)) is None:
                measured = measure()
                unfinished = file.with_suffix(f".{os.getpid()}")
                with contextlib.suppress(OSError):  # a full disk costs the next load some seconds, no more
                    try:
                        unfinished.write_text(json.dumps({"key": depends_on} | measured, indent=1) + "\n")
                        unfinished.replace(file)
                    finally:
                        unfinished.unlink(missing_ok=True)
    return measured


def model_and_machine(path: Path) -> Measured:
    """Return what each measurement of an ONNX model depends on: its files, the CPU, and the versions of the engines."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "model": digest,
        "files": [file for file in files(path.parent) if file[0] != path.name],
        "cpu": cpu(),
        "versions": [ort.__version__, _version_of_openvino()],
    }


def files(folder: Path) -> list[list[str | int]]:
    """Return the names, sizes and times of a folder's files, which change with the files."""
    found = sorted(file for file in folder.iterdir() if file.is_file())
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in found]


def cpu() -> dict[str, str]:
    """Return the fields of /proc/cpuinfo that name the model of the first CPU, on x86 and on ARM."""
    first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    lines = (line.partition(":") for line in first.splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    return {
        name: fields[name]
        for name in ("model name", "flags", "CPU implementer", "CPU part", "Features")
        if name in fields
    }


def _version_of_openvino() -> str:
    try:
        return importlib.metadata.version("openvino")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _folder() -> Path | None:
    if not (setting := os.environ.get("TRITON_ENGINE_CACHE")):
        return None
    folder = Path(setting)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder if os.access(folder, os.W_OK) else None


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Let one process at a time go on. The lock ends with its process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: several processes may measure at once
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read(file: Path, is_complete: Callable[[Measured], bool]) -> Measured | None:
    """Return the measurement in a file, or None if it is missing, damaged or incomplete."""
    with contextlib.suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
        measured: Measured = json.loads(file.read_text())
        if is_complete(measured):
            return measured
    return None
