"""What the stand-ins of the Neuron libraries saw: a JSON object a line, in the file that NEURON_STAND_IN_LOG names."""

from __future__ import annotations

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


def visible_cores() -> str | None:
    """As the variable stood when the first of the stand-ins was imported: the runtime reads it once."""
    return _VISIBLE


def core_count() -> int | None:
    """How many cores this process has; None: all of the machine's."""
    if _VISIBLE is None:
        return None
    first, _, last = _VISIBLE.partition("-")
    return int(last or first) - int(first) + 1


_VISIBLE = os.environ.get("NEURON_RT_VISIBLE_CORES")
