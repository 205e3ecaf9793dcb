"""End a Python process whose end Triton waits for in vain while a model loads: TRITON-FAULTS.md#endless-loads."""

import os
import signal
import time
from collections.abc import Callable

from serving.watchdog.tritonserver import (
    ANY,
    POLL_S,
    STOPPED,
    Stubs,
    awaited_by,
    cpu_ticks,
    log,
    models_of,
    required_processes,
)
from triton_transformers.triton import Triton, TritonError

# How often to look at the threads of the server; the list of its processes is up to a second old. If a process goes on
# meanwhile, it may write into memory that Triton has given up, and Triton may crash: so the search is quick.
HUNG_POLL_S = 0.5
# For this many polls Triton must have waited for a process to end that does nothing, before the process is ended.
HUNG_POLLS = 3
# The same while a new process replaces one of a ready model, and the kernel does not show for which one Triton waits:
# the old one may take seconds to end on a busy machine, and the new one is idle until requests come.
REPLACED_POLLS = 20
# A process of a ready model that lived for this many polls without such a wait has finished loading.
SETTLED_POLLS = 120


class HungLoads:
    """The search for processes that Triton gave up on, but waits for."""

    def __init__(self, triton: Triton) -> None:
        self.triton = triton
        self.loaded: set[int] = set()  # the processes of models that finished loading
        self.ages: dict[int, int] = {}  # pid -> the polls in which it lived and Triton waited for no end
        self.idle: dict[int, tuple[int, int]] = {}  # pid -> its CPU ticks, and for how many polls they have not changed

    def has_loading(self, stubs: dict[int, str]) -> bool:
        """Return whether a model of these processes may still be loading."""
        self.loaded &= stubs.keys()
        return bool(stubs.keys() - self.loaded)

    def poll(self, stubs: dict[int, str], awaited: set[int], ticks: Callable[[int], int]) -> list[int]:
        """Return the processes to end. `awaited`: those whose end threads of the server wait for."""
        self.loaded &= stubs.keys()
        self.ages = {pid: self.ages.get(pid, 0) + (not awaited) for pid in stubs}
        replaced: set[int] = set()
        for model in {model for pid, model in stubs.items() if pid not in self.loaded}:
            own = {pid for pid, name in stubs.items() if name == model}
            try:
                required = required_processes(self.triton, model)
            except TritonError as error:
                if error.status is not None:
                    raise
                required = 0  # with --load-model the server answers only after all loads
            # A reload starts new processes beside the old ones. A model with several versions always has more.
            if required and (len(own) == required or min(self.ages[pid] for pid in own) >= SETTLED_POLLS):
                self.loaded |= own
            elif required and ANY in awaited:
                replaced |= own
        before, self.idle = self.idle, {}
        for pid in stubs.keys() - self.loaded if ANY in awaited else awaited & stubs.keys() - self.loaded:
            used, (last, polls) = ticks(pid), before.get(pid, (-1, 0))
            self.idle[pid] = (used, REPLACED_POLLS if used == STOPPED else polls + 1 if used == last != -1 else 0)
        limits = {pid: REPLACED_POLLS if pid in replaced else HUNG_POLLS for pid in self.idle}
        return sorted(pid for pid, (_, polls) in self.idle.items() if polls >= limits[pid])


def end_hung_loads(processes: Stubs, triton: Triton) -> None:
    """End each process that Triton waits for in vain. The load then fails, and the client may repeat it."""
    hung = HungLoads(triton)
    pause = POLL_S
    while True:
        time.sleep(pause)
        try:
            stubs = models_of(processes.latest, instances=True)
            # Reading the state of every thread takes milliseconds, so do it only during a load.
            loading = hung.has_loading(stubs)
            pause = HUNG_POLL_S if loading else POLL_S
            for pid in hung.poll(stubs, awaited_by(processes.server), cpu_ticks) if loading else ():
                log(f"process {pid} of model '{stubs[pid]}' did not report to Triton in time; ended it")
                os.kill(pid, signal.SIGKILL)
        except (OSError, ValueError, TritonError):
            pass  # the server is starting or stopping: the next poll tries again
