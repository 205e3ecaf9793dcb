"""End this process rather than answer a batch that Triton has given up: docs/triton-faults.md#stalled-processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import triton_python_backend_utils as pb_utils

from shared.stub_memory import StubMemory, UnknownLayoutError, stub_arguments

Responses = TypeVar("Responses")


def guarded(
    execute: Callable[[Sequence[pb_utils.InferenceRequest]], Responses], model: str
) -> Callable[[Sequence[pb_utils.InferenceRequest]], Responses]:
    """Return `execute` with a check before and after each batch."""
    try:
        memory = StubMemory(stub_arguments("self"))
    except (UnknownLayoutError, OSError):  # the watchdog logs it
        return execute

    def execute_guarded(requests: Sequence[pb_utils.InferenceRequest]) -> Responses:
        check(memory, model)
        try:
            return execute(requests)
        finally:
            check(memory, model)

    return execute_guarded


def check(memory: StubMemory, model: str) -> None:
    """End the process if Triton has given up on its batch; else make Triton wait for at least another second.

    The order matters: after report_alive(), Triton cannot give up in the moment before the responses leave.
    """
    memory.report_alive()
    if memory.is_given_up():
        os.write(2, f"{model}: Triton gave up on this process while it stood still; ending it\n".encode())
        os._exit(1)
