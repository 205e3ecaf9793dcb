"""Export language models to OpenVINO, with weights in 8 or 4 bits, and measure what that costs in perplexity."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from export.catalogue import FormatUnavailable, Job, Outcome
from export.checkpoint.silence import quiet, silent
from export.checkpoint.tasks import IMAGE_TEXT
from triton_transformers.cli import err
from triton_transformers.corpus import MIXED
from triton_transformers.engines import OPENVINO

if TYPE_CHECKING:
    import openvino
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

(MODEL,) = OPENVINO.files
BF16 = "openvino-bf16"  # computes in bfloat16; the other formats compute in float32
# The stored precision of the weights for each FORMAT; `openvino` falls back to 16 bits.
WEIGHTS = {"openvino": "int8", "openvino-int4": "int4", BF16: "fp16", "openvino-fp16": "fp16", "openvino-fp32": "fp32"}
# Perplexity may change by this share through the export itself, and rise by it through int8.
MAX_RISE = 0.01
WINDOW, WINDOWS = 128, 16  # tokens of the committed texts on which perplexity is measured
# The original reads only these windows: it is ten times as slow, and an error of the graph shows in each.
ASKED = 4
# Memory for the export, relative to the weights: the model, the graph, and the compressed copy.
MEMORY = 2.5


def export(job: Job, tokenizer: PreTrainedTokenizerBase, context: int | None, folder: Path) -> Outcome:
    """Write the model into the folder. Raise FormatUnavailable if OpenVINO cannot serve it."""
    check_memory(job)
    check_cpu(job.format)
    from export.recipes.language import vision

    with quiet(), tempfile.TemporaryDirectory(dir=folder) as work:
        err.step("reading the weights")
        model = load(job)
        texts = token_windows(tokenizer, context)
        err.step("asking the original")
        before = torch_perplexity(model, texts[:ASKED])
        from serving.engines.pretrained import rotary_context

        rotary_limit, kind = rotary_context(model.config), model.config.model_type
        chat = vision.greedy_chat(job, model) if job.task == IMAGE_TEXT else None
        if chat:
            vision.write(model, folder)
        graph = convert(model)
        del model
        exported = Path(work)
        weights = "fp32" if job.format == "openvino-fp32" else "fp16"
        save(graph, exported, weights)
        losses = served_losses(exported, texts, kind)
        after = perplexity(losses[:ASKED])
        if chat:
            vision.check(chat, exported, folder)
        if not abs(rise(before, after)) <= MAX_RISE:
            raise FormatUnavailable(
                f"exported to OpenVINO, its perplexity is {after:.4g} instead of {before:.4g} on the committed texts"
            )
        weights, summary = write(graph, exported, weights, job.format, folder, perplexity(losses), texts)
    for file in ("config.json", "generation_config.json"):
        if (job.weights / file).is_file():
            shutil.copyfile(job.weights / file, folder / file)
    size = (folder / MODEL).with_suffix(".bin").stat().st_size
    facts = {"weights": weights, "dtype": dtype_of(job.format), "context": context}
    outcome = Outcome(f"{size / 1e6:,.0f} MB", facts).join(Outcome(summary))
    if rotary_limit and rotary_limit < (context or math.inf):
        outcome.facts["context"] = rotary_limit
        return outcome.join(
            Outcome(f"texts of at most {rotary_limit:,} tokens instead of {context:,}, which takes FORMAT=python")
        )
    return outcome


def export_draft(
    job: Job, tokenizer: PreTrainedTokenizerBase, context: int | None, vocabulary: int, folder: Path
) -> None:
    """Write a model that proposes tokens into the folder. It takes the tokens of adapters for those of the model."""
    import openvino
    from openvino import opset13 as ops

    with tempfile.TemporaryDirectory(dir=folder) as work:
        export(job, tokenizer, context, Path(work))
        graph = openvino.Core().read_model(Path(work) / MODEL)
        ids = graph.input("input_ids")
        readers = ids.get_target_inputs()
        own = ops.mod(ids, ops.constant(np.int64(vocabulary)))
        for reader in readers:
            reader.replace_source_output(own.output(0))
        openvino.save_model(graph, folder / MODEL, compress_to_fp16=False)
    from serving.generation.openvino.pipeline import write_encoder

    write_encoder(str(folder))


def check_memory(job: Job) -> None:
    needed = MEMORY * sum(file.stat().st_size for file in job.weights.glob("*.safetensors"))
    free = free_memory()
    if needed > free:
        raise FormatUnavailable(
            f"its export to OpenVINO takes about {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
        )


def check_cpu(form: str) -> None:
    from serving.triton.parameters import has_bf16

    if form == BF16 and not has_bf16():
        raise FormatUnavailable("this CPU does not compute in bfloat16: set FORMAT=openvino-fp16")


def dtype_of(form: str) -> str:
    """Return what OpenVINO computes in."""
    return "bfloat16" if form == BF16 else "float32"


def free_memory() -> int:
    """Return what the container (EXPORTER_MEMORY) or the machine has left."""
    from serving.triton.memory import memory

    used, limit = memory()
    return limit - used


def load(job: Job) -> PreTrainedModel:
    import transformers

    library = transformers.AutoModelForImageTextToText if job.task == IMAGE_TEXT else transformers.AutoModelForCausalLM
    config = json.loads((job.weights / "config.json").read_text())
    if config["model_type"] == "gemma3" and job.task == IMAGE_TEXT:
        raise FormatUnavailable("its attention sees an image's tokens in both directions")
    if job.trust_remote_code and "AutoModelForCausalLM" in config.get("auto_map", {}):
        raise FormatUnavailable("it brings its own code, which the export to OpenVINO does not run")
    transformers.logging.set_verbosity_error()
    model: PreTrainedModel = library.from_pretrained(job.weights, dtype="auto", local_files_only=True)
    if job.format == "openvino-fp32" and model.dtype.itemsize < 4:
        raise FormatUnavailable("its weights are stored in 16 bits: set FORMAT=openvino-fp16")
    return model.eval()


def convert(model: PreTrainedModel) -> openvino.Model:
    from export.recipes.language import graph

    err.step("exporting to OpenVINO")
    try:
        with silent():
            return graph.convert(model)
    except Exception as error:  # PyTorch and OpenVINO raise anything for a model that they cannot trace
        raise FormatUnavailable(f"OpenVINO cannot export a {model.config.model_type}: {one_line(error)}") from error


def save(graph: openvino.Model, folder: Path, weights: str) -> None:
    """Write the graph. Raise OSError if the disk is full: OpenVINO's own error names no reason."""
    import openvino

    try:
        openvino.save_model(graph, folder / MODEL, compress_to_fp16=weights == "fp16")
    except RuntimeError as error:
        if "iostream error" not in str(error):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error


