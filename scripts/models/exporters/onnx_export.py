"""Models of transformers as ONNX, in fp32 and in int8."""

from __future__ import annotations

import logging
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx

from scripts.models.exporters.parity import compare

# Below this int8 has made another model of it.
LEAST_INT8_COSINE = 0.9


def export(
    weights: Path,
    task: str,
    target: Path,
    outputs: list[str] | None = None,
    library: str = "transformers",
    **options: object,
) -> None:
    """target/model.onnx, and its weights beside it where they are too large for one file; of its outputs, these.

    `options`: more of optimum's main_export.
    """
    from optimum.exporters.onnx import main_export

    work = target / "export"
    # Parity is checked by whoever asks for the export, on examples of their own.
    main_export(str(weights), output=work, task=task, library_name=library, do_validation=False, **options)
    if outputs:
        keep_outputs(work / "model.onnx", outputs)
    for file in work.glob("model.onnx*"):
        file.replace(target / file.name)
    shutil.rmtree(work)


def keep_outputs(path: Path, names: list[str]) -> None:
    """The others would be copied out on every run and are asked for by nobody."""
    model = onnx.load(path, load_external_data=False)
    kept = [output for output in model.graph.output if output.name in names]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    onnx.save(model, path)


def quantize(path: Path) -> None:
    """Matrices and embeddings in int8, in place."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    smaller = path.with_suffix(".int8")
    settings = {"op_types_to_quantize": ["MatMul", "Gather"], "per_channel": True, "weight_type": QuantType.QInt8}
    quantize_dynamic(path, smaller, **settings)
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
    smaller.replace(path)


def quantized(path: Path, run: Callable[[], list[np.ndarray]]) -> dict:
    """In int8, and what that changed: size, speed and answers of `run`, which opens the model and asks it examples."""
    before, found, took = size(path), *timed(run)
    quantize(path)
    answers, takes = timed(run)
    cosine = compare(found, answers, LEAST_INT8_COSINE)
    return {
        "int8_bytes": size(path),
        "fp32_bytes": before,
        "int8_speedup": took / takes,
        "int8_cosine": cosine,
        "said": f"int8: {size(path) / 1e6:.1f} MB instead of {before / 1e6:.1f}, {took / takes:.1f} times as fast "
        f"one by one, cosine with fp32 at least {cosine:.3f}",
    }


def timed(run: Callable[[], list[np.ndarray]]) -> tuple[list[np.ndarray], float]:
    run()
    start = time.perf_counter()
    found = run()
    return found, time.perf_counter() - start


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))


class quiet(warnings.catch_warnings):
    """The exporters warn about their own internals; whoever assembles a model can do nothing about it."""

    def __enter__(self):
        super().__enter__()
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)

    def __exit__(self, *exception):
        logging.disable(logging.NOTSET)
        return super().__exit__(*exception)
