"""The engine that a server chooses, compared with ONNX Runtime: throughput, and the time of a lone request."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterable

from loadtest.bench import embedder
from loadtest.bench.clients import Clients, Window, measure
from loadtest.bench.tables import in_turns
from loadtest.server.own_stack import OwnStack, folder
from triton_transformers.cli import out, print_table

SETTINGS = ("auto", "onnxruntime")
CORES = (2, 1)
CLIENTS = (64, 1)
ROUNDS, WARMUP_S, WINDOW_S = 5, 1.0, 5.0

# Number of clients -> the windows of one server.
Windows = dict[int, list[Window]]


def run() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    columns = ("cores", "TRITON_ENGINE", "encoder", "64 clients", "p95", "alone", "served/alone", "1 client", "rest")
    rows = []
    with folder() as work:
        assembled = OwnStack(work, SYSTEMS="embedding")
        assembled.command("models")
        for cores in (cores for cores in CORES if cores <= len(cpus)):
            client_cpus = ",".join(map(str, cpus[cores:] or cpus))
            rows += [[str(cores), *row] for row in compare(assembled, cpus[:cores], client_cpus)]
    print_table(columns, rows, text_columns=("TRITON_ENGINE", "encoder"))
    out.print(
        f"medians of {ROUNDS} interleaved windows. 64 clients: requests per second; p95: their ms.\n"
        f"alone: texts per second of the engine on one core, groups of {embedder.GROUP} texts sorted by length.\n"
        "1 client: p50 in ms; rest: how much of it is not the engine's time for one text on one core"
    )


def compare(assembled: OwnStack, cpus: list[int], client_cpus: str) -> Iterable[list[str]]:
    """Start a server with each setting, measure them in turn, and yield the rows of the table."""
    with contextlib.ExitStack() as stack:
        urls, chosen = {}, {}
        for setting in SETTINGS:
            own = OwnStack(
                assembled.folder / setting,
                SYSTEMS="embedding",
                MODEL_REPOSITORY=str(assembled.models),
                TRITON_ENGINE=setting,
                TRITON_CPUS=",".join(map(str, cpus)),
            )
            stack.enter_context(own.serving())
            urls[setting] = own.url("TRITON_HTTP_PORT")
            chosen[setting] = own.encoder_engine()
        windows: dict[str, Windows] = {setting: {count: [] for count in CLIENTS} for setting in SETTINGS}
        raw: dict[str, list[dict[str, float]]] = {setting: [] for setting in SETTINGS}
        for setting in in_turns(SETTINGS, ROUNDS, f"{len(cpus)} core(s)"):
            for count in CLIENTS:
                clients = Clients(urls[setting], "triton", count, WARMUP_S, WINDOW_S)
                windows[setting][count].append(measure(clients, client_cpus).check())
            raw[setting].append(embedder.measure(cpus[0], str(assembled.models), chosen[setting]))
    for setting in SETTINGS:
        rate = statistics.median(one.rate for one in windows[setting][64])
        texts = statistics.median(map(embedder.best, raw[setting]))
        p50 = statistics.median(one.p50_ms for one in windows[setting][1])
        rest = p50 - statistics.median(one["one_text_ms"] for one in raw[setting])
        p95 = statistics.median(one.p95_ms for one in windows[setting][64])
        # The engine alone has one core, so it can be compared only with a server of one core.
        share, rest_ms = (f"{rate / texts:.2f}", f"{rest:.1f}") if len(cpus) == 1 else ("", "")
        figures = [f"{rate:.0f}", f"{p95:.0f}", f"{texts:.0f}", share, f"{p50:.1f}", rest_ms]
        yield [setting, chosen[setting], *figures]
