"""BENCH=generation: tokens/s of a GPT-2 of 124 million parameters, texts generated together and one by one.

The model is loaded as it is configured and with its parameter max_batch at 1, in turn.
"""

from __future__ import annotations

import copy
import secrets
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from rich.table import Table

from scripts.common.corpus import MIXED
from scripts.bench.gpt2 import save_checkpoint
from scripts.bench.server import command, environment, folder, server
from scripts.common.cli import err, out
from scripts.common.triton import Triton

SYSTEM = "gpt2small"
MODES = ("one by one", "together")
CLIENTS = (1, 8, 32)
NEW_TOKENS = 32  # of each text, for none ends by itself
ROUNDS = 3
TIMEOUT_S = 3600  # for the last of 32 that go one by one

Rates = dict[tuple[str, int], list[float]]


def main() -> None:
    with folder() as work:
        save_checkpoint(work / "checkpoint")
        variables = environment(work, SYSTEMS=SYSTEM, TRITON_ADMIN_KEY=secrets.token_urlsafe())
        command("models", variables | {"SOURCE": f"{work}/checkpoint"})
        with server(variables):
            url = f"http://127.0.0.1:{variables['TRITON_HTTP_PORT']}"
            rates = measure(Triton(url, variables["TRITON_ADMIN_KEY"]))
    show(rates)


def measure(triton: Triton) -> Rates:
    configured = triton.config(SYSTEM)
    alone = copy.deepcopy(configured)
    alone["parameters"]["max_batch"] = {"string_value": "1"}
    rates: Rates = {(mode, clients): [] for mode in MODES for clients in CLIENTS}
    for number in range(ROUNDS):
        for mode in MODES[:: 1 if number % 2 else -1]:
            triton.load(SYSTEM, alone if mode == MODES[0] else configured)
            ask(triton, "warm")
            for clients in CLIENTS:
                with err.status(f"round {number + 1} of {ROUNDS}: {mode}, {clients} client(s)"):
                    rates[mode, clients].append(tokens_a_second(triton, clients))
    return rates


def ask(triton: Triton, prompt: str) -> None:
    inputs = [
        {"name": "prompt", "datatype": "BYTES", "shape": [1], "data": [prompt]},
        {"name": "max_new_tokens", "datatype": "INT32", "shape": [1], "data": [NEW_TOKENS]},
    ]
    triton.infer(SYSTEM, {"inputs": inputs}, TIMEOUT_S)


def tokens_a_second(triton: Triton, clients: int) -> float:
    prompts = MIXED.texts[: 2 * clients]
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(lambda prompt: ask(triton, prompt), prompts))
    return len(prompts) * NEW_TOKENS / (time.perf_counter() - start)


def show(rates: Rates) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("clients", *MODES, "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    for clients in CLIENTS:
        alone, together = (rates[mode, clients] for mode in MODES)
        ratio = statistics.median(together) / statistics.median(alone)
        table.add_row(str(clients), *map(spread, (alone, together)), f"{ratio:.2f}")
    out.print(table)
    out.print(f"new tokens/s: median (least to most) of {ROUNDS} rounds; {NEW_TOKENS} new tokens a text")


def spread(measured: list[float]) -> str:
    return f"{statistics.median(measured):.1f} ({min(measured):.1f} to {max(measured):.1f})"
