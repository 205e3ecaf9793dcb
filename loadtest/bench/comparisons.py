"""Benchmark `embedding`: the comparison at several numbers of users, beside the model alone."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from export.catalogue import SYSTEMS
from export.sources.source import Package
from loadtest.bench import embedder
from loadtest.server.own_stack import OwnStack, folder, with_names
from triton_transformers.cli import err, out, print_table
from triton_transformers.settings import MODES, ROOT, Settings, UserError

USERS = (1, 8, 32, 64)
SYSTEM = "embedding"


def fetch_embedding() -> Path:
    source = SYSTEMS[SYSTEM].source
    assert isinstance(source, Package)
    return source.verify()


def run() -> None:
    """Compare with each number of users. The server has one core, Locust another; the model alone has the server's."""
    cpu, client = two_cpus()
    reports = Settings.load().reports / "bench"
    results: dict[int, dict] = {}
    alone: list[embedder.Figures] = []
    with folder() as work:
        stack = OwnStack(
            work,
            SYSTEMS=SYSTEM,
            FORMAT="onnx",
            ROUNDS="5",
            TRITON_CPUS=str(cpu),
            LOADTEST_CPUS=str(client),
            REPORTS=str(reports),
        )
        stack.command("models")
        with stack.serving():
            for users in USERS:
                engine = stack.encoder_engine()
                with err.status("the model alone, in a process of its own"):
                    alone.append(embedder.measure(cpu, str(stack.models), engine))
                with err.status(f"{SYSTEM}, {users} user(s)"):
                    results[users] = compare(stack, SYSTEM, USERS=str(users))
    show(results, alone)
    path = reports / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    path.write_text(json.dumps({"alone": alone, "served": results}, indent=2) + "\n")
    out.print(f"\nnumbers  {os.path.relpath(path)}")


def show(results: dict[int, dict], alone: list[embedder.Figures]) -> None:
    rates = {batch: statistics.median(figures[str(batch)] for figures in alone) for batch in embedder.BATCHES}
    columns = ["users", *MODES, "ratio", "p95 none", "p95 dyn", "batch", "Locust", "served/alone"]
    rows = []
    for users, result in results.items():
        measured = {mode: medians(result, mode) for mode in result["modes"]}
        none, dynamic = measured["none"], measured["dynamic"]
        throughputs = [f"{measured[mode]['throughput_rps']:.1f}" if mode in measured else "-" for mode in MODES]
        latencies = [f"{figures['p95_ms']:.0f}" for figures in (none, dynamic)]
        share = dynamic["throughput_rps"] / max(rates.values())
        others = [f"{dynamic['mean_batch']:.1f}", f"{dynamic['cpu']:.2f}", f"{share:.2f}"]
        rows.append([str(users), *throughputs, ratio(result), *latencies, *others])
    print_table(columns, rows)
    out.print(
        "none, instances, dynamic: requests per second; ratio: dynamic / the best other mode; p95: ms; batch: rows per "
        "execution; Locust: cores that it used"
    )
    by_batch = ", ".join(f"{batch}: {rate:.1f}" for batch, rate in rates.items())
    out.print(
        f"\nthe engine alone, one core, groups of {embedder.GROUP} texts sorted by length, texts per second at each "
        f"batch: {by_batch}"
    )


def two_cpus() -> tuple[int, int]:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise UserError("this benchmark gives the server one core and Locust another. It needs two cores")
    return cpus[0], cpus[1]


def compare(stack: OwnStack, system: str, **settings: str) -> dict:
    """Return the results of one comparison."""
    latest = Path(stack.variables["REPORTS"]) / "latest"
    before = latest.resolve()
    call = [sys.executable, "-m", "loadtest"]
    variables = with_names(stack.variables | {"SYSTEM": system} | settings)
    done = subprocess.run(call, cwd=ROOT, env=variables, capture_output=True, text=True)
    # The exit code may only mean that batching was not proven, as with one user. The results are written all the same.
    if latest.resolve() == before:
        raise UserError(f"the comparison of {system} left no results: {done.stderr.strip()}")
    return json.loads((latest / "results.json").read_text())


def medians(result: dict, mode: str) -> dict[str, float]:
    """Return the medians over the windows of a mode, and the CPU of the client, which windows do not have."""
    windows = [window for window in result["windows"] if window["mode"] == mode]
    keys = ("throughput_rps", "p95_ms", "mean_batch")
    return {key: statistics.median(window[key] for window in windows) for key in keys} | {
        "cpu": result["modes"][mode]["cpu"]
    }


def ratio(result: dict) -> str:
    verdict = result["verdict"]
    interval = verdict["ci95"]  # None if fewer than three rounds were complete
    return f"{verdict['throughput_ratio']:.2f}" + (f" ({interval[0]:.2f}-{interval[1]:.2f})" if interval else "")
