"""End the Python process of a model without Python's teardown.

With torch, the teardown takes a second of CPU time at each unload. It also frees objects after Triton has closed the
shared memory that they use: a response sender freed then crashes the process, or waits for ever for a lock in that
memory, and the unload of its model with it.
"""

from __future__ import annotations

import atexit
import os
import sys

from shared.stub_memory import stub_arguments


def leave_out_teardown() -> None:
    """Call this before other modules register their functions for the exit, and those still run."""
    if stub_arguments("self"):  # not in a test, whose exit code would be lost
        atexit.register(end)


def end() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
