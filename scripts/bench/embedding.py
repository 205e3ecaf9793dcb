"""BENCH=embedding: the first figures of docs/benchmarks.md.

A server of its own on ports of its own, pinned to one core, the load generator on another. The same comparison that
`make loadtest` runs, at several numbers of users, and between them the model alone in a process on the server's core.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime

from rich.table import Table

from scripts.bench.server import command, environment, folder, server
from scripts.common.cli import err, out
from scripts.common.settings import ROOT, Settings, UserError

USERS = (1, 8, 32, 64)
ROUNDS = 5
BATCHES = (4, 8, 16, 32, 64)


def main() -> None:
    settings = Settings.load()
    cpu, client = two_cpus()
    with folder() as work:
        variables = environment(
            work,
            TRITON_CPUS=str(cpu),
            LOADTEST_CPUS=str(client),
            ROUNDS=str(ROUNDS),
            # The reports are kept.
            REPORTS=f"{settings['REPORTS']}/bench",
            MODEL_REPOSITORY=settings["MODEL_REPOSITORY"],
            SYSTEM="embedding",
            SYSTEMS="embedding",
        )
        command("models", variables)
        with server(variables):
            raws, found = [measure_raw(cpu)], {}
            for users in USERS:
                found[users] = compare(variables | {"USERS": str(users)}, settings)
                raws.append(measure_raw(cpu))
    show(found, raws)
    record = {"cpus": {"server": cpu, "client": client}, "raw": raws, "served": found}
    path = settings.path("REPORTS") / f"bench/{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    out.print(f"\nnumbers  {os.path.relpath(path)}")


def two_cpus() -> tuple[int, int]:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise UserError("the bench gives the server one core and the load generator another: it needs two")
    return cpus[0], cpus[1]


def compare(variables: dict[str, str], settings: Settings) -> dict:
    out.print(f"\n{variables['USERS']} user(s)")
    # Its exit code says whether batching was proven, which one user cannot; the results are written all the same.
    latest = settings.path("REPORTS") / "bench/latest"
    before = latest.resolve()
    subprocess.run([sys.executable, "-m", "loadtest"], cwd=ROOT, env=variables, stdout=subprocess.DEVNULL)
    if latest.resolve() == before:
        raise UserError("the comparison left no results, see above")
    return json.loads((latest / "results.json").read_text())


def measure_raw(cpu: int) -> dict[str, float]:
    with err.status("the model alone, in a process of its own"):
        command = ["taskset", "-c", str(cpu), sys.executable, "-m", "scripts.bench.embedding"]
        return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def raw() -> dict[str, float]:
    """ONNX Runtime alone: texts/s of the corpus sorted by length, at each batch size. No tokenizing, no server."""
    import numpy as np
    import onnxruntime as ort
    from tokenizers import Tokenizer

    from scripts.common.corpus import MIXED

    repository = Settings.load().path("MODEL_REPOSITORY")
    tokenizer = Tokenizer.from_file(str(repository / "tokenizer/1/tokenizer.json"))
    options = ort.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    session = ort.InferenceSession(str(repository / "encoder/1/model.onnx"), options)
    tokenizer.no_padding()
    texts = MIXED.texts * 4  # as many as a window holds: the more there are, the tighter they sort
    texts.sort(key=lambda text: len(tokenizer.encode(text)))
    tokenizer.enable_padding()
    feeds = {}
    for batch in (1, *BATCHES):
        groups = [tokenizer.encode_batch(texts[i : i + batch]) for i in range(0, len(texts), batch)]
        feeds[batch] = [
            {
                "input_ids": np.array([e.ids for e in group], np.int64),
                "attention_mask": np.array([e.attention_mask for e in group], np.int64),
            }
            for group in groups
        ]
    rates: dict[int, list[float]] = {batch: [] for batch in feeds}
    for _ in range(2):
        for batch, runs in feeds.items():
            start = time.perf_counter()
            for feed in runs:
                session.run(None, feed)
            rates[batch].append(len(texts) / (time.perf_counter() - start))
    return {str(batch): statistics.median(measured) for batch, measured in rates.items()}


def show(found: dict[int, dict], raws: list[dict[str, float]]) -> None:
    alone = {batch: statistics.median(raw[batch] for raw in raws) for batch in raws[0]}
    best = max(alone, key=alone.get)
    table = Table(box=None, pad_edge=False, header_style="dim")
    columns = ("users", "none", "dynamic", "ratio", "95 %", "p95 none", "p95 dyn", "batch", "Locust", "served/raw")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for users, result in found.items():
        none, dynamic, verdict = result["modes"]["none"], result["modes"]["dynamic"], result["verdict"]
        table.add_row(
            str(users),
            f"{none['throughput_rps']:.1f}",
            f"{dynamic['throughput_rps']:.1f}",
            f"{verdict['throughput_ratio']:.2f}",
            "{:.2f}-{:.2f}".format(*verdict["ci95"]),
            f"{none['p95_ms']:.0f}",
            f"{dynamic['p95_ms']:.0f}",
            f"{dynamic['mean_batch']:.1f}",
            f"{dynamic['cpu']:.2f}",
            f"{dynamic['throughput_rps'] / alone[best]:.2f}",
        )
    out.print(table)
    out.print("none, dynamic: requests/s; p95: ms; batch: texts an execution of the encoder; Locust: cores it used")
    out.print(
        f"\nthe model alone, one core, texts sorted by length: {alone[best]:.1f} texts/s at its best batch of {best} "
        f"({', '.join(f'{batch}: {rate:.1f}' for batch, rate in alone.items())})"
    )


if __name__ == "__main__":  # by itself, on the CPUs that this process may use
    print(json.dumps(raw()))
