"""BENCH=text-formats, vision-formats: a model in each FORMAT, measured as `make loadtest` does, in turn."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from loadtest.switching import MODES
from scripts.bench.server import command, environment, folder, server
from scripts.common.cli import err, out
from scripts.common.settings import ROOT, UserError
from scripts.models.catalogue import SYSTEMS

TURNS = 2


@dataclass(frozen=True)
class Subject:
    """`served`: system -> its FORMAT."""

    weights: Callable[[Path], Path]
    served: dict[str, str]
    load: dict[str, str]


def save_vit(folder: Path) -> Path:
    """As large as google/vit-base-patch16-224, with random weights: speed asks no more of them."""
    import torch
    from transformers import ViTConfig, ViTImageProcessor, ViTModel

    torch.manual_seed(1)
    ViTModel(ViTConfig()).save_pretrained(folder)
    ViTImageProcessor().save_pretrained(folder)
    return folder


SUBJECTS = {
    "text-formats": Subject(
        lambda _: SYSTEMS["embedding"].source.verify(),
        {"text_onnx": "onnx", "text_int8": "onnx-int8", "text_python": "python"},
        {"USERS": "32", "ROUNDS": "2", "WINDOW": "10"},
    ),
    "vision-formats": Subject(
        save_vit,
        {"python_vit": "python", "vit_ensemble": "onnx", "vit_int8": "onnx-int8"},
        {"USERS": "16", "ROUNDS": "2", "WINDOW": "15"},
    ),
}


def main(name: str) -> None:
    subject = SUBJECTS[name]
    windows: dict[str, list[dict]] = {system: [] for system in subject.served}
    with folder() as work:
        variables = environment(work, **subject.load)
        weights = str(subject.weights(work / "weights"))
        for system, form in subject.served.items():
            command("models", variables | {"SYSTEMS": system, "SOURCE": weights, "FORMAT": form})
        variables["SYSTEMS"] = " ".join(subject.served)
        with server(variables):
            for turn in range(TURNS):
                for system in subject.served:
                    with err.status(f"turn {turn + 1} of {TURNS}: {system}"):
                        windows[system] += measure(variables | {"SYSTEM": system})
    show(subject, windows)


def measure(variables: dict[str, str]) -> list[dict]:
    latest = Path(variables["REPORTS"]) / "latest"
    before = latest.resolve()
    done = subprocess.run([sys.executable, "-m", "loadtest"], cwd=ROOT, env=variables, capture_output=True, text=True)
    if latest.resolve() == before:  # its exit code may only say that batching was not proven
        raise UserError(f"the comparison of {variables['SYSTEM']} left no results: {done.stderr.strip()}")
    return json.loads((latest / "results.json").read_text())["windows"]


def show(subject: Subject, windows: dict[str, list[dict]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("system", "FORMAT", "batching", "requests/s", "p50 ms", "p95 ms", "batch"):
        table.add_column(column, justify="right")
    for system, measured in windows.items():
        for mode in MODES:
            of_mode = [window for window in measured if window["mode"] == mode]
            keys = ("throughput_rps", "p50_ms", "p95_ms", "mean_batch")
            figures = (statistics.median(window[key] for window in of_mode) for key in keys)
            table.add_row(system, subject.served[system], mode, *(f"{figure:.1f}" for figure in figures))
    out.print(table)
    out.print(f"medians of {len(of_mode)} windows; {subject.load['USERS']} users")
