"""Let Triton finish the requests that it has accepted, and refuse new ones, before it gets SIGTERM.

TRITON-FAULTS.md#requests-lost-at-sigterm

`python3 -m serving.watchdog.drain SECONDS` waits before that, until clients know that this server leaves (Kubernetes'
preStop hook).
Standard library only: it runs in every image.
"""

from __future__ import annotations

import signal
import sys
import time
from graphlib import TopologicalSorter

from serving.watchdog.tritonserver import client
from triton_transformers.triton import Triton, TritonError, called

# Seconds for the requests in flight. Longer requests end with the server.
LIMIT_S = 60
POLL_S = 0.1


def drain(triton: Triton) -> None:
    """Unload every model, each before the models that it calls, and wait until their requests have ended."""
    models = {*triton.models_in("READY")}
    order = TopologicalSorter({model: () for model in models})
    for caller in models:
        for model in {*called(triton.config(caller))} & models - {caller}:
            order.add(model, caller)
    order.prepare()
    while order.is_active():
        step = order.get_ready()
        for model in step:
            triton.call(f"/v2/repository/models/{model}/unload", {})
        while {*triton.models_in("UNLOADING")} & {*step}:
            time.sleep(POLL_S)
        order.done(*step)


def main() -> None:
    time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0)
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"drain: requests are still in flight after {LIMIT_S} s"))
    signal.alarm(LIMIT_S)
    try:
        drain(client())
    except TritonError as error:
        sys.exit(f"drain: {error}")


if __name__ == "__main__":
    main()
