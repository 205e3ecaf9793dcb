"""What the stand-ins of the Neuron libraries saw: a JSON object a line, in the file that NEURON_STAND_IN_LOG names."""

from __future__ import annotations

import fcntl
import json
import os


def record(event: str, **seen: object) -> None:
    """One write of one line to a file opened for appending: those of several processes and threads do not mix."""
    path = os.environ.get("NEURON_STAND_IN_LOG")
    if not path:
        return
    line = json.dumps({"event": event, "pid": os.getpid(), "visible": visible_cores()} | seen) + "\n"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def take_cores() -> None:
    """As the runtime does when the first model is loaded: of those that another process has, it says so and fails."""
    path = os.environ.get("NEURON_STAND_IN_LOG")
    if not path or _TAKEN:
        return
    first, _, last = (_VISIBLE or f"0-{MACHINE - 1}").partition("-")
    taken = [open(f"{path}.core{core}", "w") for core in range(int(first), int(last or first) + 1)]  # noqa: SIM115
    try:
        for core in taken:
            fcntl.flock(core, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RuntimeError(f"NRT: NeuronCore(s) not available - Requested:nc{first}-nc{last or first}") from None
    _TAKEN.extend(taken)


def visible_cores() -> str | None:
    """As the variable stood when the first of the stand-ins was imported: the runtime reads it once."""
    return _VISIBLE


def core_count() -> int | None:
    """How many cores this process has; None: all of the machine's."""
    if _VISIBLE is None:
        return None
    first, _, last = _VISIBLE.partition("-")
    return int(last or first) - int(first) + 1


MACHINE = 16
_TAKEN: list = []
_VISIBLE = os.environ.get("NEURON_RT_VISIBLE_CORES")
