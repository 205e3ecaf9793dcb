"""Reload a model whose Python process crashed: TRITON-FAULTS.md#crashed-processes."""

import time
from dataclasses import dataclass

from serving.watchdog.tritonserver import log, reload, required_processes
from triton_transformers.triton import Triton

# An unload looks like a crash until it is done, so this many polls must agree before a reload.
POLLS = 2
# A model that crashes again and again is reloaded less and less often, up to this pause.
MAX_PAUSE_S = 60.0
# A model that lived this long since its last reload starts again with the shortest pause.
FORGIVEN_AFTER_S = 300.0


@dataclass
class Suspect:
    """A model that lost a process: the processes that it had left then, and the polls since then that found no more."""

    survivors: set[int]
    polls: int = 0


class Crashes:
    """The models that lost a process, and when each may be reloaded."""

    def __init__(self, triton: Triton) -> None:
        self.triton = triton
        self.known: dict[int, str] = {}
        self.suspects: dict[str, Suspect] = {}
        self.crashes: dict[str, int] = {}
        self.reloaded: dict[str, float] = {}

    def poll(self, stubs: dict[int, str]) -> None:
        """Compare the living stubs with those of the last poll; reload models that stay short of processes.

        A process that is younger than the loss means that another client loads the model. A reload now would wait in
        Triton for that load to end and then undo it, because it carries the configuration from before.
        """
        living: dict[str, set[int]] = {model: set() for model in self.suspects.keys() | {*self.known.values()}}
        for pid, model in stubs.items():
            living.setdefault(model, set()).add(pid)
        for model in {model for pid, model in self.known.items() if pid not in stubs}:
            # Only those of the last poll: a load may have started a process since.
            self.suspects[model] = Suspect(living[model] & self.known.keys())
        self.known = stubs
        for model, suspect in list(self.suspects.items()):
            if len(living[model]) >= required_processes(self.triton, model):  # it was reloaded or unloaded
                del self.suspects[model]
            elif living[model] <= suspect.survivors:
                suspect.polls += 1
                pause = min(MAX_PAUSE_S, 2.0 ** self.crashes.get(model, 0))
                if suspect.polls > POLLS and time.monotonic() >= self.reloaded.get(model, 0) + pause:
                    self.reload(model)

    def reload(self, model: str) -> None:
        if time.monotonic() - self.reloaded.get(model, 0) > FORGIVEN_AFTER_S:
            self.crashes[model] = 0
        self.crashes[model] = self.crashes.get(model, 0) + 1
        log(f"a process of model '{model}' crashed; reloading the model")
        try:
            reload(self.triton, model)
            log(f"model '{model}' is back")
        finally:
            self.reloaded[model] = time.monotonic()
