"""Keep the example requests of a system, with the answers that the assembly sees, in its examples.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from export.catalogue import Job
from export.check.served import ServedSystem, Tensors, backend_config
from triton_transformers.answers import Outputs, leaves
from triton_transformers.model_config import find_config
from triton_transformers.settings import UserError
from triton_transformers.tasks.examples import Traits
from triton_transformers.tasks.requests import Config, Examples, Row, example_rows, path_of, pipeline_rows
from triton_transformers.tensors import DTYPES


def keep_examples(job: Job, served: ServedSystem) -> None:
    """Send the examples to a system, each alone, and keep its answers."""
    rows = example_rows(job.system, {**served.configs, job.system: served.config})
    outputs = [
        {tensor["name"]: elements(own[tensor["name"]]) for tensor in served.config["output"] if tensor["name"] in own}
        for own in served.alone([tensors(row, served.config) for row in rows])
    ]
    precision = job.format if job.format in ("onnx-int8", "int8") else served.dtype
    engine = "pytorch" if job.format == "python" else "openvino" if job.format == "int8" else served.engine
    Examples(rows, outputs, engine, precision).write(job.folder / job.system)


def keep_pipeline_examples(job: Job, served: ServedSystem, traits: Traits, dtype: str) -> None:
    """Send the examples to a pipeline on PyTorch, each alone, and keep its answers if only the rows decide them.

    Keep no example that it refuses: a model of few positions takes no long text, CANINE none of one letter.
    """
    rows: list[Row] = pipeline_rows(traits)
    outputs: list[Outputs] = []
    if not traits.row.is_random:
        answered = [(row, answer) for row in rows for answer in answers_of(served, row)]
        rows = [row for row, _ in answered]
        outputs = [{"outputs": leaves(json.loads(answer["outputs"].item()))} for _, answer in answered]
    precision = "exact" if dtype == "float32" else "inexact"
    Examples(rows, outputs, "pytorch", precision).write(job.folder / job.system)


def answers_of(served: ServedSystem, row: Row) -> list[Tensors]:
    """Return the answer of a system to one row, or nothing if it refuses the row."""
    try:
        return served.alone([tensors(row, served.config)])
    except UserError:
        return []


def keep_requests(system: str, models: list[Path]) -> None:
    """Keep requests without answers for a system whose recipe asked it nothing: models that generate, and Neuron's."""
    files = {model.name: find_config(model.name, model.parent) for model in models}
    configs: dict[str, Config] = {name: backend_config(file) for name, file in files.items() if file}
    folder = next(model for model in models if model.name == system)
    if not path_of(folder).exists():
        Examples(example_rows(system, configs)).write(folder)


def tensors(row: Row, config: dict[str, Any]) -> Tensors:
    batch = [1] if config["max_batch_size"] else []
    values = {t["name"]: [x.encode() if isinstance(x, str) else x for x in t["data"]] for t in row}
    types = {t["name"]: DTYPES.get(t["datatype"], np.object_) for t in row}
    return {t["name"]: np.array(values[t["name"]], types[t["name"]]).reshape([*batch, *t["shape"]]) for t in row}


def elements(values: np.ndarray) -> list[Any]:
    """Return the elements of an output as Triton's JSON has them."""
    return [x.decode() if isinstance(x, bytes) else x for x in values.ravel().tolist()]
