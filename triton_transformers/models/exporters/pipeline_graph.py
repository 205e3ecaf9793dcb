"""Export the network of a pipeline to graphs of OpenVINO; if it generates, its encoder and the steps of its decoder."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from triton_transformers.models.exporters.onnx_export import Network, broadcast_masks

if TYPE_CHECKING:
    import openvino

    from shared.pipeline_graph import Call, Description

# The inputs of networks whose exported part takes much of the time of an answer, if they do not generate.
MEDIA = ("input_features", "input_values", "pixel_values", "pixel_values_videos")
Tensors = dict[str, torch.Tensor]


class Recorder:
    """Keeps the calls of a network that a graph may answer, and what it returns."""

    def __init__(self, network: torch.nn.Module) -> None:
        self.network, self.forward = network, network.forward
        self.signature = inspect.signature(network.forward)
        self.calls: list[Call] = []
        self.output: Any = None  # of the last call

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        call = self.read(arguments, named)
        output = self.forward(*arguments, **named)
        if call:
            self.calls.append(call)
            self.output = output
        return output

    def read(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Call | None:
        from shared.pipeline_graph import call_of

        return call_of(self.signature, arguments, named)

    def outputs(self, output: Any) -> Tensors:
        """Return what the graph answers, by name."""
        return {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}

    def answer(self, tensors: Tensors, settings: dict[str, Any]) -> Tensors:
        return self.outputs(self.forward(**tensors, **settings))

    def shape(self, name: str) -> list[int]:
        """Return the shape of a tensor in all calls, with -1 for the rows of a batch and for sizes that differ."""
        _, *others = zip(*(call.tensors[name].shape for call in self.calls), strict=True)
        return [-1, *(sizes[0] if len({*sizes}) == 1 else -1 for sizes in others)]


class StepRecorder(Recorder):
    """Keeps the steps of a decoder."""

    def read(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Call | None:
        from shared.pipeline_graph import step_of

        step = step_of(self.signature, arguments, named)
        return step.call if step else None

    def outputs(self, output: Any) -> Tensors:
        layers = output.cache.self_attention_cache.layers
        states = [state for layer in layers for state in (layer.keys, layer.values)]
        return {"logits": output.logits} | {f"own.{number}": state for number, state in enumerate(states)}

    def answer(self, tensors: Tensors, settings: dict[str, Any]) -> Tensors:
        from transformers import EncoderDecoderCache
        from transformers.cache_utils import DynamicCache, DynamicLayer
        from transformers.modeling_outputs import BaseModelOutput

        def cache(kind: str) -> DynamicCache:
            states = [tensors.pop(name) for name in [*tensors] if name.startswith(f"{kind}.")]
            made = DynamicCache()
            for keys, values in zip(states[::2], states[1::2], strict=True):
                layer = DynamicLayer()
                layer.keys, layer.values, layer.is_initialized = keys, values, True
                made.layers.append(layer)
            return made

        encoded = BaseModelOutput(last_hidden_state=tensors.pop("encoded"))
        both = EncoderDecoderCache(cache("own"), cache("crossed"))
        return super().answer(tensors, settings | {"encoder_outputs": encoded, "cache": both})

    def shape(self, name: str) -> list[int]:
        """Return the shape with -1 for the rows and for the length of a text."""
        size = [*self.calls[0].tensors[name].shape]
        size[0] = size[2 if len(size) == 4 else 1] = -1
        return size


@contextlib.contextmanager
def recorded(pipe: Any) -> Iterator[list[Recorder]]:
    """Record the calls of the part of a network that a graph may replace, if it has one, and those of its decoder."""
    from shared.pipeline_graph import exported_part

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

    from shared.pipeline_graph import DESCRIPTION, FILE, STEP

    whole, *steps = recorders
    graphs = {folder: converted(whole)}
    for step in steps:
        with contextlib.suppress(Exception):  # PyTorch then runs the steps
            graphs[folder / STEP] = converted(step)
    for path, (graph, description) in graphs.items():
        path.mkdir()
        openvino.save_model(graph, path / FILE, compress_to_fp16=False)
        (path / DESCRIPTION).write_text(json.dumps(description._asdict()))


def converted(recorder: Recorder) -> tuple[openvino.Model, Description]:
    """Return a graph that takes all recorded calls, and its form."""
    import openvino

    from shared.pipeline_graph import Description

    largest = max(recorder.calls, key=lambda call: sum(tensor.numel() for tensor in call.tensors.values()))
    names = [name for name in largest.tensors if all(name in call.tensors for call in recorder.calls)]
    ignored = {name for call in recorder.calls for name in call.tensors} - {*names}
    if any(call.settings != largest.settings for call in recorder.calls):
        raise ValueError("the calls have different arguments")
    kind = type(recorder.output)
    outputs = [*recorder.outputs(recorder.output)]

    def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        answer = recorder.answer(dict(zip(names, tensors, strict=True)), largest.settings)
        return [answer[name] for name in outputs]

    with torch.no_grad(), broadcast_masks():
        graph = openvino.convert_model(
            Network(recorder.network, function).eval(),
            example_input=tuple(largest.tensors[name] for name in names),
            input=[recorder.shape(name) for name in names],
        )
    return graph, Description(names, sorted(ignored), largest.settings, outputs, kind.__module__, kind.__name__)