def write(
    graph: openvino.Model, exported: Path, weights: str, form: str, folder: Path, before: float, texts: list[list[int]]
) -> tuple[str, str]:
    """Put the model with weights in the format's precision in place. Return that precision, and a line about it."""
    chosen, summary = WEIGHTS[form], ""
    if chosen.startswith("int"):
        compress(graph, chosen)
        save(graph, folder, chosen)
        after = perplexity(served_losses(folder, texts))
        change = difference(before, after)
        if form != "openvino" or rise(before, after) <= MAX_RISE:
            return chosen, f"weights in {chosen}: {change}"
        summary = f"weights in fp16, because in int8 its {change}"
    for file in exported.iterdir():
        file.replace(folder / file.name)
    if form == BF16:
        after = perplexity(served_losses(folder, texts, dtype=dtype_of(form)))
        summary = f"computed in bfloat16: {difference(before, after)}"
    return weights, summary


def difference(before: float, after: float) -> str:
    return f"perplexity {after:.4g} instead of {before:.4g} ({rise(before, after):+.1%}) on the committed texts"


def compress(graph: openvino.Model, weights: str) -> None:
    import nncf

    err.step(f"rounding the weights to {weights}")
    options: dict[str, Any] = {"mode": nncf.CompressWeightsMode.INT8_ASYM}
    if weights == "int4":
        adjust = nncf.AdvancedCompressionParameters(group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST)
        options = {"mode": nncf.CompressWeightsMode.INT4_ASYM, "group_size": 128, "advanced_parameters": adjust}
    with silent():
        nncf.compress_weights(graph, **options)


# --- perplexity: the number of equally probable tokens that would leave the model as unsure as it is ------------------


def token_windows(tokenizer: PreTrainedTokenizerBase, context: int | None) -> list[list[int]]:
    tokens: list[int] = tokenizer("\n".join(MIXED.texts)).input_ids
    size = min(WINDOW, context or WINDOW)
    windows = (tokens[start : start + size] for start in range(0, min(len(tokens), size * WINDOWS), size))
    return [window for window in windows if len(window) > 1]


def rise(before: float, after: float) -> float:
    return after / before - 1


def torch_perplexity(model: PreTrainedModel, texts: list[list[int]]) -> float:
    import torch

    losses = []
    with torch.no_grad(), in_32_bits(model):
        for text in texts:
            tokens = torch.tensor([text])
            logits = model(tokens).logits[0, :-1].double()
            losses.append(torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none"))
    return math.exp(torch.cat(losses).mean())


@contextlib.contextmanager
def in_32_bits(model: PreTrainedModel) -> Iterator[None]:
    """Let a model with weights in 16 bits compute in 32, the same numbers: most CPUs take five times as long in 16."""
    stored = {weight: weight.data.dtype for weight in model.parameters() if weight.data.itemsize == 2}
    for weight in stored:
        weight.data = weight.data.float()
    try:
        yield
    finally:
        for weight, dtype in stored.items():
            weight.data = weight.data.to(dtype)


def perplexity(losses: list[np.ndarray]) -> float:
    return math.exp(np.concatenate(losses).mean(dtype=np.float64))


def served_losses(
    folder: Path, texts: list[list[int]], kind: str = "model", dtype: str = "float32"
) -> list[np.ndarray]:
    """Measure the texts as the server runs them: together, in parts, with paged attention. Return a loss per token."""
    import openvino_genai as genai

    err.step("comparing with the original")
    from serving.generation.openvino.pipeline import BFLOAT16, NO_TOKEN, load_pipeline, precision_settings, tensor
    from serving.generation.openvino.trial import check_bfloat16
    from serving.triton.types import ConfigError

    scheduler, settings = genai.SchedulerConfig(), precision_settings(dtype)
    scheduler.cache_size = 1  # in GB; texts that need more wait
    try:
        if dtype == BFLOAT16:
            check_bfloat16(folder, settings)  # in a process that inherits sys.path
        pipeline = load_pipeline(folder, scheduler, **settings)
    except (ConfigError, RuntimeError) as error:
        raise FormatUnavailable(f"OpenVINO GenAI cannot serve a {kind}: {one_line(error)}") from error
    config = genai.GenerationConfig(echo=True, logprobs=1, max_new_tokens=1, eos_token_id=NO_TOKEN)
    handles = [pipeline.add_request(i, tensor(text), config) for i, text in enumerate(texts)]
    while pipeline.has_non_finished_requests():
        pipeline.step()
    # The first number belongs to the first token, which nothing predicts, and the last to the new token.
    return [-np.array(handle.read_all()[0].generated_log_probs[1:-1]) for handle in handles]


def one_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0][:300]
