"""Benchmarks that repeat the comparison: at several numbers of users, or for each FORMAT of a model."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bench import embedder
from triton_transformers.cli import err, out, print_table
from triton_transformers.models.catalogue import SYSTEMS
from triton_transformers.models.sources import Package
from triton_transformers.own_stack import command, environment, folder, server, with_names
from triton_transformers.settings import MODES, ROOT, Settings, UserError
from triton_transformers.triton import engines


def save_vit(folder: Path) -> Path:
    """Save a model as large as google/vit-base-patch16-224. Its weights are random: they do not change the speed."""
    import torch
    from transformers import ViTConfig, ViTImageProcessor, ViTModel

    torch.manual_seed(1)
    ViTModel(ViTConfig()).save_pretrained(folder)
    ViTImageProcessor().save_pretrained(folder)
    return folder


def fetch_embedding(_: Path) -> Path:
    source = SYSTEMS["embedding"].source
    assert isinstance(source, Package)
    return source.verify()


@dataclass(frozen=True)
class Subject:
    """The systems and numbers of users that a benchmark compares in turn."""

    formats: dict[str, str]  # system -> its FORMAT
    users: tuple[int, ...]
    load: dict[str, str]
    weights: Callable[[Path], Path] | None = None  # None: the catalogue's
    turns: int = 1
    # The server has one core, Locust another, and the model alone runs on the server's core in between.
    one_core: bool = False


# (system, users) -> the results.json of each turn.
Results = dict[tuple[str, int], list[dict]]


def run(subject: Subject) -> None:
    cpu, client = two_cpus() if subject.one_core else (0, 0)
    pins = {"TRITON_CPUS": str(cpu), "LOADTEST_CPUS": str(client)} if subject.one_core else {}
    reports = Settings.load().reports / "bench"
    results: Results = {}
    alone: list[embedder.Figures] = []
    with folder() as work:
        variables = environment(work, **subject.load, **pins, REPORTS=str(reports))
        weights = {"SOURCE": str(subject.weights(work / "weights"))} if subject.weights else {}
        for system, form in subject.formats.items():
            command("models", variables | weights | {"SYSTEMS": system, "FORMAT": form})
        with server(variables | {"SYSTEMS": " ".join(subject.formats)}):
            for turn, (system, users) in itertools.product(
                range(subject.turns), itertools.product(subject.formats, subject.users)
            ):
                if subject.one_core:
                    engine = engines(f"http://127.0.0.1:{variables['TRITON_METRICS_PORT']}")["encoder"]
                    with err.status("the model alone, in a process of its own"):
                        alone.append(embedder.measure(cpu, variables["MODEL_REPOSITORY"], engine))
                with err.status(f"turn {turn + 1} of {subject.turns}: {system}, {users} user(s)"):
                    result = compare(variables | {"SYSTEM": system, "USERS": str(users)})
                results.setdefault((system, users), []).append(result)
    show(subject, results, alone)
    path = reports / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    served = [{"system": system, "users": users, "runs": runs} for (system, users), runs in results.items()]
    path.write_text(json.dumps({"alone": alone, "served": served}, indent=2) + "\n")
    out.print(f"\nnumbers  {os.path.relpath(path)}")


def show(subject: Subject, results: Results, alone: list[embedder.Figures]) -> None:
    batches = map(str, embedder.BATCHES if alone else ())
    rates = {batch: statistics.median(figures[batch] for figures in alone) for batch in batches}
    columns = ["system", "FORMAT", "users", *MODES, "ratio", "p95 none", "p95 dyn", "batch", "Locust"]
    columns += ["served/alone"] if alone else []
    rows = []
    for (system, users), runs in results.items():
        none, dynamic = (medians(runs, mode) for mode in ("none", "dynamic"))
        row = [system, subject.formats[system], str(users)]
        measured = [medians(runs, mode) if mode in runs[0]["modes"] else None for mode in MODES]
        row += [f"{figures['throughput_rps']:.1f}" if figures else "-" for figures in measured] + [ratio(runs)]
        row += [f"{none['p95_ms']:.0f}", f"{dynamic['p95_ms']:.0f}", f"{dynamic['mean_batch']:.1f}"]
        row += [f"{dynamic['cpu']:.2f}"]
        row += [f"{dynamic['throughput_rps'] / max(rates.values()):.2f}"] if alone else []
        rows.append(row)
    print_table(columns, rows, text_columns=("system", "FORMAT"))
    out.print(
        "none, instances, dynamic: requests per second; ratio: dynamic / the best other mode; p95: ms; batch: rows per "
        "execution; Locust: cores that it used"
    )
    if alone:
        by_batch = ", ".join(f"{batch}: {rate:.1f}" for batch, rate in rates.items())
        out.print(
            f"\nthe engine alone, one core, groups of {embedder.GROUP} texts sorted by length, texts per second at "
            f"each batch: {by_batch}"
        )


def two_cpus() -> tuple[int, int]:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise UserError("this benchmark gives the server one core and Locust another. It needs two cores")
    return cpus[0], cpus[1]


def compare(variables: dict[str, str]) -> dict:
    """Return the results of one comparison."""
    latest = Path(variables["REPORTS"]) / "latest"
    before = latest.resolve()
    call = [sys.executable, "-m", "loadtest"]
    done = subprocess.run(call, cwd=ROOT, env=with_names(variables), capture_output=True, text=True)
    # The exit code may only mean that batching was not proven, as with one user. The results are written all the same.
    if latest.resolve() == before:
        raise UserError(f"the comparison of {variables['SYSTEM']} left no results: {done.stderr.strip()}")
    return json.loads((latest / "results.json").read_text())


def medians(runs: list[dict], mode: str) -> dict[str, float]:
    """Return the medians over all windows of a mode, and over runs for what windows do not have."""
    windows = [window for run in runs for window in run["windows"] if window["mode"] == mode]
    keys = ("throughput_rps", "p95_ms", "mean_batch")
    return {
        **{key: statistics.median(window[key] for window in windows) for key in keys},
        "cpu": statistics.median(run["modes"][mode]["cpu"] for run in runs),
    }


def ratio(runs: list[dict]) -> str:
    if len(runs) > 1:
        return f"{statistics.median(run['verdict']['throughput_ratio'] for run in runs):.2f}"
    verdict = runs[0]["verdict"]
    interval = verdict["ci95"]  # None if only one round was complete
    return f"{verdict['throughput_ratio']:.2f}" + (f" ({interval[0]:.2f}-{interval[1]:.2f})" if interval else "")


SUBJECTS = {
    "embedding": Subject({"embedding": "onnx"}, (1, 8, 32, 64), {"ROUNDS": "5"}, one_core=True),
    "text-formats": Subject(
        {"text_onnx": "onnx", "text_int8": "onnx-int8", "text_python": "python"},
        (32,),
        {"ROUNDS": "2", "WINDOW": "10"},
        fetch_embedding,
        turns=2,
    ),
    "vision-formats": Subject(
        {"python_vit": "python", "vit_ensemble": "onnx", "vit_int8": "onnx-int8"},
        (16,),
        {"ROUNDS": "2", "WINDOW": "15"},
        save_vit,
        turns=2,
    ),
}
