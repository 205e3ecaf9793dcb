"""Compare small models of many architectures, served by Triton, with their reference library: docs/architectures.csv.

Each is compared three times: its requests one after the other, all rows in one request, and 16 clients at once.
"""

from __future__ import annotations

import contextlib
import csv
import math
import multiprocessing
import secrets
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from export.assemble import assemble_all
from export.record import models_of
from loadtest.bench.architectures.reference_answers import reference, requests, served_outputs
from loadtest.bench.architectures.small_models import SMALL_MODELS, SmallModel, recorded_models
from loadtest.server.machine import host
from loadtest.server.own_stack import OwnStack, folder
from triton_transformers.answers import LIMITS, Limits, Outputs, largest_difference
from triton_transformers.cli import err, out
from triton_transformers.settings import ROOT, Settings, UserError
from triton_transformers.triton import Triton, TritonError

TABLE = ROOT / "docs/architectures.csv"
CLIENTS, REPEATS = 16, 4
WAYS = ("alone", "one request", f"{CLIENTS} clients")
COLUMNS = ("architecture", "saved by", "task", "format", *WAYS, "result")
Row = tuple[SmallModel, str]  # a model and the format in which it is served


@dataclass(frozen=True)
class Result:
    """A row of the table: the largest difference in each way, or the sentence that refuses the model."""

    model: SmallModel
    format: str
    differences: tuple[float, ...] = ()
    refusal: str = ""
    dtype: str = ""

    @property
    def is_right(self) -> bool:
        """Return whether the answers are equal, or the model is refused."""
        allowed = limits_of(self.format, self.dtype).difference
        return all(difference <= allowed for difference in self.differences)

    @property
    def cells(self) -> list[str]:
        """Return the row, in the order of COLUMNS."""
        name = self.model.architecture + (f", {self.model.note}" if self.model.note else "")
        first = [name, self.model.saved_by, self.model.task, self.format]
        if self.refusal:
            return [*first, *[""] * len(WAYS), f"refused: {self.refusal}"]
        if not self.differences:
            return [*first, *[""] * len(WAYS), "not measured"]
        verdict = "equal" if self.is_right else "differs"
        return [*first, *(f"{difference:.0e}" for difference in self.differences), verdict]


def all_models() -> list[SmallModel]:
    return [*SMALL_MODELS, *recorded_models("4.57")]


def run() -> None:
    start = time.monotonic()
    results = measure(all_models())
    different = [result for result in results if not result.is_right]
    refused = sum(bool(result.refusal) for result in results)
    architectures = len({result.model.architecture for result in results})
    machine = host()
    summary = (
        f"{len(results)} rows of {architectures} architectures: {len(results) - refused - len(different)} equal, "
        f"{refused} refused, {len(different)} different. Measured in {(time.monotonic() - start) / 60:.0f} minutes on "
        f"{machine['cores']} cores of {machine['cpu']}."
    )
    write(results)
    out.print(f"{summary}\n{TABLE.relative_to(ROOT)}")
    if different:
        rows = ", ".join(" ".join(result.cells) for result in different)
        raise UserError(f"different from the reference library: {rows}")


def measure(models: Iterable[SmallModel], dtype: str = "", **changes: str) -> list[Result]:
    """Save, assemble, load and compare each of the models in each of its formats.

    `dtype` makes models on PyTorch compute in that type; `changes` are settings of the server.

    One process assembles and computes the answers of the libraries, because importing them takes longer than a small
    model. Meanwhile the server answers for the models that are ready.
    """
    with folder() as work:
        # `auto` may choose bfloat16, which changes the third digit.
        fixed = {"TRITON_ADMIN_KEY": secrets.token_urlsafe(), "TRITON_ENGINE": "onnxruntime"}
        own = OwnStack(work, quiet=True, **fixed, **changes)
        settings = Settings.load().replace(**own.variables)
        rows = [(model, format) for model in models for format in model.formats]
        results: dict[Row, Result | Future[Result]] = {}
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as comparer:
            for row, (refusal, expected) in prepared(rows, work, settings, dtype):
                if refusal:
                    results[row] = Result(*row, refusal=refusal)
                    continue
                if not any(isinstance(result, Future) for result in results.values()):
                    stack.enter_context(own.serving(SYSTEMS=system(*row)))
                results[row] = comparer.submit(compare, *row, expected, work, own.triton, dtype)
            return [result.result() if isinstance(result, Future) else result for result in results.values()]


def prepared(
    rows: list[Row], work: Path, settings: Settings, dtype: str = ""
) -> Iterator[tuple[Row, tuple[str, list[Outputs]]]]:
    """Yield each row with the sentence that refuses it, or with the library's answers. Survive crashes of a library."""
    pool = None
    try:
        for number, row in enumerate(rows, 1):
            pool = pool or ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
            try:
                prepared_row = pool.submit(prepare, *row, work, settings, dtype).result()
            except BrokenProcessPool:
                pool, prepared_row = None, ("a library crashed", [])
            err.print(f"{number} of {len(rows)}: {system(*row)} {prepared_row[0]}", markup=False)
            yield row, prepared_row
    finally:
        if pool:
            pool.shutdown()


def prepare(
    model: SmallModel, format: str, work: Path, settings: Settings, dtype: str = ""
) -> tuple[str, list[Outputs]]:
    """Assemble one row; return the reason if it is refused, and otherwise the answers of the reference library."""
    with one_thread():
        weights = work / "weights" / model.system
        if not weights.exists():
            model.save(weights)
        chosen = {"SYSTEMS": system(model, format), "SOURCE": str(weights), "TASK": model.task, "FORMAT": format}
        try:
            assemble_all(settings.replace(**chosen))
        except UserError as error:
            return str(error).replace(f"{weights}", "the model"), []
        if dtype:
            set_dtype(system(model, format), settings.model_repository, dtype)
        try:
            return "", reference(model, weights)
        except Exception as error:  # the library may raise anything
            return f"not compared: the library itself failed ({type(error).__name__}: {first_line(error)})", []


def set_dtype(system: str, repository: Path, dtype: str) -> None:
    """Let the models of a system that run on PyTorch compute in this type."""
    for config in edited_torch_models(system, repository):
        config.parameters["dtype"].string_value = dtype


def edited_torch_models(system: str, repository: Path) -> Iterator[ModelConfig]:
    """Yield the configuration of each model of a system that runs on PyTorch, and write it back."""
    for model in models_of(system, repository):
        path = repository / model / "config.pbtxt"
        config = text_format.Parse(path.read_text(), ModelConfig())
        if config.backend == "transformers":
            yield config
            path.write_text(text_format.MessageToString(config))


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:200]


def system(model: SmallModel, format: str) -> str:
    return f"{model.system}{format.replace('-', '')}"


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


def compare(model: SmallModel, format: str, expected: list[Outputs], work: Path, triton: Triton, dtype: str) -> Result:
    """Compare the answers of the server with those of the reference library, in each of WAYS."""
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
        return Result(model, format, (math.inf,) * len(WAYS), dtype=dtype)
    finally:
        for part in reversed(models):
            with contextlib.suppress(TritonError):  # it may have crashed
                triton.unload(part)
    limits = limits_of(format, dtype)
    differences = tuple(
        largest_difference(expected * (len(answers) // len(expected)), answers, limits).size
        for answers in (alone, together, at_once)
    )
    return Result(model, format, differences, dtype=dtype)


def limits_of(format: str, dtype: str) -> Limits:
    return LIMITS["architectures", format if format == "onnx-int8" else dtype or "float32"]


def write(results: list[Result]) -> None:
    with TABLE.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *(result.cells for result in results)])
