"""Export language models to OpenVINO, with weights in 8 or 4 bits, and measure what that costs in perplexity."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.common.corpus import MIXED
from scripts.models.catalogue import FormatUnavailable, Job, Outcome
from scripts.models.exporters.served import BACKENDS
from scripts.models.silence import quiet

if TYPE_CHECKING:
    import openvino
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MODEL = "openvino_model.xml"
# The stored precision of the weights for each FORMAT; `openvino` falls back to 16 bits.
WEIGHTS = {"openvino": "int8", "openvino-int4": "int4", "openvino-fp16": "fp16", "openvino-fp32": "fp32"}
# Perplexity may rise by this share through the export itself, and through int8.
MAX_RISE = 0.01
WINDOW, WINDOWS = 128, 16  # tokens of the committed texts on which perplexity is measured
# Memory for the export, relative to the weights: the model, the graph, and the compressed copy.
MEMORY = 2.5


def export(job: Job, tokenizer: PreTrainedTokenizerBase, context: int | None, folder: Path) -> Outcome:
    """Write the model into the folder. Raise FormatUnavailable if OpenVINO cannot serve it."""
    check_memory(job)
    # optimum and nncf import it, and it reports each export to Google.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    with quiet(), tempfile.TemporaryDirectory(dir=folder) as work:
        model = load(job)
        texts = token_windows(tokenizer, context)
        before = perplexity(torch_logits(model), texts)
        try:
            with silent(), disk_errors():
                convert(model, Path(work))
        except Exception as error:  # the exporter raises anything for an architecture that it does not know
            if isinstance(error, OSError) and error.errno:
                raise
            raise FormatUnavailable(f"OpenVINO cannot export a {model.config.model_type}: {one_line(error)}") from error
        del model
        exported = read(Path(work) / MODEL)
        after = perplexity(openvino_logits(exported), texts)
        if not is_close(before, after):
            raise FormatUnavailable(
                f"exported to OpenVINO, its perplexity is {after:.4g} instead of {before:.4g} on the committed texts"
            )
        outcome = write(exported, job.format, folder, after, texts)
    for file in ("config.json", "generation_config.json"):
        if (job.weights / file).is_file():
            shutil.copyfile(job.weights / file, folder / file)
    return outcome


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Hide what optimum and nncf print: tables, progress bars, and messages for their own authors."""
    with quiet(logging.ERROR), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Raise OSError if OpenVINO could not write a file: its own error names no reason."""
    try:
        yield
    except RuntimeError as error:
        if "iostream error" not in str(error):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error


def check_memory(job: Job) -> None:
    needed = MEMORY * sum(file.stat().st_size for file in job.weights.glob("*.safetensors"))
    free = free_memory()
    if needed > free:
        raise FormatUnavailable(
            f"its export to OpenVINO takes about {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
        )


def free_memory() -> int:
    """Return what the container (EXPORTER_MEMORY) or the machine has left."""
    sys.path.append(str(BACKENDS))
    from shared.memory import memory

    sys.path.pop()
    used, limit = memory()
    return limit - used


def load(job: Job) -> PreTrainedModel:
    import transformers

    config = json.loads((job.weights / "config.json").read_text())
    if job.trust_remote_code and "AutoModelForCausalLM" in config.get("auto_map", {}):
        raise FormatUnavailable("it brings its own code, which the export to OpenVINO does not run")
    transformers.logging.set_verbosity_error()
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
        job.weights, dtype="auto", local_files_only=True
    )
    if job.format == "openvino-fp32" and model.dtype.itemsize < 4:
        raise FormatUnavailable("its weights are stored in 16 bits: set FORMAT=openvino-fp16")
    return model.eval()


def convert(model: PreTrainedModel, folder: Path) -> None:
    import torch
    from optimum.exporters.openvino.convert import export_from_model
    from optimum.intel.openvino import OVConfig

    halves = model.dtype in (torch.float16, torch.bfloat16)
    export_from_model(
        model,
        folder,
        task="text-generation-with-past",
        ov_config=OVConfig(dtype="fp16" if halves else "fp32"),
        patch_16bit_model=halves,
    )


def read(path: Path) -> openvino.Model:
    import openvino

    return openvino.Core().read_model(path)


def write(model: openvino.Model, form: str, folder: Path, before: float, texts: list[list[int]]) -> Outcome:
    """Write the model with weights in the precision of the format; report its size and the change in perplexity."""
    import openvino

    weights = WEIGHTS[form]
    summary = ""
    if weights.startswith("int"):
        # `model` is compressed in place, and 16 bits need it as it was.
        compressed = compress(model.clone(), weights)
        after = perplexity(openvino_logits(compressed), texts)
        change = f"perplexity {after:.4g} instead of {before:.4g} ({rise(before, after):+.1%}) on the committed texts"
        if form == "openvino" and not is_close(before, after):
            weights, summary = "fp16", f"weights in fp16, because in int8 its {change}"
        else:
            model, summary = compressed, f"weights in {weights}: {change}"
    with disk_errors():
        openvino.save_model(model, folder / MODEL, compress_to_fp16=weights == "fp16")
    size = (folder / MODEL).with_suffix(".bin").stat().st_size
    return Outcome(f"{size / 1e6:,.0f} MB", {"weights": weights}).join(Outcome(summary))


def compress(model: openvino.Model, weights: str) -> openvino.Model:
    import nncf

    options: dict[str, Any] = {"mode": nncf.CompressWeightsMode.INT8_ASYM}
    if weights == "int4":
        adjust = nncf.AdvancedCompressionParameters(group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST)
        options = {"mode": nncf.CompressWeightsMode.INT4_ASYM, "group_size": 128, "advanced_parameters": adjust}
    with silent():
        return nncf.compress_weights(model, **options)


# --- perplexity -------------------------------------------------------------------------------------------------------

# Return the logits [tokens, vocabulary] of one text's tokens.
Logits = Callable[[list[int]], np.ndarray]


def token_windows(tokenizer: PreTrainedTokenizerBase, context: int | None) -> list[list[int]]:
    tokens: list[int] = tokenizer("\n".join(MIXED.texts)).input_ids
    size = min(WINDOW, context or WINDOW)
    return [tokens[start : start + size] for start in range(0, min(len(tokens), size * WINDOWS), size)]


def perplexity(logits: Logits, texts: Iterable[list[int]]) -> float:
    """Return the perplexity: the number of equally probable tokens that would leave the model as unsure as it is."""
    losses: list[np.ndarray] = []
    for tokens in texts:
        if len(tokens) > 1:
            scores = logits(tokens)[:-1].astype(np.float64)
            scores -= scores.max(-1, keepdims=True)
            probability = scores[np.arange(len(scores)), tokens[1:]] - np.log(np.exp(scores).sum(-1))
            losses.append(-probability)
    return math.exp(np.concatenate(losses).mean())


def rise(before: float, after: float) -> float:
    return after / before - 1


def is_close(before: float, after: float) -> bool:
    return rise(before, after) <= MAX_RISE  # False if `after` is not a number


def torch_logits(model: PreTrainedModel) -> Logits:
    import torch

    def logits(tokens: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0].float().numpy()

    return logits


def openvino_logits(model: openvino.Model) -> Logits:
    import openvino

    # As shared/genai_engine.py computes.
    settings = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 128}
    compiled = openvino.Core().compile_model(model, "CPU", settings)
    names = {name for port in compiled.inputs for name in port.get_names()}
    request = compiled.create_infer_request()

    def logits(tokens: list[int]) -> np.ndarray:
        row = np.array([tokens], np.int64)
        feed: dict[str, Any] = {
            "input_ids": row,
            "attention_mask": np.ones_like(row),
            "position_ids": np.arange(len(tokens))[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        request.reset_state()
        results = request.infer({name: value for name, value in feed.items() if name in names})
        return np.array(results["logits"][0])

    return logits


def one_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0][:300]
