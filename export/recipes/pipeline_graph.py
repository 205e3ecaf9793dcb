"""Export the network of a pipeline to graphs of OpenVINO; if it generates, its encoder and the steps of its decoder."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from export.check.parity import largest_difference
from export.recipes.language.graph import filled_cache, trace
from export.recipes.onnx_export import Network, broadcast_masks
from triton_transformers.answers import LIMITS

if TYPE_CHECKING:
    import openvino
    from transformers.cache_utils import DynamicCache

    from serving.pipelines.graph import Call

# The inputs of networks whose exported part takes much of the time of an answer, if they do not generate.
MEDIA = ("input_features", "input_values", "pixel_values", "pixel_values_videos")
Tensors = dict[str, torch.Tensor]


class Answered(NamedTuple):
    """A call of a network, and what it returned."""

    call: Call
    tensors: Tensors

    def size(self) -> int:
        """Return the numbers in the tensors of the call."""
        return sum(tensor.numel() for tensor in self.call.tensors.values())


class Recorder:
    """Keeps the calls of a network that a graph may answer, and what it returns."""

    def __init__(self, network: torch.nn.Module) -> None:
        self.network, self.forward = network, network.forward
        self.signature = inspect.signature(network.forward)
        self.shapes: list[dict[str, torch.Size]] = []  # of each call
        self.settings: list[dict[str, Any]] = []
        # The smallest and the largest call: those of all of them may exceed the memory.
        self.kept: list[Answered] = []
        self.output_class: type = object

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        call = self.read(arguments, named)
        output = self.forward(*arguments, **named)
        if call:
            self.shapes.append({name: tensor.shape for name, tensor in call.tensors.items()})
            self.settings.append(call.settings)
            by_size = sorted([*self.kept, Answered(call, self.outputs(output))], key=Answered.size)
            self.kept = [by_size[0], by_size[-1]]
            self.output_class = type(output)
        return output

    def read(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Call | None:
        from serving.pipelines.graph import call_of

        return call_of(self.signature, arguments, named)

    def outputs(self, output: Any) -> Tensors:
        """Return what the graph answers, by name."""
        return {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}

    def answer(self, tensors: Tensors, settings: dict[str, Any]) -> Tensors:
        return self.outputs(self.network.forward(**tensors, **settings))

    def agrees(self) -> bool:
        """Return whether the network, which may run as a graph now, answers as before."""
        with torch.inference_mode():
            now = [self.answer({**kept.call.tensors}, kept.call.settings) for kept in self.kept]
        before = [kept.tensors for kept in self.kept]
        return largest_difference(arrays(before), arrays(now)).size <= LIMITS["original", "float32"].difference

    def shape(self, name: str) -> list[int]:
        """Return the shape of a tensor in all calls, with -1 for rows, lengths of texts, and sizes that differ."""
        sizes = zip(*(shapes[name] for shapes in self.shapes), strict=True)
        free = 1 if name in MEDIA else 2  # axes
        return [own[0] if axis >= free and len({*own}) == 1 else -1 for axis, own in enumerate(sizes)]


class StepRecorder(Recorder):
    """Keeps the steps of a decoder."""

    def read(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Call | None:
        from serving.pipelines.graph import step_of

        step = step_of(self.signature, arguments, named)
        return step.call if step else None

    def outputs(self, output: Any) -> Tensors:
        from serving.pipelines.graph import layers_of

        layers = layers_of(output.cache.self_attention_cache)
        states = [state for layer in layers for state in (layer.keys, layer.values)]
        return {"logits": output.logits} | {f"own.{number}": state for number, state in enumerate(states)}

    def answer(self, tensors: Tensors, settings: dict[str, Any]) -> Tensors:
        from transformers import EncoderDecoderCache
        from transformers.modeling_outputs import BaseModelOutput

        def cache_of(kind: str) -> DynamicCache:
            return filled_cache([tensors.pop(name) for name in [*tensors] if name.startswith(f"{kind}.")])

        encoded = BaseModelOutput(last_hidden_state=tensors.pop("encoded"))
        cache = EncoderDecoderCache(cache_of("own"), cache_of("crossed"))
        return super().answer(tensors, settings | {"encoder_outputs": encoded, "cache": cache})

    def shape(self, name: str) -> list[int]:
        """Return the shape with -1 for the rows and for the length of a text."""
        sizes = [*self.shapes[0][name]]
        sizes[0] = sizes[2 if len(sizes) == 4 else 1] = -1
        return sizes


def arrays(answers: list[Tensors]) -> list[dict[str, np.ndarray]]:
    return [{name: tensor.numpy() for name, tensor in tensors.items()} for tensors in answers]


@contextlib.contextmanager
def recorded(pipe: Any) -> Iterator[list[Recorder]]:
    """Record the calls of the part of a network that a graph may replace, if it has one, and those of its decoder."""
    from serving.pipelines.graph import exported_part

    model = pipe.model
    generates = model.can_generate()
    worthwhile = model.config.is_encoder_decoder if generates else model.main_input_name in MEDIA
    recorders: list[Recorder] = []
    if worthwhile and model.dtype == torch.float32:
        recorders = [Recorder(exported_part(model)), *([StepRecorder(model)] if generates else [])]
    for recorder in recorders:
        recorder.network.forward = functools.wraps(recorder.forward)(recorder)
    try:
        yield recorders
    finally:
        for recorder in recorders:
            recorder.network.forward = recorder.forward


def export_graphs(recorders: list[Recorder], folder: Path) -> None:
    """Write the graphs. Raise anything if there is none of the first network: torch.jit.trace does."""
    import openvino

    from serving.pipelines.graph import DESCRIPTION, FILE, STEP

    whole, *steps = recorders
    graphs = {folder: converted(whole)}
    for step in steps:
        with contextlib.suppress(Exception):  # PyTorch then runs the steps
            graphs[folder / STEP] = converted(step)
    for path, (graph, description) in graphs.items():
        path.mkdir()
        openvino.save_model(graph, path / FILE, compress_to_fp16=False)
        (path / DESCRIPTION).write_text(description)


def converted(recorder: Recorder) -> tuple[openvino.Model, str]:
    """Return a graph that takes all recorded calls, and its description as JSON."""
    import openvino

    from serving.pipelines.graph import Description

    call, answer = recorder.kept[-1]
    if any(settings != call.settings for settings in recorder.settings):
        raise ValueError("the calls have different arguments")
    names = [name for name in call.tensors if all(name in shapes for shapes in recorder.shapes)]
    ignored = {name for shapes in recorder.shapes for name in shapes} - {*names}
    outputs = [*answer]

    def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        traced = recorder.answer(dict(zip(names, tensors, strict=True)), call.settings)
        return [traced[name] for name in outputs]

    with torch.no_grad(), broadcast_masks():
        examples = tuple(call.tensors[name] for name in names)
        traced = trace(Network(recorder.network, function).eval(), examples)
        graph = openvino.convert_model(traced, input=[recorder.shape(name) for name in names])
    kind = recorder.output_class
    description = Description(names, sorted(ignored), call.settings, outputs, kind.__module__, kind.__name__)
    return graph, json.dumps(description._asdict())
