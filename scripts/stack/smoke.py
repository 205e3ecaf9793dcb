"""Send each of SYSTEMS example requests, alone and together, and compare the answers: make smoke.

A model that is ready may still answer wrongly, and a wrong batch answers as fast as a right one.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.markup import escape

from export.record import Record, find_record
from triton_transformers.cli import out, run
from triton_transformers.settings import Settings, UserError
from triton_transformers.tasks.answer_forms import defect, leaves
from triton_transformers.tasks.command import ONE_FILE
from triton_transformers.tasks.examples import Traits
from triton_transformers.tasks.table import TASKS
from triton_transformers.tasks.task import PIPELINE
from triton_transformers.triton import Triton, TritonError, engines
from triton_transformers.triton_messages import is_unknown_model

TEXT = "Dynamic batching in one sentence, 안녕하세요"
SHORT = "Which one?"
TEXTS = ("a", "It rains.", TEXT, "Which one of them is the right one?", f"{TEXT}. {TEXT}")
NEW_TOKENS = 4
CLIENTS = 16
REPEATS = 4  # of each example, so that there is something to batch
TIMEOUT_S = 120
# The kernels that bf16 takes for one row and for many round differently: measured on MiniLM, 3e-3. The server refuses
# bf16 for a model whose answers differ from fp32 by more than this.
BF16_TOLERANCE = 3e-2

Tensor = dict[str, Any]  # as in Triton's JSON
Outputs = dict[str, list[Any]]  # the elements of each output that belong to one example


class SmokeError(Exception):
    """An answer that is wrong in itself, or differs in a batch."""


@dataclass(frozen=True)
class Limits:
    """The accepted difference between the answer to a request in a batch and the answer to it alone."""

    tolerance: float = 1e-2  # relative to the largest value of the output
    # Texts and whole numbers (labels, ranks, positions) are equal or not, and jump where other numbers differ a little.
    compares_texts: bool = True

    @classmethod
    def from_record(cls, record: Record | None) -> Limits:
        if record is None:
            return cls()
        if record.format == "onnx-int8":  # it scales the activations of a run by the largest of all its rows
            return cls(0.5, compares_texts=False)
        if record.format == "int8":  # equal on the CPUs measured, but rounding would amplify any difference
            return cls(0.2, compares_texts=False)
        if record.neuron:  # it may compute in bfloat16
            return cls(0.1, compares_texts=False)
        tolerance = record.facts.get("tolerance", cls.tolerance)
        is_exact = record.facts.get("dtype", "float32") == "float32" and tolerance <= cls.tolerance
        # Beside such weights OpenVINO rounds activations too, and in a batch in another order.
        is_quantized = record.facts.get("weights", "").startswith("int")
        return cls(tolerance, compares_texts=is_exact and not is_quantized)

    def with_engines(self, engines: Iterable[str]) -> Limits:
        """Return the limits for a system whose models run on these engines."""
        if any("bf16" in engine or "bfloat16" in engine for engine in engines):
            return Limits(max(self.tolerance, BF16_TOLERANCE), compares_texts=False)
        return self


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
    """Send the system its examples within the limits of its format; return the first error, or nothing."""
    limits = Limits.from_record(find_record(name, settings.model_repository))
    running = engines(settings.url("TRITON_METRICS_PORT"))
    return attempt(Triton(settings.url("TRITON_HTTP_PORT")), name, limits, running)


def attempt(triton: Triton, name: str, limits: Limits, running: dict[str, str] | None = None) -> str:
    """Send the system its examples alone and together; return the first error, or nothing.

    `running` has the engine and the precision of each model that reports them.
    """
    try:
        configs = triton.composing(name)
        limits = limits.with_engines((running or {}).get(model, "") for model in configs)
        rows = examples(configs[name], configs)
        send = partial(send_rows, triton, name, configs[name])
        alone = [send([row])[0] for row in rows]
        for description, answers in together(send, rows, configs[name]["max_batch_size"]):
            compare(rows, alone, answers, description, limits)
        return ""
    except (TritonError, SmokeError) as error:
        return "it is not served" if is_unknown_model(str(error)) else str(error)


def examples(config: dict[str, Any], composing: dict[str, dict[str, Any]]) -> list[list[Tensor]]:
    """Return the inputs of each example: the required inputs, or the first one if all are optional."""
    if config.get("backend") == PIPELINE:
        return pipeline_examples(Traits.from_config(config))
    inputs = config["input"]
    required = [tensor for tensor in inputs if not tensor.get("optional")] or inputs[:1]
    required += [tensor for tensor in inputs if tensor["name"] == "max_new_tokens"]
    strings = [tensor["name"] for tensor in required if tensor["data_type"] == "TYPE_STRING"]
    # Keep the first of two texts short, so that it leaves room for the second.
    short = strings[0] if len(strings) > 1 else ""
    mask = mask_token(composing)
    return [
        [example(tensor, SHORT if tensor["name"] == short else f"{mask} {text}".strip(), number) for tensor in required]
        for number, text in enumerate(TEXTS)
    ]


def pipeline_examples(traits: Traits) -> list[list[Tensor]]:
    """Return the inputs of rows with the fields of a pipeline's task. Files in JSON are in base64."""
    kinds = traits.row.fields
    parameters = json.dumps(traits.quick | ({"seed": 0} if traits.row.is_random else {}))
    rows = []
    for row in traits.rows(len(TEXTS), TEXTS):
        texts = {
            name: base64.b64encode(value).decode() if kinds[name] in ONE_FILE else value.decode()
            for name, value in row.fields.items()
        }
        texts["parameters"] = parameters
        rows.append([{"name": n, "shape": [1], "datatype": "BYTES", "data": [text]} for n, text in texts.items()])
    return rows


