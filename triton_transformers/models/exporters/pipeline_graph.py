"""Export the network of a pipeline, or its encoder if it generates, to a graph of OpenVINO, and time both."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from triton_transformers.models.exporters.onnx_export import Network, broadcast_masks

if TYPE_CHECKING:
    from shared.pipeline_graph import Call

ROUNDS = 3
# The inputs of networks whose exported part takes much of the time of an answer.
MEDIA = ("input_features", "input_values", "pixel_values", "pixel_values_videos")


class Recorder:
    """Keeps what the part of a network that a graph may replace gets, and what it returns."""

    def __init__(self, part: torch.nn.Module) -> None:
        self.part, self.forward = part, part.forward
        self.signature = inspect.signature(part.forward)
        self.calls: list[Call] = []
        self.output: Any = None  # of the last call

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        from shared.pipeline_graph import call_of

        self.calls.append(call_of(self.signature, arguments, named))
        self.output = self.forward(*arguments, **named)
        return self.output

    @property
    def largest(self) -> Call:
        return max(self.calls, key=lambda call: sum(tensor.numel() for tensor in call.tensors.values()))

    def seconds(self) -> float:
        """Return how long the part takes for the largest call."""
        taken = []
        call = self.largest
        with torch.inference_mode():
            for number in range(ROUNDS):
                # Other numbers each time: a graph keeps its last answer.
                tensors = {name: own + number if own.is_floating_point() else own for name, own in call.tensors.items()}
                start = time.perf_counter()
                self.part(**tensors, **call.settings)
                taken.append(time.perf_counter() - start)
        return statistics.median(taken)


@contextlib.contextmanager
def recorded(pipe: Any) -> Iterator[Recorder | None]:
    """Record the calls of the part that a graph may replace, if the network has one."""
    from shared.pipeline_graph import exported_part

    model = pipe.model
    has_part = model.config.is_encoder_decoder or not model.can_generate()
    if not has_part or model.main_input_name not in MEDIA or model.dtype != torch.float32:
        yield None
        return
    recorder = Recorder(exported_part(model))
    recorder.part.forward = functools.wraps(recorder.forward)(recorder)
    try:
        yield recorder
    finally:
        recorder.part.forward = recorder.forward


def export_graph(recorder: Recorder, folder: Path) -> None:
    """Write a graph that takes all recorded calls. Raise anything if there is none: torch.jit.trace does."""
    import openvino

    from shared.pipeline_graph import DESCRIPTION, FILE, Description

    largest, output = recorder.largest, recorder.output
    names = [name for name in largest.tensors if all(name in call.tensors for call in recorder.calls)]
    ignored = {name for call in recorder.calls for name in call.tensors} - {*names}
    if any(call.settings != largest.settings for call in recorder.calls):
        raise ValueError("the calls have different arguments")
    outputs = [name for name in output if isinstance(output[name], torch.Tensor)]
    kind = type(output)

    def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        answer = recorder.part(**dict(zip(names, tensors, strict=True)), **largest.settings)
        return [answer[name] for name in outputs]

    shapes = [shape([call.tensors[name].shape for call in recorder.calls]) for name in names]
    with torch.no_grad(), broadcast_masks():
        graph = openvino.convert_model(
            Network(recorder.part, function).eval(),
            example_input=tuple(largest.tensors[name] for name in names),
            input=shapes,
        )
    folder.mkdir()
    openvino.save_model(graph, folder / FILE, compress_to_fp16=False)
    description = Description(names, sorted(ignored), largest.settings, outputs, kind.__module__, kind.__name__)
    (folder / DESCRIPTION).write_text(json.dumps(description._asdict()))


def shape(shapes: list[torch.Size]) -> list[int]:
    """Return the shape of a tensor in all calls, with -1 for the rows of a batch and for sizes that differ."""
    _, *others = zip(*shapes, strict=True)
    return [-1, *(sizes[0] if len({*sizes}) == 1 else -1 for sizes in others)]
