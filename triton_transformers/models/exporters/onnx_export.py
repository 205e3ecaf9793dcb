"""Export networks of PyTorch to ONNX, in fp32 and in int8."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
import transformers

from triton_transformers.models.catalogue import FormatUnavailable, Job, Outcome
from triton_transformers.models.exporters.parity import TOLERANCES, largest_difference, serve, smallest_cosine_of
from triton_transformers.models.exporters.served import Tensors
from triton_transformers.models.silence import silent
from triton_transformers.settings import UserError

# The attention of transformers to export and compile: plain matrix products. torch.onnx writes the default one, "sdpa",
# with more operations, which take OpenVINO a seventh of its time for short texts, and ONNX Runtime up to a tenth.
PLAIN_ATTENTION = "eager"
# A model whose int8 answers agree less with its fp32 answers is refused.
MIN_INT8_COSINE = 0.9
# The maximum size of the weights in one file: protobuf refuses messages of 2 GiB, and the graph itself takes some.
ONE_FILE = 2**31 - 2**26
OPSET = 18

Axes = dict[int, str]  # the free axes of a tensor, and their names


class Positional(torch.nn.Module):
    """A network with one signature for both exporters: any number of tensors to a tuple."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.network(*tensors))


def export(
    network: torch.nn.Module,
    inputs: dict[str, Axes],
    outputs: dict[str, Axes],
    examples: list[Tensors],
    path: Path,
    fold_constants: bool = True,
) -> None:
    """Write a graph that answers all examples as the network does, which takes its inputs in this order.

    The exporters see only the first example. torch.jit.trace takes a second or two, but may take a
    property of the example for one of all inputs. torch.export does not, and takes up to a minute: it comes second.
    """
    module = Positional(network).eval()  # all of it: the exporters restore the mode of the whole
    feeds = [tuple(torch.from_numpy(example[name]) for name in inputs) for example in examples]
    names: dict[str, Any] = {"input_names": list(inputs), "output_names": list(outputs)}
    dynamic = {name: axes for name, axes in {**inputs, **outputs}.items() if axes}
    shapes = tuple(dict.fromkeys(axes, torch.export.Dim.DYNAMIC) for axes in inputs.values())
    weights = sum(weight.nbytes for weight in module.state_dict().values())
    ways: tuple[dict[str, Any], ...] = (
        {"dynamo": False, "opset_version": OPSET, "dynamic_axes": dynamic, "do_constant_folding": fold_constants},
        {"dynamo": True, "dynamic_shapes": (shapes,), "external_data": weights > ONE_FILE, "verbose": False},
    )
    failures = []
    with torch.no_grad():
        expected = [dict(zip(outputs, (array.numpy() for array in module(*feed)), strict=True)) for feed in feeds]
        for way in ways:
            with tempfile.TemporaryDirectory(dir=path.parent) as work:
                exported = Path(work) / path.name
                try:
                    with silent(), broadcast_masks():
                        torch.onnx.export(module, feeds[0], str(exported), **names, **way)
                    check_graph(exported, examples, expected)
                except Exception as error:  # whatever stops one exporter, the other may succeed
                    if isinstance(error, OSError) and error.errno:  # such as a full disk
                        raise
                    failures.append(str(error) if isinstance(error, UserError) else type(error).__name__)
                else:
                    move(exported, path)
                    return
    raise FormatUnavailable(f"its export to ONNX failed (traced: {failures[0]}; with torch.export: {failures[1]})")


@contextlib.contextmanager
def broadcast_masks() -> Iterator[None]:
    """Let transformers compute the masks of Gemma 3 by broadcasting: torch.jit.trace does not support torch.vmap."""
    masks: Any = transformers.masking_utils
    before = masks.sdpa_mask
    masks.sdpa_mask = lambda *args, **settings: before(*args, **settings | {"use_vmap": False})
    try:
        yield
    finally:
        masks.sdpa_mask = before


