"""Exit with 0 if Triton is ready, each of its systems too, and each model has all its Python processes.

TRITON-FAULTS.md#crashed-processes. Only the standard library: this runs in every image.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

from serving.watchdog.missing_systems import required_systems
from serving.watchdog.tritonserver import client, models_of, required_processes, stubs_of
from triton_transformers.triton import Triton, TritonError

BACKENDS = Path(os.environ.get("TRITON_HOME", "/opt/tritonserver")) / "backends"
# Docker and Kubernetes give up after five seconds, and would not show the message of a check that they end.
TIMEOUT_S = 4


def is_server(comm: Path) -> bool:
    try:
        return comm.read_text() == "tritonserver\n"
    except OSError:  # the process has ended
        return False


def living_processes() -> Counter[str]:
    """Return how many Python processes each model has."""
    servers = [int(comm.parent.name) for comm in Path("/proc").glob("[0-9]*/comm") if is_server(comm)]
    return Counter(model for server in servers for model in models_of(stubs_of(server), instances=True).values())


def short_of_processes(triton: Triton, living: Counter[str]) -> list[str]:
    """Return the loaded models that have fewer Python processes than instances."""
    return [name for name in triton.models_in("READY") if is_short(triton, name, living[name])]


def is_short(triton: Triton, model: str, living: int) -> bool:
    try:
        return runs_python(triton, model) and living < required_processes(triton, model)
    except TritonError as error:
        if error.status is None or model in triton.models_in("READY"):
            raise
        return False  # a client has unloaded it since the check began


def runs_python(triton: Triton, model: str) -> bool:
    """Return whether the model's backend is Triton's `python`, or is written in Python itself."""
    backend = triton.config(model).get("backend", "")
    return backend == "python" or (BACKENDS / backend / "model.py").exists()


def give_up(signum: int, frame: FrameType | None) -> None:
    sys.exit(f"not checked within {TIMEOUT_S} s, because Triton or this machine is too slow")


def main() -> None:
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(TIMEOUT_S)
    triton = client()
    path = ""
    try:
        for path in ("/v2/health/ready", *(f"/v2/models/{name}/ready" for name in required_systems())):
            triton.call(path)
        path = "/v2/repository/index"
        short = short_of_processes(triton, living_processes())
    except (OSError, TritonError) as error:
        sys.exit(f"{path}: {error}")
    if short:
        sys.exit(f"these models lack a Python process until the watchdog has reloaded them: {', '.join(short)}")


if __name__ == "__main__":
    main()
