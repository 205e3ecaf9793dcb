"""The engine that a server chooses, compared with ONNX Runtime: throughput, and the time of a lone request.

Run python -m bench.engine_rates with the options of an Embedder as JSON to measure the engine alone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench import light_clients
from bench.peers import load
from bench.peers.load import Load, Window
from bench.peers.peer_options import VARIABLE, Options
from bench.server import command, environment, folder, server
from triton_transformers.cli import err, out, print_table
from triton_transformers.corpus import MIXED
from triton_transformers.settings import ROOT, UserError
from triton_transformers.triton import engines

SETTINGS = ("auto", "onnxruntime")
CORES = (2, 1)
CLIENTS = (64, 1)
ROUNDS, WARMUP_S, WINDOW_S = 5, 1.0, 5.0
GROUP = 64  # texts that are sorted together, as many as clients wait
BATCHES = (4, 8, 16)

# Number of clients -> the windows of one server.
Windows = dict[int, list[Window]]


def run() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    columns = ("cores", "TRITON_ENGINE", "encoder", "64 clients", "p95", "alone", "served/alone", "1 client", "rest")
    rows = []
    with folder() as work:
        models = {"MODEL_REPOSITORY": f"{work}/models", "SYSTEMS": "embedding"}
        command("models", environment(work) | models)
        for cores in (cores for cores in CORES if cores <= len(cpus)):
            client_cpus = ",".join(map(str, cpus[cores:] or cpus))
            rows += [[str(cores), *row] for row in compare(work, models, cpus[:cores], client_cpus)]
    print_table(columns, rows, text_columns=("TRITON_ENGINE", "encoder"))
    out.print(
        f"medians of {ROUNDS} interleaved windows. 64 clients: requests per second; p95: their ms.\n"
        f"alone: texts per second of the engine on one core, groups of {GROUP} texts sorted by length.\n"
        "1 client: p50 in ms; rest: how much of it is not the engine's time for one text on one core"
    )


def compare(work: Path, models: dict[str, str], cpus: list[int], client_cpus: str) -> Iterable[list[str]]:
    """Start a server with each setting, measure them in turn, and yield the rows of the table."""
    with contextlib.ExitStack() as stack:
        urls, chosen = {}, {}
        for setting in SETTINGS:
            pins = {"TRITON_ENGINE": setting, "TRITON_CPUS": ",".join(map(str, cpus))}
            variables = environment(work / setting) | models | pins
            stack.enter_context(server(variables))
            urls[setting] = f"http://127.0.0.1:{variables['TRITON_HTTP_PORT']}"
            chosen[setting] = engines(f"http://127.0.0.1:{variables['TRITON_METRICS_PORT']}")["encoder"]
        windows: dict[str, Windows] = {setting: {count: [] for count in CLIENTS} for setting in SETTINGS}
        raw: dict[str, list[dict[str, float]]] = {setting: [] for setting in SETTINGS}
        for number, count in itertools.product(range(ROUNDS), CLIENTS):
            for setting in SETTINGS[:: 1 if number % 2 else -1]:
                with err.status(f"{len(cpus)} core(s), round {number + 1} of {ROUNDS}: {setting}, {count} client(s)"):
                    windows[setting][count].append(window(urls[setting], count, client_cpus))
                    if count == 1:
                        raw[setting].append(alone(chosen[setting], models["MODEL_REPOSITORY"], cpus[0]))
    for setting in SETTINGS:
        rate = statistics.median(one.rate for one in windows[setting][64])
        texts = statistics.median(one["texts_per_second"] for one in raw[setting])
        p50 = statistics.median(one.p50_ms for one in windows[setting][1])
        rest = p50 - statistics.median(one["one_text_ms"] for one in raw[setting])
        p95 = statistics.median(one.p95_ms for one in windows[setting][64])
        # The engine alone has one core, so it can be compared only with a server of one core.
        share, rest_ms = (f"{rate / texts:.2f}", f"{rest:.1f}") if len(cpus) == 1 else ("", "")
        yield [
            setting,
            chosen[setting],
            f"{rate:.0f}",
            f"{p95:.0f}",
            f"{texts:.0f}",
            share,
            f"{p50:.1f}",
            rest_ms,
        ]


def window(url: str, clients: int, cpus: str, form: str = "triton") -> Window:
    """Measure one window. A lone client is not Locust's, which adds at least 0.25 ms of its own to each request."""
    if clients > 1:
        return load.measure(Load(url, form, clients, WARMUP_S, WINDOW_S), cpus)
    measured = light_clients.measure(light_clients.Load(url, form, clients, WARMUP_S, WINDOW_S), cpus)
    if not measured.accepted:
        raise UserError(f"the server answered no request: {''.join(measured.failures[:1]) or 'none came back in time'}")
    latencies = sorted(measured.accepted)
    p50, p95 = (latencies[len(latencies) * share // 100] for share in (50, 95))
    return Window(measured.rate, p50, p95, len(measured.failures), "".join(measured.failures[:1]), cores=0.0)


def alone(engine: str, repository: str, cpu: int) -> dict[str, float]:
    """Measure the engine in a process of its own, on this CPU."""
    options = json.dumps({"repository": repository, "port": 0, "engine": engine.partition(" ")[0]})
    program = ["taskset", "-c", str(cpu), sys.executable, "-m", "bench.engine_rates"]
    done = subprocess.run(
        program, cwd=ROOT, env=os.environ | {VARIABLE: options}, check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout)


def measure_alone() -> dict[str, float]:
    """Return texts per second at the best size of a batch, and the milliseconds of one text."""
    from bench.peers.embedder import Embedder

    embedder = Embedder(Options.read())
    texts = random.Random(0).sample(MIXED.texts, len(MIXED.texts))
    lengths = {text: len(embedder.tokenizer.encode(text).ids) for text in texts}
    groups = [sorted(texts[i : i + GROUP], key=lengths.__getitem__) for i in range(0, len(texts), GROUP)]
    rates = []
    for batch in BATCHES:
        feeds = [embedder.feed(group[i : i + batch]) for group in groups for i in range(0, len(group), batch)]
        rates.append(len(texts) / sum(seconds(embedder, feeds)))
    return {
        "texts_per_second": max(rates),
        "one_text_ms": 1e3 * statistics.median(seconds(embedder, [embedder.feed([text]) for text in texts])),
    }


def seconds(embedder: Any, feeds: list[Any]) -> list[float]:
    """Return the seconds of each run, in the second of two turns: the first of a shape takes longer."""
    for _ in range(2):
        taken = []
        for feed in feeds:
            start = time.perf_counter()
            embedder.run_feed(feed)
            taken.append(time.perf_counter() - start)
    return taken


if __name__ == "__main__":
    print(json.dumps(measure_alone()))
