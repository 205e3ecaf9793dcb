"""Send each of SYSTEMS example requests, alone and together, and compare the answers: make smoke.

A model that is ready may still answer wrongly, and a wrong batch answers as fast as a right one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from rich.markup import escape

from export.record import find_record
from triton_transformers.answers import Limits, Outputs, largest_difference, leaves, limits, shortened
from triton_transformers.cli import err, out, run
from triton_transformers.settings import Settings, UserError
from triton_transformers.tasks.command import ONE_FILE
from triton_transformers.tasks.requests import Examples, Row, example_rows
from triton_transformers.tasks.task import PIPELINE
from triton_transformers.triton import Triton, TritonError, engines
from triton_transformers.triton_messages import is_unknown_model

CLIENTS = 16
REPEATS = 4  # of each example, so that there is something to batch
TIMEOUT_S = 120


class SmokeError(Exception):
    """An answer that is wrong in itself, differs in a batch, or from the one that the assembly saw."""


def main() -> int:
    settings = Settings.load()
    failures = 0
    for name in settings.systems:
        error = check_system(settings, name)
        out.print(f"[red]failed[/]  {name}: {escape(error)}" if error else f"[green]ok[/]      {name}")
        failures += bool(error)
    if failures:
        url = settings.url("TRITON_HTTP_PORT")
        raise UserError(f"{failures} system(s) failed against {url}: `make status` shows what runs there")
    return 0


def check_system(settings: Settings, name: str) -> str:
    """Send the system its examples; return the first error, or nothing."""
    repository = settings.model_repository
    record, examples = find_record(name, repository), Examples.read(repository / name)
    if record and record.system == name and not examples:
        err.print(
            f"{name}: its answers are compared with each other only, because an earlier release assembled it. To keep "
            f"what an assembly answers, assemble it again: `make remove SYSTEM={name}`, then `make add`"
        )
    triton, running = Triton(settings.url("TRITON_HTTP_PORT")), engines(settings.url("TRITON_METRICS_PORT"))
    return attempt(triton, name, record.precision if record else "", examples, running)


def attempt(
    triton: Triton,
    name: str,
    precision: str = "",
    examples: Examples | None = None,
    running: dict[str, str] | None = None,
) -> str:
    """Send the system its examples alone and together; return the first error, or nothing.

    Without `examples`, invent requests. `precision` is the row of LIMITS, and `running` has the engine and the
    precision of each model that reports them.
    """
    try:
        configs = triton.composing(name)
        used = [(running or {}).get(model, "") for model in configs]
        rows = examples.rows if examples else example_rows(name, configs)
        send = partial(send_rows, triton, name, configs[name])
        alone = [send([row])[0] for row in rows]
        if examples and examples.outputs:
            assembly = f"than its assembly saw it ({examples.engine})"
            compare(rows, examples.outputs, alone, assembly, limits("seen", examples.precision, used))
        for description, answers in together(send, rows, configs[name]["max_batch_size"]):
            compare(rows, alone, answers, f"{description} than alone", limits("batch", precision, used))
        return ""
    except (TritonError, SmokeError) as error:
        return "it is not served" if is_unknown_model(str(error)) else str(error)


def send_rows(triton: Triton, name: str, config: dict[str, Any], rows: list[Row]) -> list[Outputs]:
    """Send the rows in one request; return the outputs of each."""
    if config.get("model_transaction_policy", {}).get("decoupled"):
        pieces = triton.stream(name, {tensor["name"]: tensor["data"][0] for tensor in rows[0]}, TIMEOUT_S)
        if not pieces:
            raise SmokeError("the response has no piece")
        names = [tensor["name"] for tensor in config["output"]]
        return [{name: ["".join(str(piece[name]) for piece in pieces)] for name in names if name in pieces[0]}]
    batch = [len(rows)] if config["max_batch_size"] > 0 else []
    inputs = [
        {**columns[0], "shape": batch + columns[0]["shape"], "data": [x for tensor in columns for x in tensor["data"]]}
        for columns in zip(*rows, strict=True)
    ]
    outputs = triton.infer(name, {"inputs": inputs}, TIMEOUT_S)["outputs"]
    check(outputs)
    if config.get("backend") == PIPELINE:
        return [{"outputs": leaves(pipeline_answer(text))} for text in outputs[0]["data"]]
    parts = {output["name"]: split(output, len(rows)) for output in outputs}
    return [{name: part[row] for name, part in parts.items()} for row in range(len(rows))]


def pipeline_answer(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise SmokeError(f"the answer is not JSON: {text[:30]}") from None


def check(outputs: list[dict[str, Any]]) -> None:
    """Raise if there is no output, or one that cannot be right."""
    if not outputs:
        raise SmokeError("the response has no outputs")
    for output in outputs:
        if len(output["data"]) != math.prod(output["shape"]):
            raise SmokeError(f"{output['name']} has {len(output['data'])} elements, but the shape {output['shape']}")
        if any(isinstance(value, float) and not math.isfinite(value) for value in output["data"]):
            raise SmokeError(f"{output['name']} has values that are not finite")


def split(output: dict[str, Any], rows: int) -> list[list[Any]]:
    size = len(output["data"]) // rows
    return [output["data"][row * size : (row + 1) * size] for row in range(rows)]


Send = Callable[[list[Row]], list[Outputs]]


def together(send: Send, rows: list[Row], max_batch: int) -> Iterator[tuple[str, list[Outputs]]]:
    """Yield the answers to the examples in one request, if the system takes several rows, and at the same time."""
    if max_batch > 1:
        batches = [rows[start : start + max_batch] for start in range(0, len(rows), max_batch)]
        yield "in one request with others", [outputs for batch in batches for outputs in send(batch)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = [outputs for (outputs,) in pool.map(lambda row: send([row]), rows * REPEATS)]
    for start in range(0, len(answers), len(rows)):
        yield f"beside {CLIENTS - 1} other requests", answers[start : start + len(rows)]


def compare(rows: list[Row], expected: list[Outputs], actual: list[Outputs], condition: str, allowed: Limits) -> None:
    """Raise if an answer differs from the expected one to the same example."""
    worst = largest_difference(expected, actual, allowed)
    if not worst.size <= allowed.difference:
        limit = f", at most {allowed.difference:g} is allowed" if math.isfinite(worst.size) else ""
        raise SmokeError(
            f"example {worst.row + 1} of {len(rows)} ({abbreviated(rows[worst.row])}) is answered differently "
            f"{condition}: {worst.words}{limit}"
        )


def abbreviated(row: Row) -> str:
    """Return the last text of an example, which is the one that varies, or the name of its first input."""
    hidden = (*ONE_FILE, "images", "parameters")
    texts = [t["data"][0] for t in row if t["datatype"] == "BYTES" and t["name"] not in hidden]
    if not texts:
        return f"input {row[0]['name']}"
    return shortened(texts[-1])


if __name__ == "__main__":
    run(main)
