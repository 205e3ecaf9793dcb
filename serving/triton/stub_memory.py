"""Read and write the memory through which Triton talks to one of its Python processes.

Standard library only, because the watchdog uses it in every image.
"""

from __future__ import annotations

import mmap
import platform
import struct
from collections.abc import Sequence
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
# The layout of python_backend on x86-64, for TRITON-FAULTS.md#stalled-processes: each object follows a counter of
# its users, and a handle is the offset of that counter.
COUNTER_BYTES = 16
# IPCControlShm: stub_health, parent_health, and the handles of five queues, the first of which leads to the process.
CONTROL = struct.Struct("=BB86x5q")
# MessageQueueShm: size, handle of the messages, where the next message is written, and where the next one is read.
QUEUE = struct.Struct("=104xQq2i")


def stub_arguments(pid: int | str) -> list[str]:
    """Return the command line of one of Triton's living Python processes, or an empty list for any other process.

    Triton starts it as <stub> <repository>/<model>/<version>/model.py <shared memory region> <size> <growth>
    <pid of the server> <folder of the Python backend> <handle of IPCControlShm> <name> ...
    """
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
    return arguments if len(arguments) > 8 and arguments[0].endswith("triton_python_backend_stub") else []


class UnknownLayoutError(Exception):
    """The memory is not laid out as by the releases above, so nothing may be written there."""


class StubMemory:
    """The shared memory of one Python process."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Map the memory of the process with this command line."""
        if not arguments:
            raise UnknownLayoutError("this is no process of Triton's Python backend")
        path = SHARED_MEMORY / arguments[2]
        with path.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 0)
        try:
            self.control = int(arguments[7]) + COUNTER_BYTES
            stub_health, parent_health, *queues = CONTROL.unpack_from(self.memory, self.control)
            sizes = {self._queue_size(queue) for queue in queues}
        except (ValueError, struct.error):  # no number, or an object that would lie outside of the memory
            sizes = {0}
        if platform.machine() != "x86_64" or len(sizes) > 1 or 0 in sizes or {stub_health, parent_health} - {0, 1}:
            self.close()
            raise UnknownLayoutError(f"{path} is not laid out as by Triton 24.10 to 26.07")
        self.to_process = queues[0] + COUNTER_BYTES

    def _queue_size(self, handle: int) -> int:
        """Return how many messages the queue holds at most; 0 if there is no queue."""
        size, messages, head, tail = QUEUE.unpack_from(self.memory, handle + COUNTER_BYTES)
        return size if 0 <= head < size and 0 <= tail < size and 0 < messages < len(self.memory) else 0

    def report_alive(self) -> None:
        """Set the flag that Triton clears each second while it waits. Triton gives up if it is still clear then."""
        self.memory[self.control] = 1

    def is_loaded(self) -> bool:
        """Return whether Triton has sent more than the request to load the model; may be wrong each 500th batch."""
        head, _ = self._ends()
        return head > 1

    def is_given_up(self) -> bool:
        """Return whether Triton has given up on the batch that the process executes. Only the process may ask.

        After a batch, Triton sends the process nothing until it has the response or gives up.
        """
        head, tail = self._ends()
        return head != tail

    def _ends(self) -> tuple[int, int]:
        """Return where Triton writes its next message to the process, and where the process reads it."""
        *_, head, tail = QUEUE.unpack_from(self.memory, self.to_process)
        return head, tail

    def close(self) -> None:
        self.memory.close()