def check_graph(path: Path, examples: list[Tensors], expected: list[Tensors]) -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 4  # a graph that fails here is no error yet
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]  # an input that changes nothing is not in the graph
    outputs = [node.name for node in session.get_outputs()]
    answers = [session.run(None, {name: example[name] for name in names}) for example in examples]
    actual = [dict(zip(outputs, arrays, strict=True)) for arrays in answers]
    largest_difference(expected, actual).check(TOLERANCES["float32"], "in ONNX Runtime")


def move(exported: Path, target: Path) -> None:
    if len(list(exported.parent.iterdir())) == 1:
        exported.replace(target)
    else:  # too large for one file: the tracer writes each tensor to a file of its own
        onnx.save(onnx.load(exported), target, save_as_external_data=True, location=f"{target.name}.data")
        shutil.copymode(target, f"{target}.data")  # onnx creates it readable by this user only


def quantize(path: Path) -> None:
    """Convert matrices and embeddings to int8, in place."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    smaller = path.with_suffix(".int8")
    settings = {
        "op_types_to_quantize": ["MatMul", "Gather"],
        "per_channel": True,
        "weight_type": QuantType.QInt8,
        # Seven bits of the weights: CPUs without VNNI add two products in 16 bits, which eight would exceed.
        "reduce_range": True,
    }
    quantize_dynamic(path, smaller, **settings)
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
    smaller.replace(path)


def quantize_and_compare(path: Path, run: Callable[[], list[np.ndarray]]) -> Outcome:
    """Convert the model to int8, and report size, speed and agreement. `run` opens the model and runs the examples."""
    fp32_size, (fp32_answers, fp32_seconds) = size(path), timed(run)
    quantize(path)
    int8_size, (int8_answers, int8_seconds) = size(path), timed(run)
    cosine, example = smallest_cosine_of(fp32_answers, int8_answers)
    if cosine < MIN_INT8_COSINE:
        raise UserError(
            f"int8 costs this model too much accuracy: the cosine of its answers with those in fp32 is {cosine:.3f} on "
            f"example {example}, at least {MIN_INT8_COSINE} is required. Set FORMAT=onnx instead"
        )
    speedup = fp32_seconds / int8_seconds
    return Outcome(
        f"int8: {int8_size / 1e6:.1f} MB instead of {fp32_size / 1e6:.1f}, {speedup:.1f} times as fast one by one, "
        f"cosine with fp32 at least {cosine:.3f}",
        {"int8_bytes": int8_size, "fp32_bytes": fp32_size, "int8_speedup": speedup, "int8_cosine": cosine},
    )


def compare_int8_batches(job: Job, requests: list[Tensors], outputs: Iterable[str]) -> Outcome:
    """Compare what a system in int8 answers to a request in a batch with what it answers to the request alone.

    ONNX Runtime scales the activations of a run by the largest of all its rows, so the two are never quite equal.
    """
    answers = serve(job, requests)
    alone = [joined(answers.alone[number], outputs) for number, _ in answers.in_batch]
    cosine, example = smallest_cosine_of(alone, [joined(tensors, outputs) for _, tensors in answers.in_batch])
    if cosine < MIN_INT8_COSINE:
        raise UserError(
            "int8 costs this model too much accuracy: the cosine of its answers in a batch with those to a request "
            f"alone is {cosine:.3f} on example {answers.in_batch[example][0]}, at least {MIN_INT8_COSINE} is required. "
            "Set FORMAT=onnx instead"
        )
    return Outcome(f"in a batch with int8 alone at least {cosine:.3f}", {"int8_batch_cosine": cosine})


def joined(tensors: Tensors, names: Iterable[str]) -> np.ndarray:
    return np.concatenate([tensors[name].ravel() for name in names])


def timed(run: Callable[[], list[np.ndarray]]) -> tuple[list[np.ndarray], float]:
    run()
    start = time.perf_counter()
    answers = run()
    return answers, time.perf_counter() - start


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))
