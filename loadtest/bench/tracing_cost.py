"""The cost of TRACE=1: a server that traces each request beside one that traces none, under the same load in turns."""

from __future__ import annotations

import shutil
from functools import partial

from loadtest.bench.clients import Clients, measure
from loadtest.bench.tables import compare, total
from loadtest.server.own_stack import OwnStack, folder
from scripts.stack.systems import ServedSystems
from triton_transformers.cli import out

ROUNDS = 6
CLIENTS = 32
WARMUP_S, WINDOW_S = 2.0, 8.0


def run() -> None:
    with folder() as work:
        plain, traced = (
            OwnStack(work / trace, MODEL_REPOSITORY=f"{work}/models", SYSTEMS="embedding", TRACE=trace)
            for trace in ("0", "1")
        )
        plain.command("models")
        with plain.serving():
            # Both servers compute with the same engine.
            source, target = (ServedSystems(stack.state).engines for stack in (plain, traced))
            shutil.copytree(source, target)
            with traced.serving():
                ways = {"untraced": partial(figures, plain), "traced": partial(figures, traced)}
                digits = {"requests/s": 0, "CPU time per request, ms": 2}
                compare(ways, ROUNDS, f"{CLIENTS} clients", digits, "ratio")
    out.print(
        f"{CLIENTS} clients, one text each; median (minimum to maximum) of {ROUNDS} interleaved rounds of "
        f"{WINDOW_S:.0f} s\nCPU time: of all programs of the stack, with the receiver of traces"
    )


def figures(stack: OwnStack) -> dict[str, float]:
    """Measure one window of a running stack."""
    before = used(stack)
    window = measure(Clients(stack.url("TRITON_HTTP_PORT"), "triton", CLIENTS, WARMUP_S, WINDOW_S)).check()
    requests, cpu_s = (later - earlier for later, earlier in zip(used(stack), before, strict=True))
    return {"requests/s": window.rate, "CPU time per request, ms": 1000 * cpu_s / requests}


def used(stack: OwnStack) -> tuple[float, float]:
    """Return how many requests Triton has answered, and the CPU time of all programs of the stack."""
    page = stack.metrics()
    times = [process.cpu_times() for process in stack.leader().children(recursive=True)]
    return total(page, 'nv_inference_request_success{model="encoder"'), sum(time.user + time.system for time in times)
