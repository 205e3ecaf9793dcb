"""Drills: memory, disk or descriptors run out."""

from __future__ import annotations

import contextlib
import resource
import time
from pathlib import Path

import psutil

from loadtest.drills.clients import RATE
from loadtest.drills.commands import check_failed, restored, started_comparison
from loadtest.drills.crashes import SERVER
from loadtest.drills.drill_stack import BrokenError, DrillStack, NotRunError
from loadtest.drills.harness import Bound, drill
from triton_transformers.corpus import MIXED
from triton_transformers.triton import TritonError

SMALL_BYTES = 8 << 20
HELD_S = 5.0
# uvloop closes connections for which the process has no descriptor.
NOT_ACCEPTED = Bound(gateway=int(RATE * HELD_S))


def fill(folder: Path) -> Path:
    """Write a file until the file system is full."""
    path = folder / "filler"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    return path


@drill(
    "the disk of the reports fills up: `make loadtest` prints its table, fails, and restores batching",
    says=("requests of embedding", "cannot be written: No space left on device"),
)
def reports_full(stack: DrillStack) -> None:
    with restored(stack), stack.small_disk("reports", 64 << 10) as folder:
        command = started_comparison(stack)
        fill(folder)
        check_failed("`make loadtest` on a full disk", command, stack.printed_by(command))


@drill("no space for logs and for Prometheus' data, for 5 s")
def state_full(stack: DrillStack) -> None:
    if not stack.has_small_state:
        raise NotRunError("only root may mount a small file system")
    filler = fill(stack.state)
    try:
        time.sleep(HELD_S)
    finally:
        filler.unlink()


@drill("no space for models: `make models` fails, and leaves none half-written", says=("could not be written",))
def models_full(stack: DrillStack) -> None:
    with stack.small_disk("small", SMALL_BYTES) as folder:
        stack.refused("models", MODEL_REPOSITORY=str(folder / "models"))
        if list(folder.rglob("*.onnx")):
            raise BrokenError("`make models` left a model behind")


@drill("the Python process of the encoder gets no more memory (RLIMIT_AS) for batches of 64 long texts", SERVER)
def memory_limited(stack: DrillStack) -> None:
    stub = stack.stub("encoder")
    stub.rlimit(resource.RLIMIT_AS, (stub.memory_info().rss, resource.RLIM_INFINITY))
    tensor = {"name": "input_text", "shape": [64, 1], "datatype": "BYTES", "data": [max(MIXED.texts, key=len)] * 64}
    refused = 0
    try:
        for _ in range(3):
            try:
                stack.triton.infer("embedding", {"inputs": [tensor]}, timeout=20)
            except TritonError:
                refused += 1
    finally:
        with contextlib.suppress(psutil.Error):  # the process has crashed
            stub.rlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if not refused:
        raise NotRunError("the process needed no more memory")


@drill(f"the gateway may open no more files or connections for {HELD_S:g} s", NOT_ACCEPTED)
def descriptors_limited(stack: DrillStack) -> None:
    gateway = stack.program("gateway")
    before = gateway.rlimit(resource.RLIMIT_NOFILE)
    gateway.rlimit(resource.RLIMIT_NOFILE, (gateway.num_fds(), before[1]))
    try:
        time.sleep(HELD_S)
    finally:
        gateway.rlimit(resource.RLIMIT_NOFILE, before)
