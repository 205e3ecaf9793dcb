"""Export networks of PyTorch to ONNX, in fp32 and in int8."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
import transformers

from export.catalogue import FormatUnavailable, Job, Outcome
from export.check.parity import largest_difference, serve
from export.check.served import Tensors
from export.checkpoint.silence import quiet, silent
from triton_transformers.answers import LIMITS, smallest_cosine
from triton_transformers.cli import err
from triton_transformers.settings import UserError

# The attention of transformers to export and compile: plain matrix products. torch.onnx writes the default one, "sdpa",
# with more operations, which take OpenVINO a seventh of its time for short texts, and ONNX Runtime up to a tenth.
PLAIN_ATTENTION = "eager"
# The maximum size of the weights in one file: protobuf refuses messages of 2 GiB, and the graph itself takes some.
ONE_FILE = 2**31 - 2**26
OPSET = 18

Axes = dict[int, str]  # the free axes of a tensor, and their names


def load_original(
    job: Job, kind: Any, folder: Path | None = None, dtype: torch.dtype | str = torch.float32
) -> tuple[Any, list[str]]:
    """Return a model of this class of transformers, and the weights of its pooler that are missing.

    Raise if other weights are missing: transformers would draw them at random. Among models of texts, only sequence
    classifiers read the pooler.
    """
    options = attention(job) | {"trust_remote_code": job.trust_remote_code, "local_files_only": True, "dtype": dtype}
    with quiet():
        model, info = kind.from_pretrained(
            folder or job.weights, use_safetensors=True, output_loading_info=True, **options
        )
    poolers = [key for key in info["missing_keys"] if "pooler" in key and "SequenceClassification" not in kind.__name__]
    if missing := sorted({*info["missing_keys"]} - {*poolers}):
        raise UserError(f"{job.weights} is not a model for {job.task}: it lacks the weights '{missing[0]}'")
    return model.eval(), poolers


def attention(job: Job) -> dict[str, str]:
    """Return the options of a model that will be exported or compiled."""
    return {} if job.format == "python" else {"attn_implementation": PLAIN_ATTENTION}


class Network(torch.nn.Module):
    """A module with one signature for both exporters: tensors by position to a tuple. It may have another function."""

    def __init__(self, module: torch.nn.Module, function: Callable[..., Iterable[torch.Tensor]] | None = None) -> None:
        super().__init__()
        self.module = module
        self.function = function or module.__call__

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.function(*tensors))


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
    err.step("exporting to ONNX")
    module = Network(network).eval()  # all of it: the exporters restore the mode of the whole
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
    largest_difference(expected, actual).check(LIMITS["original", "float32"].difference, "in ONNX Runtime")


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


def quantize_and_compare(path: Path, feeds: list[Tensors]) -> Outcome:
    """Convert the model to int8, and report size, speed and agreement."""
    err.step("rounding the weights to int8")
    fp32_size, fp32_answers, fp32_seconds = measured(path, feeds)
    quantize(path)
    int8_size, int8_answers, int8_seconds = measured(path, feeds)
    cosine = accepted_cosine(fp32_answers, int8_answers, "with those in fp32", range(len(feeds)))
    speedup = fp32_seconds / int8_seconds
    return Outcome(
        f"int8: {int8_size / 1e6:.1f} MB instead of {fp32_size / 1e6:.1f}, {speedup:.1f} times as fast one by one, "
        f"cosine with fp32 at least {cosine:.3f}",
        {"int8_bytes": int8_size, "fp32_bytes": fp32_size, "int8_speedup": speedup, "int8_cosine": cosine},
    )


def compare_int8_batches(job: Job, requests: list[Tensors], outputs: Collection[str]) -> Outcome:
    """Compare what a system in int8 answers to a request in a batch with what it answers to the request alone.

    ONNX Runtime scales the activations of a run by the largest of all its rows, so the two are never quite equal.
    """
    answers, in_batch, _ = serve(job, requests, outputs)
    numbers = [number for number, _ in in_batch]
    alone = [joined(answers[number], outputs) for number in numbers]
    together = [joined(tensors, outputs) for _, tensors in in_batch]
    cosine = accepted_cosine(alone, together, "in a batch with those to a request alone", numbers)
    return Outcome(f"in a batch with int8 alone at least {cosine:.3f}", {"int8_batch_cosine": cosine})


def joined(tensors: Tensors, names: Iterable[str]) -> np.ndarray:
    return np.concatenate([tensors[name].ravel() for name in names])


def accepted_cosine(original: list[np.ndarray], int8: list[np.ndarray], others: str, numbers: Sequence[int]) -> float:
    """Return the smallest cosine between two answers to the same example, or raise if it is too small.

    Answers of one number have no direction: there the cosine is that of all answers together.
    """
    if all(answer.size == 1 for answer in original):
        original, int8 = [np.concatenate(original)], [np.concatenate(int8)]
    cosines = [smallest_cosine(a.ravel(), b.ravel()) for a, b in zip(original, int8, strict=True)]
    example = int(np.argmin(cosines))
    least = LIMITS["original", "onnx-int8"].cosine
    if cosines[example] < least:
        raise UserError(
            f"int8 costs this model too much accuracy: the cosine of its answers {others} is {cosines[example]:.3f} on "
            f"example {numbers[example]}, at least {least} is required. Set FORMAT=onnx instead"
        )
    return cosines[example]


def measured(path: Path, feeds: list[Tensors]) -> tuple[int, list[np.ndarray], float]:
    """Return the bytes of the model, all its outputs for each example in one row, and the seconds that these take."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]
    for _ in range(2):  # the first run of each shape takes longer
        start = time.perf_counter()
        results = [session.run(None, {name: feed[name] for name in names}) for feed in feeds]
        seconds = time.perf_counter() - start
    size = sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))
    return size, [np.concatenate([array.ravel() for array in arrays]) for arrays in results], seconds
