"""The gateway compared with the Triton behind it: throughput, batches, overload, and the first token of a stream."""

from __future__ import annotations

import http.client
import json
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from loadtest.bench.clients import Clients, Window, measure, percentile
from loadtest.bench.generation_rates import prompts, save_checkpoint
from loadtest.bench.tables import compare, in_turns, ratios, spread, total
from loadtest.server.own_stack import OwnStack, folder
from triton_transformers.cli import err, out, print_table
from triton_transformers.settings import UserError
from triton_transformers.triton import metrics_page

ROUNDS = 5
CLIENTS, MANY_CLIENTS = 64, 2000
WARMUP_S, WINDOW_S = 1.0, 6.0
STREAMS = 40
DIRECT, GATEWAY = "Triton's HTTP", "gateway"
STORY = "story"
FIRST_TEXT = re.compile(rb'"text":"[^"]')  # in a line of a stream, of the gateway or of Triton


@dataclass(frozen=True)
class Site:
    """The addresses of a running stack."""

    triton: str
    triton_metrics: str
    gateway: str
    gateway_metrics: str

    @classmethod
    def of(cls, stack: OwnStack) -> Site:
        ports = ("TRITON_HTTP_PORT", "TRITON_METRICS_PORT", "GATEWAY_PORT", "GATEWAY_METRICS_PORT")
        return cls(*map(stack.url, ports))

    def batches(self) -> tuple[float, float]:
        """Return how many texts the encoder has answered, and in how many executions."""
        page = metrics_page(self.triton_metrics)
        return total(page, 'nv_inference_count{model="encoder"'), total(page, 'nv_inference_exec_count{model="encoder"')


def run() -> None:
    with folder() as work:
        stack = OwnStack(work, SYSTEMS="embedding", GATEWAY_IN_FLIGHT=str(CLIENTS))
        stack.command("models")
        with stack.serving():
            site = Site.of(stack)
            compare_throughput(site)
            overload(site)
        save_checkpoint(work / "checkpoint")
        source = {"SOURCE": f"{work}/checkpoint", "TASK": "text-generation", "FORMAT": "openvino"}
        generating = OwnStack(work, SYSTEMS=f"{STORY}_stream")
        generating.command("models", SYSTEMS=STORY, **source)
        with generating.serving():
            compare_first_tokens(Site.of(generating))


# --- throughput and batches -------------------------------------------------------------------------------------------


def compare_throughput(site: Site) -> None:
    cpu_ms: list[float] = []

    def figures(url: str, form: str) -> dict[str, float]:
        batches, before = site.batches(), metrics_page(site.gateway_metrics)
        window = measure(Clients(url, form, CLIENTS, WARMUP_S, WINDOW_S)).check()
        after = metrics_page(site.gateway_metrics)
        texts, runs = (later - earlier for later, earlier in zip(site.batches(), batches, strict=True))
        if form == "gateway":
            names = ("process_cpu_seconds_total", "gateway_requests_total")
            cpu_s, requests = (total(after, name) - total(before, name) for name in names)
            cpu_ms.append(1000 * cpu_s / requests)
        return {"requests/s": window.rate, "texts per run": texts / runs}

    ways = {DIRECT: partial(figures, site.triton, "triton"), GATEWAY: partial(figures, site.gateway, "gateway")}
    compare(ways, ROUNDS, f"{CLIENTS} clients", {"requests/s": 0, "texts per run": 1}, "gateway / direct")
    out.print(
        f"{CLIENTS} clients, one text each; median (minimum to maximum) of {ROUNDS} interleaved rounds of "
        f"{WINDOW_S:.0f} s\nCPU time of the gateway per request: {spread(cpu_ms, 2)} ms\n"
    )


# --- overload ---------------------------------------------------------------------------------------------------------


def overload(site: Site) -> None:
    """Print what the clients see if there are many more than the limit for requests in flight."""
    windows: dict[int, list[Window]] = {CLIENTS: [], MANY_CLIENTS: []}
    memory = [memory_mb(site)]
    for number in range(ROUNDS):
        for clients in (CLIENTS, MANY_CLIENTS):
            with err.status(f"round {number + 1} of {ROUNDS}: {clients} clients, {CLIENTS} requests in flight at most"):
                windows[clients].append(measure(Clients(site.gateway, "gateway", clients, WARMUP_S, WINDOW_S)))
        memory.append(memory_mb(site))
    figures: dict[str, Callable[[Window], float]] = {
        "accepted/s": lambda window: window.rate,
        "accepted, p95 ms": lambda window: window.p95_ms,
        "refused/s": lambda window: len(window.refused) / window.seconds,
        "refused, p95 ms": lambda window: percentile(window.refused, 95),
        "refused, maximum ms": lambda window: max(window.refused, default=0.0),
        "failed": lambda window: len(window.failures),
        "maximum wait at the end, s": lambda window: window.oldest_s,
    }
    rows = [
        [name, *(spread([figure(window) for window in own], 1) for own in windows.values())]
        for name, figure in figures.items()
    ]
    print_table(("", *(f"{clients} clients" for clients in windows)), rows, text_columns=("",))
    few, many = ([window.p95_ms for window in own] for own in windows.values())
    out.print(
        f"at most {CLIENTS} requests in flight; p95 of accepted requests, {MANY_CLIENTS} clients / {CLIENTS}: "
        f"{spread(ratios(many, few), 2)}\nmemory of the gateway at the start and after each round: "
        f"{', '.join(f'{megabytes:.0f}' for megabytes in memory)} MB\n"
    )


def memory_mb(site: Site) -> float:
    return total(metrics_page(site.gateway_metrics), "process_resident_memory_bytes") / 1e6


# --- the first token --------------------------------------------------------------------------------------------------


def compare_first_tokens(site: Site) -> None:
    """Print how much later the first token comes through the gateway."""
    ways: dict[str, Callable[[str], float]] = {
        DIRECT: lambda prompt: first_piece_ms(
            site.triton,
            f"/v2/models/{STORY}_stream/generate_stream",
            {"prompt": prompt, "max_new_tokens": 2, "stream": True},
        ),
        GATEWAY: lambda prompt: first_piece_ms(
            site.gateway,
            "/v1/completions",
            {"model": f"{STORY}_stream", "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True},
        ),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for way in in_turns(ways, STREAMS, "a stream"):
        times[way].append(ways[way](prompts(1, f"{way} {len(times[way])}")[0]))
    later = statistics.median(ours - theirs for ours, theirs in zip(times[GATEWAY], times[DIRECT], strict=True))
    rows = "; ".join(f"{way} {spread(own)} ms" for way, own in times.items())
    out.print(f"time to the first token: {rows}; through the gateway {later:.1f} ms later (median of {STREAMS} pairs)")


def first_piece_ms(url: str, path: str, body: dict[str, object]) -> float:
    """Return after how many milliseconds a stream sends its first text."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.connect()
    start = time.perf_counter()
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise UserError(f"{url}{path} answered {response.status}: {response.read(200).decode(errors='replace')}")
    first = 0.0
    for line in response:
        if not first and FIRST_TEXT.search(line):
            first = time.perf_counter()
    connection.close()
    if not first:
        raise UserError(f"{url}{path} streamed no text")
    return 1000 * (first - start)
