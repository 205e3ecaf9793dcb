"""Runs the network of a pipeline as a graph on OpenVINO; if it generates, its encoder and the steps of its decoder."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from serving.engines.lean_transformers import transformers
from serving.engines.positions import check_length, graph_limit, position_limit
from serving.triton.parameters import UNPINNED

GRAPH = "graph"  # the folder beside the weights
STEP = "step"  # the folder in it for the decoder's steps
FILE, DESCRIPTION = "openvino_model.xml", "graph.json"
TEXT = "input_ids"
FRAMES = 5  # the axes of videos
# Arguments that ask a network for what no pipeline reads, or for the form that it returns anyway.
RETURNED = ("return_dict", "output_attentions", "output_hidden_states")


class Call(NamedTuple):
    """The arguments of a network that are tensors, and the others that are set."""

    tensors: dict[str, torch.Tensor]
    settings: dict[str, Any]


class Description(NamedTuple):
    """The form of a graph: its inputs and the settings that it was exported with, and its outputs and their class."""

    inputs: list[str]
    ignored: list[str]  # tensors that only some recorded calls had; the graph does not read them
    settings: dict[str, Any]
    outputs: list[str]
    module: str
    name: str


def exported_part(model: Any) -> torch.nn.Module:
    """Return the part of a network that runs once for an answer."""
    part: torch.nn.Module = model.get_encoder() if model.can_generate() else model
    return part


def call_of(
    signature: inspect.Signature, arguments: tuple[Any, ...], named: dict[str, Any], without: tuple[str, ...] = RETURNED
) -> Call:
    """Return the arguments of a call that are set, tensors apart from settings."""
    bound = signature.bind(*arguments, **named).arguments
    given = {name: value for name, value in (bound | bound.pop("kwargs", {})).items() if value is not None}
    given = {name: value for name, value in given.items() if name not in without}
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    return Call(tensors, {name: value for name, value in given.items() if name not in tensors})


class Step(NamedTuple):
    """A call that continues each text by one token. Its tensors have the states of the tokens so far."""

    call: Call
    cache: transformers.EncoderDecoderCache


def step_of(signature: inspect.Signature, arguments: tuple[Any, ...], named: dict[str, Any]) -> Step | None:
    """Return the call as a step, or None if it begins a text or is another call that a graph does not take."""
    tensors, settings = call_of(signature, arguments, named, without=("return_dict",))
    cache, encoded = settings.pop("cache", None), settings.pop("encoder_outputs", None)
    tokens = tensors.get("decoder_input_ids")
    if (
        not isinstance(cache, transformers.EncoderDecoderCache)
        or encoded is None
        or tokens is None
        or tokens.shape[1] != 1
    ):
        return None
    own, crossed = layers_of(cache.self_attention_cache), layers_of(cache.cross_attention_cache)
    if not own or {type(layer) for layer in (*own, *crossed)} != {transformers.cache_utils.DynamicLayer}:
        return None
    states = {
        f"{kind}.{number}": state
        for kind, layers in (("own", own), ("crossed", crossed))
        for number, state in enumerate(state for layer in layers for state in states_of(layer))
    }
    return Step(Call({"encoded": encoded[0], **tensors, **states}, settings), cache)


def layers_of(cache: Any) -> list[Any]:
    """Return the layers that have states: transformers makes one for each of T5's encoder, which may have more."""
    return [layer for layer in cache.layers if layer.is_initialized]


