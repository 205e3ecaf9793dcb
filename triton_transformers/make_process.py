"""A `make` that runs in the background, for programs that drive the stack from outside."""

from __future__ import annotations

import os
import subprocess

from triton_transformers.settings import ROOT


class Make(subprocess.Popen[str]):
    """A `make` in a process group of its own, so that it can get Ctrl-C alone. Its output is in one pipe."""

    def __init__(self, target: str, environment: dict[str, str]) -> None:
        super().__init__(
            # A shell that runs its caller in the background ignores SIGINT, and children inherit that. `env` restores
            # it, because preexec_fn needs a fork, in which the threads of gRPC may crash.
            ["env", "--default-signal=INT", "make", *target.split()],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def end(self, number: int, timeout: float | None = None) -> str:
        """Send a signal to the whole group, as a terminal does; return what the command printed."""
        os.killpg(self.pid, number)
        return self.communicate(timeout=timeout)[0]