def mask_token(composing: dict[str, dict[str, Any]]) -> str:
    """Return the mask token that a fill-mask model requires, or nothing."""
    masks = (config.get("parameters", {}).get("exactly_one") for config in composing.values())
    return next((mask["string_value"] for mask in masks if mask), "")


def example(tensor: dict[str, Any], text: str, number: int) -> Tensor:
    """Return one row of an input. Images and vectors differ from example to example; token ids may have to be 1."""
    kind = tensor["data_type"].removeprefix("TYPE_")
    dims = [int(size) if int(size) > 0 else 1 if kind == "STRING" else 8 for size in tensor["dims"]]
    values = {"STRING": text, "FP32": number + 1.0, "FP16": number + 1.0, "FP64": number + 1.0}
    value = NEW_TOKENS if tensor["name"] == "max_new_tokens" else values.get(kind, 1)
    return {
        "name": tensor["name"],
        "shape": dims,
        "datatype": kind.replace("STRING", "BYTES"),
        "data": [value] * math.prod(dims),
    }


def send_rows(triton: Triton, name: str, config: dict[str, Any], rows: list[list[Tensor]]) -> list[Outputs]:
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
        task = Traits.from_config(config).task
        return [{"outputs": leaves(pipeline_answer(text, task))} for text in outputs[0]["data"]]
    parts = {output["name"]: split(output, len(rows)) for output in outputs}
    return [{name: part[row] for name, part in parts.items()} for row in range(len(rows))]


def pipeline_answer(text: str, task: str) -> Any:
    """Return the answer of a pipeline. Raise if it is not what its task answers."""
    try:
        answer = json.loads(text)
    except ValueError:
        raise SmokeError(f"the answer is not JSON: {text[:30]}") from None
    if wrong := defect(answer, TASKS[task].answer):
        raise SmokeError(f"{wrong}, which {task} answers: {text[:100]}")
    return answer


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


Send = Callable[[list[list[Tensor]]], list[Outputs]]


def together(send: Send, rows: list[list[Tensor]], max_batch: int) -> Iterator[tuple[str, list[Outputs]]]:
    """Yield the answers to the examples in one request, if the system takes several rows, and at the same time."""
    if max_batch > 1:
        batches = [rows[start : start + max_batch] for start in range(0, len(rows), max_batch)]
        yield "in one request with others", [outputs for batch in batches for outputs in send(batch)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = [outputs for (outputs,) in pool.map(lambda row: send([row]), rows * REPEATS)]
    for start in range(0, len(answers), len(rows)):
        yield f"beside {CLIENTS - 1} other requests", answers[start : start + len(rows)]


def compare(
    rows: list[list[Tensor]], alone: list[Outputs], answers: list[Outputs], description: str, limits: Limits
) -> None:
    """Raise if an answer differs from that to the same example alone. One with more elements ends in padding."""
    scales = {
        name: max((abs(x) for outputs in alone for x in outputs[name] if isinstance(x, float)), default=0.0) or 1.0
        for name in alone[0]
    }
    for number, (row, expected, actual) in enumerate(zip(rows, alone, answers, strict=True), 1):
        expected, actual = in_one_order(expected, actual)
        for name, values in expected.items():
            differs = difference(values, actual.get(name, []), scales[name], limits)
            if differs:
                raise SmokeError(
                    f"example {number} of {len(rows)} ({abbreviated(row)}) is answered differently {description} than "
                    f"alone: {name} {differs}"
                )


def in_one_order(expected: Outputs, actual: Outputs) -> tuple[Outputs, Outputs]:
    """Sort the weights of sparse vectors by token: their order in an answer depends on the last digit of a weight."""
    if not expected.keys() & actual.keys() >= {"token", "token_id", "weight"}:
        return expected, actual
    weights = [dict(zip(outputs["token_id"], outputs["weight"], strict=True)) for outputs in (expected, actual)]
    ids = sorted(weights[0].keys() | weights[1].keys())
    first, second = (
        {name: values for name, values in outputs.items() if name not in ("token", "token_id")}
        | {"weight": [own.get(id, 0.0) for id in ids]}
        for outputs, own in zip((expected, actual), weights, strict=True)
    )
    return first, second


def difference(expected: list[Any], actual: list[Any], scale: float, limits: Limits) -> str:
    """Describe how far two answers differ, if that is too far."""
    if len(actual) < len(expected):
        return f"has {len(actual)} elements instead of {len(expected)}"
    largest = 0.0
    for a, b in zip(expected, actual, strict=False):
        if isinstance(a, float) and isinstance(b, float | int):
            largest = max(largest, abs(a - b) / scale)
        elif limits.compares_texts and a != b:
            return f"is {shortened(b)} instead of {shortened(a)}"
    if largest <= limits.tolerance:
        return ""
    return f"differs by {largest:.2g} of its largest value, at most {limits.tolerance:g} is allowed"


def abbreviated(row: list[Tensor]) -> str:
    """Return the last text of an example, which is the one that varies, or the name of its first input."""
    hidden = (*ONE_FILE, "images", "parameters")
    texts = [t["data"][0] for t in row if t["datatype"] == "BYTES" and t["name"] not in hidden]
    if not texts:
        return f"input {row[0]['name']}"
    return shortened(texts[-1])


def shortened(value: Any) -> str:
    text = str(value)
    return f"'{text}'" if len(text) < 30 else f"'{text[:27]}...'"


if __name__ == "__main__":
    run(main)