def states_of(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values. They stay in one piece of memory each, where OpenVINO reads them without a copy."""
    layer.keys, layer.values = layer.keys.contiguous(), layer.values.contiguous()
    return layer.keys, layer.values


def use_graph(model: Any, folder: Path) -> None:
    """Let the model run as the graphs of the folder, and free the weights that only the first one needs."""
    part, graph = exported_part(model), Graph(folder)
    limit = graph_limit(part) if model.main_input_name == TEXT else math.inf
    # A request may choose another number of a video's frames. PyTorch then needs the weights, as for longer texts.
    keeps = limit < math.inf or max(map(len, graph.shapes)) >= FRAMES
    part.forward = functools.wraps(part.forward)(WholeCalls(graph, part.forward, limit, has_weights=keeps))
    inside = set(part.modules())
    shared = {id(own) for module in model.modules() if module not in inside for own in module.parameters(recurse=False)}
    for weight in part.parameters() if not keeps else ():
        if id(weight) not in shared:
            weight.data = weight.data.new_empty(0)
    if (folder / STEP).is_dir():
        model.forward = functools.wraps(model.forward)(Steps(Graph(folder / STEP), model))


class Graph:
    """A compiled graph, and the form of its calls."""

    def __init__(self, folder: Path) -> None:
        import openvino

        settings = {
            "INFERENCE_PRECISION_HINT": "f32",
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            **UNPINNED,
        }
        self.lock = threading.Lock()  # a compiled graph answers one call at a time
        self.compiled = openvino.Core().compile_model(folder / FILE, "CPU", settings)
        # The sizes of each input that all calls have; None for others.
        shapes = [port.partial_shape for port in self.compiled.inputs]
        self.shapes = [[size.get_length() if size.is_static else None for size in shape] for shape in shapes]
        self.form = Description(**json.loads((folder / DESCRIPTION).read_text()))
        self.output_class = getattr(importlib.import_module(self.form.module), self.form.name)

    def inputs(self, call: Call) -> list[torch.Tensor] | None:
        """Return the tensors of a call, or None if the graph does not answer it."""
        others = call.tensors.keys() - {*self.form.inputs, *self.form.ignored}
        if others or not call.tensors.keys() >= {*self.form.inputs} or call.settings != self.form.settings:
            return None
        return [call.tensors[name] for name in self.form.inputs]

    def has_sizes(self, inputs: list[torch.Tensor]) -> bool:
        """Return whether the graph was exported for inputs of these sizes."""
        return all(
            len(tensor.shape) == len(shape)
            and all(own in (None, size) for size, own in zip(tensor.shape, shape, strict=True))
            for tensor, shape in zip(inputs, self.shapes, strict=True)
        )

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        with self.lock:
            arrays = self.compiled([tensor.numpy() for tensor in inputs], share_inputs=True).to_tuple()
        return list(map(torch.from_numpy, arrays))


class WholeCalls:
    """Answers as a part of the network does. It keeps the last answer, because generation may ask for it again.

    Whisper encodes a sound to recognize the language, and once more to generate the text.
    """

    def __init__(self, graph: Graph, forward: Callable[..., Any], limit: float, has_weights: bool) -> None:
        self.graph, self.forward, self.signature = graph, forward, inspect.signature(forward)
        self.limit = limit  # of a text in tokens
        self.has_weights = has_weights  # PyTorch runs longer texts, and other calls that the graph does not take
        self.kept: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None  # the last inputs and outputs

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        call = call_of(self.signature, arguments, named)
        inputs = self.graph.inputs(call)
        is_long = self.limit < math.inf and call.tensors[TEXT].shape[1] > self.limit
        if is_long or inputs is None or not self.graph.has_sizes(inputs):
            if self.has_weights:
                return self.forward(*arguments, **named)
            raise ValueError("its network was exported for other sizes or settings of a call")
        kept = self.kept  # another thread may replace it
        if not kept or not all(map(torch.equal, inputs, kept[0])):
            kept = self.kept = inputs, self.graph.run(inputs)
        outputs = zip(self.graph.form.outputs, kept[1], strict=True)
        return self.graph.output_class(**{name: own.clone() for name, own in outputs})


def stay(beams: torch.Tensor) -> None:
    """Reorder nothing."""


class Steps:
    """Answers steps as the network does, and leaves other calls to it."""

    def __init__(self, graph: Graph, model: Any) -> None:
        self.graph, self.forward, self.signature = graph, model.forward, inspect.signature(model.forward)
        self.positions, self.limit = position_limit(model), graph_limit(model.get_decoder())

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        step = step_of(self.signature, arguments, named)
        inputs = self.graph.inputs(step.call) if step else None
        if step is None or inputs is None or (length := step.cache.get_seq_length() + 1) > self.limit:
            return self.forward(*arguments, **named)
        check_length(length, self.positions)
        logits, *states = self.graph.run(inputs)
        layers = layers_of(step.cache.self_attention_cache)
        for layer, keys, values in zip(layers, states[::2], states[1::2], strict=True):
            layer.keys, layer.values = keys, values
        # The beams of a text share what its encoder said, which transformers would copy at each step to reorder them.
        vars(step.cache.cross_attention_cache)["reorder_cache"] = stay
        return self.graph.output_class(logits=logits, cache=step.cache)
