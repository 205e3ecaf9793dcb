"""The cost of TRACE=1: a server that traces each request beside one that traces none, under the same load in turns."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.clients import Clients, measure
from bench.tables import ratios, spread, total
from scripts.stack.systems import ServedSystems
from triton_transformers.cli import err, out, print_table
from triton_transformers.own_stack import command, environment, folder, server
from triton_transformers.triton import metrics_page

ROUNDS = 6
CLIENTS = 32
WARMUP_S, WINDOW_S = 2.0, 8.0
PLAIN, TRACED = "untraced", "traced"


@dataclass(frozen=True)
class Server:
    """A running stack."""

    variables: dict[str, str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.variables['TRITON_HTTP_PORT']}"

    @property
    def state(self) -> Path:
        return Path(self.variables["LOCAL_STATE"])

    def requests(self) -> float:
        """Return how many requests Triton has answered."""
        page = metrics_page(f"http://127.0.0.1:{self.variables['TRITON_METRICS_PORT']}")
        return total(page, 'nv_inference_request_success{model="encoder"')

    def cpu_s(self) -> float:
        """Return the CPU time of all programs of the stack, with the receiver of traces."""
        supervisor = psutil.Process(int((self.state / "run/supervisord.pid").read_text()))
        times = [process.cpu_times() for process in supervisor.children(recursive=True)]
        return sum(time.user + time.system for time in times)


def run() -> None:
    with folder() as work:
        plain, traced = (
            Server(environment(work / name, MODEL_REPOSITORY=f"{work}/models", SYSTEMS="embedding", TRACE=trace))
            for name, trace in ((PLAIN, "0"), (TRACED, "1"))
        )
        command("models", plain.variables)
        with server(plain.variables):
            # Both servers compute with the same engine.
            shutil.copytree(ServedSystems(plain.state).engines, ServedSystems(traced.state).engines)
            with server(traced.variables):
                compare({PLAIN: plain, TRACED: traced})


def compare(servers: dict[str, Server]) -> None:
    rates: dict[str, list[float]] = {name: [] for name in servers}
    cpu_ms: dict[str, list[float]] = {name: [] for name in servers}
    for number in range(ROUNDS):
        for name in list(servers)[:: 1 if number % 2 else -1]:
            with err.status(f"round {number + 1} of {ROUNDS}: {CLIENTS} clients, {name}"):
                measured = servers[name]
                requests, cpu_s = measured.requests(), measured.cpu_s()
                window = measure(Clients(measured.url, "triton", CLIENTS, WARMUP_S, WINDOW_S)).check()
                rates[name].append(window.rate)
                cpu_ms[name].append(1000 * (measured.cpu_s() - cpu_s) / (measured.requests() - requests))
    rows = [
        [name, *(spread(own, digits) for own in figures.values()), spread(ratios(figures[TRACED], figures[PLAIN]), 2)]
        for name, figures, digits in (("requests/s", rates, 0), ("CPU time per request, ms", cpu_ms, 2))
    ]
    print_table(("", *servers, "ratio"), rows, text_columns=("",))
    out.print(
        f"{CLIENTS} clients, one text each; median (minimum to maximum) of {ROUNDS} interleaved rounds of "
        f"{WINDOW_S:.0f} s\nCPU time: of all programs of the stack, with the receiver of traces"
    )
