"""Restart programs that supervisord gave up, because what they lack may come back.

supervisord runs this as a listener, which gets an event for each program that it gives up.
"""

from __future__ import annotations

import http.client
import os
import time
import xmlrpc.client
from pathlib import Path

from supervisor import childutils

from scripts.stack.local.supervisor import Supervisor
from triton_transformers.settings import UserError

# The pause before a program starts again, doubled each time until it has run for CALM_S.
FIRST_S, LONGEST_S, CALM_S = 5, 30, 60


def main() -> None:
    supervisor = Supervisor(Path(os.environ["STATE"]))
    pauses: dict[str, float] = {}
    tried: dict[str, float] = {}
    while True:
        _, payload = childutils.listener.wait()
        name = childutils.get_headers(payload)["processname"]
        is_again = time.monotonic() - tried.get(name, -CALM_S) < CALM_S
        pauses[name] = min(2 * pauses[name], LONGEST_S) if is_again else FIRST_S
        while not is_started(supervisor, name, pauses[name]):
            pauses[name] = min(2 * pauses[name], LONGEST_S)
        tried[name] = time.monotonic()
        childutils.listener.ok()


def is_started(supervisor: Supervisor, name: str, pause: float) -> bool:
    """Start the program after the pause. Return whether supervisord could."""
    time.sleep(pause)
    try:
        supervisor.start_program(name)
    except (OSError, http.client.HTTPException, xmlrpc.client.Error, UserError):
        return False
    return True


if __name__ == "__main__":
    main()
