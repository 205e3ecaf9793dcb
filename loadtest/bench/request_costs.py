"""The CPU time of a text encoder's requests in Triton without its model, and how many requests that allows per second.

The server has one core, and the clients have another.
"""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path

from export.recipes.config_writer import batched, tensor, write_config
from loadtest.bench.clients import Clients, measure
from loadtest.bench.comparisons import fetch_embedding, two_cpus
from loadtest.bench.tables import spread, total
from loadtest.server.own_stack import OwnStack, folder
from triton_transformers.cli import err, out, print_table
from triton_transformers.settings import ROOT

SYSTEM = "minilm"
# The texts of a request -> so many clients that batches are full.
LOADS = {1: 128, 8: 48, 64: 8}
MAX_BATCH = 256  # as for PROFILE=cuda
ROUNDS, WARMUP_S, WINDOW_S = 5, 1.0, 4.0


def run() -> None:
    figures: dict[int, list[list[float]]] = {texts: [] for texts in LOADS}
    server_cpu, client_cpu = two_cpus()
    with folder() as work:
        stack = OwnStack(work, SYSTEMS=SYSTEM, TRITON_CPUS=str(server_cpu))
        write_model(stack.models / SYSTEM)
        url = stack.url("TRITON_HTTP_PORT")
        with stack.serving():
            for number in range(ROUNDS):
                for texts, clients in LOADS.items():
                    with err.status(f"round {number + 1} of {ROUNDS}: requests of {texts} texts"):
                        before = used(stack)
                        measure(Clients(url, SYSTEM, clients, WARMUP_S, WINDOW_S, texts), str(client_cpu)).check()
                        requests, batches, *seconds = (b - a for a, b in zip(before, used(stack), strict=True))
                    figures[texts].append([texts * requests / batches, *(1e6 * cpu / requests for cpu in seconds)])
    rows = []
    for texts, measured in figures.items():
        batch, main, others, triton = zip(*measured, strict=True)
        limit = f"{1e6 / statistics.median(main):.0f}"
        rows.append([str(texts), *(spread(values, 0) for values in (batch, main, others, triton)), limit])
    columns = ("texts", "texts per batch", "main thread, us", "other threads, us", "Triton, us", "requests/s at most")
    print_table(columns, rows, text_columns=())
    out.print(
        f"CPU time per request, median (minimum to maximum) of {ROUNDS} rounds: of the main thread of the instance's "
        "process, of its other threads (they tokenize), and of tritonserver\nrequests/s at most: of one instance, if "
        "the other threads and the model took no time"
    )


def write_model(model: Path) -> None:
    """Write a model that answers texts without computing."""
    texts, vectors = tensor("input_text", "STRING", [1]), tensor("sentence_embedding", "FP32", [384])
    comment = "Answers zeros"
    write_config(model, comment, batched("python", MAX_BATCH, [texts], [vectors], "KIND_CPU"))
    (version := model / "1").mkdir()
    (version / "model.py").symlink_to(ROOT / "loadtest/bench/free_encoder.py")
    shutil.copy(fetch_embedding() / "tokenizer.json", version)


def used(stack: OwnStack) -> tuple[float, ...]:
    """Return the requests and batches so far, and the CPU times: of the main thread, of the others, and of Triton."""
    page = stack.metrics()
    programs = stack.leader().children(recursive=True)
    (stub,) = [program for program in programs if program.name().startswith("triton_python_b")]
    (triton,) = [program for program in programs if program.name() == "tritonserver"]
    main = sum(thread.user_time + thread.system_time for thread in stub.threads() if thread.id == stub.pid)
    own, servers = (sum(program.cpu_times()[:2]) for program in (stub, triton))
    counts = (total(page, f'nv_inference_{name}{{model="{SYSTEM}"') for name in ("request_success", "exec_count"))
    return (*counts, main, own - main, servers)
