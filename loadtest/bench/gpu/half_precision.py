"""Compare the architectures of docs/architectures.csv in half precision, served from a GPU if there is one.

Models that generate text compute in float32, and their texts must be the same.

Several stacks run at once, each with a few rows. Rows that have a result in the folder are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from loadtest.bench.architectures.architectures import COLUMNS, all_models, measure
from loadtest.bench.architectures.small_models import SmallModel
from loadtest.bench.gpu.ways import this_device
from triton_transformers.answers import LIMITS
from triton_transformers.cli import err, out, print_table, run
from triton_transformers.settings import ROOT, UserError

# Each stack has so many rows, needs so many seconds for them, and gets so many cores.
ROWS, CHUNK_S, CORES = 6, 150.0, 3


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.gpu.half_precision", description=__doc__)
    parser.add_argument("folder", type=Path, help="the results, a file for each row")
    parser.add_argument("dtype", choices=("float16", "bfloat16"))
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no stack that would need longer")
    parser.add_argument("--only", nargs="*", default=[], help="systems; without any, all")
    parser.add_argument("--here", action="store_true", help="measure in this process, with one stack")
    options = parser.parse_args()
    folder = options.folder / options.dtype
    folder.mkdir(parents=True, exist_ok=True)
    # One format on PyTorch: the others do not compute in half precision.
    models = {model.system: replace(model, formats=("python",)) for model in all_models()}
    models = {system: models[system] for system in options.only or models}
    missing = [system for system in models if not result_file(folder, system).exists()]
    if options.here:
        measure_here([models[system] for system in missing], folder, options.dtype)
    else:
        measure_in_stacks(missing, options.folder, options.dtype, options.seconds)
    show(list(models), folder)


def result_file(folder: Path, system: str) -> Path:
    return folder / f"{system}.json"


def measure_here(models: list[SmallModel], folder: Path, dtype: str) -> None:
    # Half precision may change a generated text from its second token on, so these models compute in float32.
    generators = [model for model in models if model.task == "text-generation"]
    encoders = [model for model in models if model not in generators]
    for group, precision in ((encoders, dtype), (generators, "")):
        for result in measure(group, precision, PROFILE=this_device()) if group else ():
            facts = {"cells": result.cells, "is_right": result.is_right, "refused": bool(result.refusal)}
            result_file(folder, result.model.system).write_text(json.dumps(facts) + "\n")


def measure_in_stacks(systems: list[str], folder: Path, dtype: str, seconds: float) -> None:
    """Measure groups of systems side by side, each in a process with a stack of its own."""
    deadline = time.monotonic() + seconds
    stacks = max(1, len(os.sched_getaffinity(0)) // CORES)

    def chunk(number: int) -> None:
        if time.monotonic() + CHUNK_S > deadline:
            return
        call = [sys.executable, "-m", "loadtest.bench.gpu.half_precision", str(folder), dtype, "--here", "--only"]
        state = folder / f"state{number}"
        variables = os.environ | {"LOCAL_STATE": str(state), "TRITON_SETTINGS_NAMES": "LOCAL_STATE"}
        done = subprocess.run(
            [*call, *systems[number * ROWS : (number + 1) * ROWS]],
            cwd=ROOT,
            env=variables,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            err.print(f"rows from {systems[number * ROWS]}: {done.stderr.strip()[-500:]}", markup=False)

    with ThreadPoolExecutor(stacks) as pool:
        list(pool.map(chunk, range(math.ceil(len(systems) / ROWS))))


def show(systems: list[str], folder: Path) -> None:
    """Print the rows that differ, and how many rows are right. Raise UserError if one differs."""
    files = [result_file(folder, system) for system in systems]
    results = [json.loads(file.read_text()) for file in files if file.exists()]
    different = [result["cells"] for result in results if not result["is_right"]]
    refused = sum(result["refused"] for result in results)
    if different:
        print_table(COLUMNS, different, text_columns=())
    allowed = LIMITS["architectures", folder.name].difference
    summary = (
        f"{folder.name}: {len(results)} of {len(systems)} rows: {len(results) - refused - len(different)} within "
        f"{allowed:g} of float32, {refused} refused, {len(different)} different"
    )
    out.print(summary)
    if different:
        raise UserError(f"{summary}: see the table above")


if __name__ == "__main__":
    run(main)
