"""Build example requests for any system, and read and write examples.json, in which a system keeps its own.

It imports no numpy and no Pillow, which the environment of `make smoke` lacks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from triton_transformers.answers import FILES, KEPT, Outputs
from triton_transformers.tasks.command import ONE_FILE
from triton_transformers.tasks.examples import SMALL, Traits, encoded, image, questions
from triton_transformers.tasks.task import PIPELINE

TEXT = "Dynamic batching in one sentence, 안녕하세요"
# One of them is a short question, so that of two texts the first one leaves room for the second.
TEXTS = ("a", "It rains.", TEXT, "Which one?", f"{TEXT}. {TEXT}")
NEW_TOKENS = 4
DIGITS = 7  # of a number

Config = Mapping[str, Any]  # of a model, as in Triton's JSON
Tensor = dict[str, Any]  # as in Triton's JSON, without the axis of the batch
Row = list[Tensor]  # the inputs of one request


def example_rows(system: str, configs: Mapping[str, Config]) -> list[Row]:
    """Return the inputs of each example. `configs` has the system and its steps."""
    config = configs[system]
    if config.get("backend") == PIPELINE:
        return pipeline_rows(Traits.from_config(config))
    required = required_inputs(config)
    strings = [tensor["name"] for tensor in required if tensor["data_type"] == "TYPE_STRING"]
    columns = text_columns(strings, masked(TEXTS, configs))
    if "image_bytes" in columns:
        columns["image_bytes"] = [encoded(image(number, SMALL)) for number in range(len(TEXTS))]
    required += [tensor for tensor in config["input"] if tensor["name"] == "max_new_tokens"]
    return [[example(tensor, columns, number) for tensor in required] for number in range(len(TEXTS))]


def required_inputs(config: Config) -> list[dict[str, Any]]:
    """Return the required inputs, or the first one if all are optional; the file of an image rather than pixels."""
    inputs = {tensor["name"]: tensor for tensor in config["input"]}
    required = [tensor for tensor in inputs.values() if not tensor.get("optional")] or [*inputs.values()][:1]
    return [inputs.get("image_bytes", tensor) if tensor["name"] == "image" else tensor for tensor in required]


def text_columns(names: Sequence[str], texts: Sequence[str]) -> dict[str, list[str]]:
    """Return different texts for each input of texts. The first of several gets the questions."""
    columns = {name: [*texts[n:], *texts[:n]] for n, name in enumerate(names)}
    return columns | ({names[0]: questions(texts)} if len(names) > 1 else {})


def masked(texts: Sequence[str], configs: Mapping[str, Config]) -> list[str]:
    """Return the texts with the mask token that a fill-mask model takes exactly once."""
    masks = (config.get("parameters", {}).get("exactly_one") for config in configs.values())
    mask = next((mask["string_value"] for mask in masks if mask), "")
    return [f"{mask} {text}".strip() for text in texts]


def pipeline_rows(traits: Traits) -> list[Row]:
    """Return the inputs of rows with the fields of a pipeline's task. Files in JSON are in base64."""
    kinds = traits.row.fields
    parameters = json.dumps(traits.quick | ({"seed": 0} if traits.row.is_random else {}))
    rows = []
    for row in traits.rows(len(TEXTS), TEXTS):
        texts = {
            name: encoded(value) if kinds[name] in ONE_FILE else value.decode() for name, value in row.fields.items()
        }
        texts["parameters"] = parameters
        rows.append([{"name": n, "shape": [1], "datatype": "BYTES", "data": [text]} for n, text in texts.items()])
    return rows


def example(tensor: dict[str, Any], columns: Mapping[str, Sequence[str]], number: int) -> Tensor:
    """Return one row of an input. Vectors differ from example to example; token ids may have to be 1."""
    name, kind = tensor["name"], tensor["data_type"].removeprefix("TYPE_")
    dims = [int(size) if int(size) > 0 else 1 if kind == "STRING" else 8 for size in tensor["dims"]]
    value: Any = NEW_TOKENS if name == "max_new_tokens" else number + 1.0 if kind.startswith("FP") else 1
    if name in columns:
        value = columns[name][number % len(columns[name])]
    return {
        "name": name,
        "shape": dims,
        "datatype": kind.replace("STRING", "BYTES"),
        "data": [value] * math.prod(dims),
    }


# --- examples.json ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Examples:
    """The example requests of a system, and the answers that its assembly saw to each alone."""

    rows: list[Row]
    outputs: list[Outputs] = field(default_factory=list)  # none, if none was seen that another run would repeat
    engine: str = ""  # that gave the answers
    precision: str = ""  # the row of triton_transformers.answers.LIMITS

    @classmethod
    def read(cls, model: Path) -> Examples | None:
        """Return the examples in the folder of a model, or None if it has none that can be read."""
        try:
            return cls(**json.loads(path_of(model).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, model: Path) -> None:
        """Write the examples. Keep the beginning of outputs, and of files in them, and few digits of numbers."""
        kept = [{name: [shorter(x) for x in values[:KEPT]] for name, values in row.items()} for row in self.outputs]
        path_of(model).parent.mkdir(parents=True, exist_ok=True)
        path_of(model).write_text(json.dumps(asdict(self) | {"outputs": kept}) + "\n")


def path_of(model: Path) -> Path:
    return model / "1/examples.json"


def shorter(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    return next((start for start in FILES if isinstance(value, str) and value.startswith(start)), value)
