"""Starts a program again that supervisord has given up, for ever: what it lacks may come back.

supervisord runs this as a listener, which gets an event for each program that it gives up.
"""

from __future__ import annotations

import contextlib
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
        time.sleep(pauses[name])
        with contextlib.suppress(OSError, xmlrpc.client.Error, UserError):  # supervisord ends, or cannot start it yet
            supervisor.start_program(name)
        tried[name] = time.monotonic()
        childutils.listener.ok()


if __name__ == "__main__":
    main()
