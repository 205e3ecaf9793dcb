"""Compare small models of many architectures, served by Triton, with their reference library: docs/architectures.md.

Each is compared three times: its requests one after the other, all rows in one request, and 16 clients at once.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from loadtest.host import host
from scripts.bench.reference_answers import Outputs, largest_difference, reference, requests, served_outputs
from scripts.bench.server import environment, folder, server
from scripts.bench.small_models import SMALL_MODELS, SmallModel
from scripts.common.cli import err, out
from scripts.common.settings import ROOT, Settings, UserError
from scripts.common.triton import Triton, TritonError
from scripts.models.assemble import assemble_all
from scripts.models.record import models_of

PAGE = ROOT / "docs/architectures.md"
MARKER = "<!-- The rest of this page is written by `make bench BENCH=architectures`. -->"
CLIENTS, REPEATS = 16, 4
# The largest difference from the reference library, relative to the largest value of an output.
TOLERANCE, INT8_TOLERANCE = 1e-3, 0.5
WAYS = ("alone", "one request", f"{CLIENTS} clients")


@dataclass(frozen=True)
class Result:
    """A row of the table: the largest difference in each way, or the sentence with which the model is refused."""

    model: SmallModel
    format: str
    differences: tuple[float, ...] = ()
    refusal: str = ""

    @property
    def is_right(self) -> bool:
        """Return whether the answers are equal. A refusal is wrong, but int8 may cost random weights too much."""
        if self.refusal:
            return self.format == "onnx-int8"
        tolerance = INT8_TOLERANCE if self.format == "onnx-int8" else TOLERANCE
        return all(difference <= tolerance for difference in self.differences)

    @property
    def cells(self) -> list[str]:
        name = f"{self.model.kind}{self.model.head}"
        first = [f"`{name}`" + (f", {self.model.note}" if self.model.note else ""), self.model.task, f"`{self.format}`"]
        if self.refusal:
            return [*first, *["–"] * len(WAYS), f"refused: {self.refusal}"]
        verdict = "equal" if self.is_right else "**differs**"
        return [*first, *(f"{difference:.0e}" for difference in self.differences), verdict]


def run() -> None:
    start = time.monotonic()
    results = measure(SMALL_MODELS)
    wrong = [result for result in results if not result.is_right]
    refused = sum(bool(result.refusal) for result in results)
    different = sum(not result.refusal for result in wrong)
    machine = host()
    summary = (
        f"{len(results)} rows: {len(results) - refused - different} equal, {refused} refused, {different} different. "
        f"Measured in {(time.monotonic() - start) / 60:.0f} minutes on {machine['cores']} cores of {machine['cpu']}."
    )
    write(summary, results)
    out.print(f"{summary}\n{PAGE.relative_to(ROOT)}")
    if wrong:
        raise UserError(
            "refused, or different from the reference library: " + ", ".join(" ".join(result.cells) for result in wrong)
        )


def measure(models: Iterable[SmallModel]) -> list[Result]:
    """Save, assemble, load and compare each of the models in each of its formats."""
    with folder() as work:
        variables = environment(work, TRITON_ADMIN_KEY=secrets.token_urlsafe())
        settings = Settings(Settings.load() | variables)
        rows = [(model, format) for model in models for format in model.formats]
        with one_thread():
            refusals = {row: assemble(*row, work, settings) for row in rows}
            loadable = [row for row in rows if not refusals[row]]
            expected = {model: reference(model, work / "weights" / model.system) for model, _ in loadable}
        triton = Triton(f"http://127.0.0.1:{variables['TRITON_HTTP_PORT']}", variables["TRITON_ADMIN_KEY"])
        with server(variables | {"SYSTEMS": system(*loadable[0])}), ThreadPoolExecutor(2) as pool:
            differences = pool.map(lambda row: compare(row[0], row[1], expected[row[0]], work, triton), loadable)
            compared = dict(zip(loadable, differences, strict=True))
    return [Result(*row, refusal=refusals[row]) if refusals[row] else Result(*row, compared[row]) for row in rows]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Keep PyTorch in this process on one thread: more take longer to meet than to compute a small model."""
    import torch

    set_threads, before = torch.set_num_threads, torch.get_num_threads()
    set_threads(1)
    torch.set_num_threads = lambda nthreads: None  # the backend sets as many as there are CPUs
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        set_threads(before)


def system(model: SmallModel, format: str) -> str:
    return f"{model.system}{format.replace('-', '')}"


def assemble(model: SmallModel, format: str, work: Path, settings: Settings) -> str:
    """Assemble one row; return the reason if it is refused."""
    weights = work / "weights" / model.system
    if not weights.exists():
        model.save(weights)
    chosen = {"SYSTEMS": system(model, format), "SOURCE": str(weights), "TASK": model.task, "FORMAT": format}
    try:
        assemble_all(Settings(settings | chosen))
    except UserError as error:
        return str(error).replace(f"{weights}", "the model")
    return ""


def compare(model: SmallModel, format: str, expected: list[Outputs], work: Path, triton: Triton) -> tuple[float, ...]:
    """Return the largest difference from the reference library, for each of WAYS."""
    name, rows = system(model, format), requests(model)
    models = models_of(name, work / "models")[::-1]  # the steps before the ensemble
    try:
        for part in models:
            triton.load(part)
        config = triton.config(name)
        send = partial(served_outputs, model, triton, name, config)
        alone = [send([row])[0] for row in rows]
        together = send(rows)
        with ThreadPoolExecutor(CLIENTS) as pool:
            at_once = [answer for (answer,) in pool.map(lambda row: send([row]), rows * REPEATS)]
    except TritonError as error:
        err.print(f"{name}: {error}")
        return (math.inf,) * len(WAYS)
    finally:
        for part in reversed(models):
            triton.unload(part)
    return tuple(largest(expected, answers, format) for answers in (alone, together, at_once))


def largest(expected: list[Outputs], answers: list[Outputs], format: str) -> float:
    """Return the largest difference. In int8, only numbers are compared: texts jump where numbers differ a little."""
    repeats = len(answers) // len(expected)
    return largest_difference(expected * repeats, answers, compares_texts=format != "onnx-int8")


def write(summary: str, results: list[Result]) -> None:
    text, marker, _ = PAGE.read_text().partition(MARKER)
    assert marker, PAGE
    header = ["architecture", "task", "`FORMAT`", *WAYS, ""]
    lines = [header, ["---"] * len(header), *(result.cells for result in results)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    PAGE.write_text(f"{text}{marker}\n\n{summary}\n\n{table}\n")
