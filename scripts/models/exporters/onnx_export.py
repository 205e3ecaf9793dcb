"""Export models of transformers to ONNX, in fp32 and in int8."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx

from scripts.common.settings import UserError
from scripts.models.catalogue import Job, Outcome
from scripts.models.exporters.parity import serve, smallest_cosine
from scripts.models.exporters.served import Tensors

if TYPE_CHECKING:
    import transformers

# The attention of transformers to export and compile: plain matrix products. torch.onnx writes the default one, "sdpa",
# with more operations, which take OpenVINO a seventh of its time for short texts, and ONNX Runtime up to a tenth.
PLAIN_ATTENTION = "eager"
# A model whose int8 answers agree less with its fp32 answers is refused.
MIN_INT8_COSINE = 0.9


def export(model: transformers.PreTrainedModel, task: str, target: Path, outputs: list[str]) -> None:
    """Write target/model.onnx with these outputs. Weights too large for one file go into files beside it."""
    from optimum.exporters.onnx import onnx_export_from_model

    work = target / "export"
    model.config.use_cache = False
    # No validation here: the callers check parity on examples of their own.
    onnx_export_from_model(model, work, task=task, do_validation=False)
    keep_outputs(work / "model.onnx", outputs)
    count_positions(work / "model.onnx")
    for file in work.glob("model.onnx*"):
        file.replace(target / file.name)
    shutil.rmtree(work)


def keep_outputs(path: Path, names: list[str]) -> None:
    """Remove the other outputs, which ONNX Runtime would copy out on every run."""
    model = onnx.load(path, load_external_data=False)
    kept = [output for output in model.graph.output if output.name in names]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    onnx.save(model, path)


def count_positions(path: Path) -> None:
    """Make the graph number the tokens itself, if it takes their positions: clients and tokenizers send none."""
    model = onnx.load(path, load_external_data=False)
    graph = model.graph
    inputs = {node.name: node for node in graph.input}
    if not {"position_ids", "input_ids"} <= inputs.keys():
        return
    helper = onnx.helper
    graph.input.remove(inputs["position_ids"])
    for name, value in (("first_position", 0), ("token_axis", 1), ("position_step", 1)):
        graph.initializer.append(helper.make_tensor(name, onnx.TensorProto.INT64, [], [value]))
    nodes = [
        helper.make_node("Shape", ["input_ids"], ["rows_and_tokens"]),
        helper.make_node("Gather", ["rows_and_tokens", "token_axis"], ["token_count"]),
        helper.make_node("Range", ["first_position", "token_count", "position_step"], ["positions"]),
        helper.make_node("Expand", ["positions", "rows_and_tokens"], ["position_ids"]),
    ]
    for node in reversed(nodes):  # before the nodes that read them
        graph.node.insert(0, node)
    onnx.save(model, path)


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
    cosine, example = smallest_cosine(fp32_answers, int8_answers)
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
    cosine, example = smallest_cosine(alone, [joined(tensors, outputs) for _, tensors in answers.in_batch])
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
