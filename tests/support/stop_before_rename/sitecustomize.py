"""Stop a process before it moves an assembled model into place. Python imports this at its start, from PYTHONPATH."""

import os
import signal
import sys


def stop(event: str, arguments: tuple) -> None:
    if event == "os.rename" and [".assembling-" in str(path) for path in arguments[:2]] == [True, False]:
        os.kill(os.getpid(), signal.SIGSTOP)


sys.addaudithook(stop)
