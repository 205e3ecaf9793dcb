"""Look after the memory that Triton shares with each Python process.

TRITON-FAULTS.md#stalled-processes, TRITON-FAULTS.md#readable-memory, TRITON-FAULTS.md#left-over-memory.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping

from serving.triton.stub_memory import SHARED_MEMORY, StubMemory, UnknownLayoutError
from serving.watchdog.tritonserver import POLL_S, Stubs, log, start_time, stat_fields

# How often to tell Triton that a process is alive. Triton gives up on one of which it hears nothing for a second.
ALIVE_POLL_S = 0.2
# A process may stay stopped by a signal for this many of these polls.
STOPPED_POLLS = 25


class Region:
    """The shared memory of a Python process, which holds the tensors of requests."""

    def __init__(self, pid: int, arguments: list[str]) -> None:
        """Hide it from other users of this machine."""
        self.pid = pid
        self.path = SHARED_MEMORY / arguments[2]
        self.path.chmod(0o600)
        self.stopped_polls = 0
        self.loaded = False
        self.memory: StubMemory | None = None
        try:
            self.memory = StubMemory(arguments)
        except UnknownLayoutError as error:
            log(f"Triton may give up on process {pid} if it stands still for a second: {error}")

    def keep_alive(self) -> None:
        """Let Triton wait for the process while it exists, and continue it if it was stopped for long.

        A load may fail: Triton then keeps no request of the process, and the client may repeat the load.
        """
        fields = stat_fields(self.pid)
        if not fields or self.memory is None:
            return
        self.loaded = self.loaded or self.memory.is_loaded()
        if not self.loaded:
            return
        self.memory.report_alive()
        self.stopped_polls = self.stopped_polls + 1 if fields[0] == "T" else 0
        if self.stopped_polls >= STOPPED_POLLS:
            log(f"process {self.pid} was stopped; continuing it, because Triton waits for it")
            os.kill(self.pid, signal.SIGCONT)
            self.stopped_polls = 0

    def remove(self) -> None:
        """Remove the memory of a process that has ended, 64 MiB."""
        if self.memory:
            self.memory.close()
        self.path.unlink(missing_ok=True)


class Regions:
    """The shared memory of each of the server's Python processes."""

    def __init__(self) -> None:
        self.known: dict[int, Region] = {}

    def poll(self, stubs: Mapping[int, list[str]]) -> None:
        """Find the memory of new processes, and remove that of processes that have ended."""
        for pid in self.known.keys() - stubs.keys():
            self.known.pop(pid).remove()
        for pid in stubs.keys() - self.known.keys():
            with contextlib.suppress(OSError):  # the process has ended
                self.known[pid] = Region(pid, stubs[pid])

    def keep_alive_until(self, end: threading.Event) -> None:
        """Report the processes as alive until the event is set."""
        while not end.wait(ALIVE_POLL_S):
            for region in list(self.known.values()):
                with contextlib.suppress(OSError, ValueError):  # the process has ended
                    region.keep_alive()


def keep_regions(stubs: Stubs, started: str) -> None:
    """Look after the memory of the server's Python processes until the server has ended.

    Use two threads: Triton gives up within a second, and the search for the processes of a busy server may take longer.
    """
    regions, end = Regions(), threading.Event()
    threading.Thread(target=regions.keep_alive_until, args=(end,), daemon=True).start()
    while start_time(stubs.server) == started:
        with contextlib.suppress(OSError, ValueError):  # the server is starting or stopping
            regions.poll(stubs.search())
        time.sleep(POLL_S)
    with stubs.new_search:  # so that nobody waits for one
        stubs.new_search.notify_all()
    end.set()
    regions.poll({})
