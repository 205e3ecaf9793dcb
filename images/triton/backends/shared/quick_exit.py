"""End the Python process of a model without Python's teardown.

With torch, the teardown takes a second of CPU time. It also frees objects after Triton has closed the shared memory
that they use. If Python frees a response sender then, the process crashes, or it waits for ever for a lock in that
memory and Triton never unloads the model.
"""

from __future__ import annotations

import atexit
import os
import sys

from shared.stub_memory import stub_arguments


def skip_teardown() -> None:
    """Skip the teardown of this process, and the exit functions that are registered already."""
    if stub_arguments("self"):  # not in a test, whose exit code would be lost
        atexit.register(exit_now)


def exit_now() -> None:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)
