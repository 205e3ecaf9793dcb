"""Measure MiniLM and a language model in half precision, served by a Triton of its own on the GPU, or on the CPU.

Run python -m loadtest.bench.gpu.steps served | loadtest | generation FOLDER. Each writes its figures into the folder.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadtest.bench import comparisons
from loadtest.bench.architectures.architectures import edited_torch_models, set_dtype
from loadtest.bench.architectures.architectures import measure as measure_parity
from loadtest.bench.architectures.small_models import SmallModel
from loadtest.bench.clients import Clients, measure
from loadtest.bench.gpu.rates import save
from loadtest.bench.gpu.ways import this_device
from loadtest.server.own_stack import OwnStack, folder
from triton_transformers.cli import err, out, print_table, run
from triton_transformers.settings import MODES

TEXTS, CLIENTS, INSTANCES = (1, 8, 64), (1, 64, 512), (1, 2, 4)
# One process of Python sends about 5,000 requests per second.
CLIENT_PROCESSES = 8
WARMUP_S = 1.0


def is_cuda() -> bool:
    return this_device() == "cuda"


@contextlib.contextmanager
def minilm() -> Iterator[OwnStack]:
    """Assemble MiniLM as the system `minilm`, in bfloat16 on a GPU. Yield its stack."""
    with folder() as work:
        checkpoint = save("MiniLM", work / "weights/1", this_device())
        stack = assembled(work, "minilm", checkpoint.folder, "python", "sentence-similarity")
        set_dtype("minilm", stack.models, checkpoint.dtype)
        yield stack


def assembled(work: Path, system: str, source: Path, form: str, task: str) -> OwnStack:
    """Assemble a system, and return the stack that serves it."""
    stack = OwnStack(work, PROFILE=this_device(), SYSTEMS=system)
    stack.command("models", SOURCE=str(source), FORMAT=form, TASK=task)
    return stack


def served(reports: Path) -> None:
    """Measure requests of several sizes from several numbers of clients, to several numbers of instances."""
    rounds, window_s, counts = (2, 3.0, INSTANCES) if is_cuda() else (1, 2.0, INSTANCES[:2])
    loads = [(texts, clients) for texts in TEXTS for clients in CLIENTS]
    if not is_cuda():  # a CPU needs minutes for the larger ones
        loads = [(1, 1), (1, 8), (8, 4)]
    rates: dict[tuple[int, int, int], list[float]] = {}
    p95: dict[tuple[int, int, int], list[float]] = {}
    with minilm() as stack:
        url = stack.url("TRITON_HTTP_PORT")
        for instances in counts:
            for config in edited_torch_models("minilm", stack.models):
                config.instance_group[0].count = instances
            with stack.serving():
                for number, load in itertools.product(range(rounds), loads):
                    step = f"{instances} instances, round {number + 1} of {rounds}"
                    with err.status(f"{step}: {load[1]} clients, requests of {load[0]} texts"):
                        rate, latency = window(url, *load, window_s)
                    rates.setdefault((instances, *load), []).append(rate)
                    p95.setdefault((instances, *load), []).append(latency)
    rows = [
        [
            *map(str, load),
            f"{rate:.0f}",
            f"{rate * load[1]:.0f}",
            share(reports, rate * load[1]),
            f"{statistics.median(p95[load]):.1f}",
        ]
        for load, measured in rates.items()
        for rate in [statistics.median(measured)]
    ]
    columns = ("instances", "texts per request", "clients", "requests/s", "texts/s", "share", "p95 ms")
    print_table(columns, rows, text_columns=())
    write(reports, "served", {"columns": columns, "rows": rows, "rounds": rounds})


def share(reports: Path, texts_per_second: float) -> str:
    """Return the share of the rate of the model's matrix products alone, if `rates` has measured it."""
    if not (path := reports / "rates/MiniLM.json").exists():
        return ""
    alone = json.loads(path.read_text())
    return f"{texts_per_second * alone['mean_length']['mix'] / alone['matmul_tokens_per_second']:.3f}"


def window(url: str, texts: int, clients: int, window_s: float) -> tuple[float, float]:
    """Return the requests per second of all clients, and the largest 95th percentile of their processes."""
    processes = min(CLIENT_PROCESSES, max(1, len(os.sched_getaffinity(0)) // 2), clients)
    one = Clients(url, "minilm", clients // processes, WARMUP_S, window_s, texts)
    with ThreadPoolExecutor(processes) as pool:
        windows = [window.check() for window in pool.map(measure, [one] * processes)]
    return sum(window.rate for window in windows), max(window.p95_ms for window in windows)


def loadtest(reports: Path) -> None:
    """Compare dynamic batching with the modes without it, as `make loadtest` does."""
    with minilm() as stack, stack.serving():
        report(reports, "loadtest", compare(stack, "minilm"))


def generation(reports: Path) -> None:
    """Compare the texts of a small GPT-2 with transformers', on vLLM if it is installed, and its batching."""
    form = "vllm" if is_cuda() and importlib.util.find_spec("vllm") else "python"
    # vLLM's attention takes heads of at least 32.
    gpt2 = SmallModel("GPT2LMHeadModel", "text-generation", tokenizer="byte-level", fields={"n_embd": 128})
    (parity,) = measure_parity([replace(gpt2, formats=(form,))], PROFILE=this_device())
    out.print(" | ".join(parity.cells), markup=False)
    with folder() as work:
        stack = assembled(work, "story", gpt2.save(work / "gpt2"), form, "text-generation")
        with stack.serving():
            report(reports, f"generation-{form}", compare(stack, "story"))


def compare(stack: OwnStack, system: str) -> dict[str, Any]:
    load = {"USERS": "64", "ROUNDS": "3", "WINDOW": "10"} if is_cuda() else {"USERS": "8", "ROUNDS": "3", "WINDOW": "5"}
    return comparisons.compare(stack, system, **load)


def report(reports: Path, name: str, results: dict[str, Any]) -> None:
    rows = [
        [mode, f"{of['throughput_rps']:.1f}", f"{of['p95_ms']:.0f}", f"{of['mean_batch']:.1f}"]
        for mode in MODES
        if mode in results["modes"]  # models that generate have no instances
        for of in [comparisons.medians(results, mode)]
    ]
    print_table(("mode", "requests/s", "p95 ms", "rows per batch"), rows, text_columns=("mode",))
    out.print(f"dynamic / best other mode: {comparisons.ratio(results)}")
    write(reports, name, results)


def write(reports: Path, name: str, content: dict[str, Any]) -> None:
    reports.mkdir(parents=True, exist_ok=True)
    (reports / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


STEPS = {step.__name__: step for step in (served, loadtest, generation)}


def main() -> None:
    STEPS[sys.argv[1]](Path(sys.argv[2]))


if __name__ == "__main__":
    run(main)
