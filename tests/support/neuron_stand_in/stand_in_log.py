"""Logs the calls of the stand-ins of the Neuron libraries to the file NEURON_STAND_IN_LOG, one JSON object per line."""

from __future__ import annotations

import fcntl
import json
import os


def record(event: str, **details: object) -> None:
    """Append a line in one write, so that lines of several processes and threads do not mix."""
    path = os.environ.get("NEURON_STAND_IN_LOG")
    if not path:
        return
    line = json.dumps({"event": event, "pid": os.getpid(), "visible": visible_cores()} | details) + "\n"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def take_cores() -> None:
    """Lock the visible cores, and fail if another process has one, as the runtime does at the first load."""
    path = os.environ.get("NEURON_STAND_IN_LOG")
    if not path or _LOCKS:
        return
    first, _, last = (_VISIBLE or f"0-{MACHINE_CORES - 1}").partition("-")
    locks = [open(f"{path}.core{core}", "w") for core in range(int(first), int(last or first) + 1)]  # noqa: SIM115
    try:
        for lock in locks:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RuntimeError(f"NRT: NeuronCore(s) not available - Requested:nc{first}-nc{last or first}") from None
    _LOCKS.extend(locks)


def visible_cores() -> str | None:
    """Return the variable's value at the import of the first stand-in, because the runtime reads it once."""
    return _VISIBLE


def core_count() -> int | None:
    """Return the number of this process's cores, or None for all of the machine's."""
    if _VISIBLE is None:
        return None
    first, _, last = _VISIBLE.partition("-")
    return int(last or first) - int(first) + 1


MACHINE_CORES = 16
_LOCKS: list = []
_VISIBLE = os.environ.get("NEURON_RT_VISIBLE_CORES")
