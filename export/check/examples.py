"""Keep the example requests of a system, with the answers that the assembly sees, in its examples.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from export.catalogue import Job
from export.check.served import ServedSystem, Tensors, backend_config
from triton_transformers.answers import leaves
from triton_transformers.model_config import find_config
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
    """Send the examples to a pipeline on PyTorch, each alone, and keep its answers if only the rows decide them."""
    rows = pipeline_rows(traits)
    answers = [] if traits.row.is_random else served.alone([tensors(row, served.config) for row in rows])
    outputs = [{"outputs": leaves(json.loads(own["outputs"].item()))} for own in answers]
    precision = "exact" if dtype == "float32" else "inexact"
    Examples(rows, outputs, "pytorch", precision).write(job.folder / job.system)


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
