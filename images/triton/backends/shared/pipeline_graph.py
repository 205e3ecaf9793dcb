"""Runs the network of a pipeline, or its encoder if it generates, as a graph on OpenVINO."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shared.parameters import UNPINNED
from shared.types import BadRequest

GRAPH = "graph"  # the folder beside the weights
FILE, DESCRIPTION = "openvino_model.xml", "graph.json"
# Arguments that ask a network for what no pipeline reads, or for the form that it returns anyway.
RETURNED = ("return_dict", "output_attentions", "output_hidden_states")


class Call(NamedTuple):
    """The arguments of a network that are tensors, and the others that are set."""

    tensors: dict[str, torch.Tensor]
    settings: dict[str, Any]


class Description(NamedTuple):
    """The form of a graph: its inputs and the settings that it was exported with, and its outputs and their class."""

    inputs: list[str]
    ignored: list[str]  # other tensors, which change nothing
    settings: dict[str, Any]
    outputs: list[str]
    module: str
    name: str


def exported_part(model: Any) -> torch.nn.Module:
    """Return the part of a network that runs once for an answer."""
    part: torch.nn.Module = model.get_encoder() if model.can_generate() else model
    return part


def call_of(signature: inspect.Signature, arguments: tuple[Any, ...], named: dict[str, Any]) -> Call:
    bound = signature.bind(*arguments, **named).arguments
    given = {name: value for name, value in (bound | bound.pop("kwargs", {})).items() if value is not None}
    given = {name: value for name, value in given.items() if name not in RETURNED}
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    return Call(tensors, {name: value for name, value in given.items() if name not in tensors})


def use_graph(model: Any, folder: Path) -> None:
    """Let the part of the model run as the graph of the folder, and free the weights that the graph has too."""
    import openvino

    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        **UNPINNED,
    }
    part = exported_part(model)
    compiled = openvino.Core().compile_model(folder / FILE, "CPU", settings)
    description = Description(**json.loads((folder / DESCRIPTION).read_text()))
    part.forward = functools.wraps(part.forward)(Graph(compiled, description, part.forward))
    inside = set(part.modules())
    shared = {id(own) for module in model.modules() if module not in inside for own in module.parameters(recurse=False)}
    for weight in part.parameters():
        if id(weight) not in shared:
            weight.data = weight.data.new_empty(0)


class Graph:
    """Answers as the network does. It keeps the last answer, because generation may ask for the same one again.

    Whisper encodes a sound to recognize the language, and once more to generate the text.
    """

    def __init__(self, compiled: Any, description: Description, forward: Callable[..., Any]) -> None:
        self.compiled, self.description = compiled, description
        self.signature = inspect.signature(forward)
        self.output_class = getattr(importlib.import_module(description.module), description.name)
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        form = self.description
        tensors, settings = call_of(self.signature, arguments, named)
        inputs = [tensors.pop(name) for name in form.inputs if name in tensors]
        if len(inputs) < len(form.inputs) or tensors.keys() - {*form.ignored} or settings != form.settings:
            raise BadRequest("a parameter changes how the network runs, and the exported graph runs in one way")
        if not self.inputs or not all(map(torch.equal, inputs, self.inputs)):
            answers = self.compiled([tensor.numpy() for tensor in inputs]).to_tuple()
            self.inputs, self.outputs = inputs, list(map(torch.from_numpy, answers))
        return self.output_class(**{name: own.clone() for name, own in zip(form.outputs, self.outputs, strict=True)})
