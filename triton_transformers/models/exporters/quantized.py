"""Read quantized language models: vLLM serves them as they are stored, the other engines in 16 bits."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triton_transformers.models.catalogue import Job, Outcome
from triton_transformers.models.exporters.openvino_export import free_memory
from triton_transformers.models.refusals import INDEX, quantization
from triton_transformers.models.silence import quiet
from triton_transformers.settings import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# The methods that transformers dequantizes on a CPU -> its class for their settings.
READABLE = {
    "compressed-tensors": "CompressedTensorsConfig",
    "fp8": "FineGrainedFP8Config",
    "mxfp4": "Mxfp4Config",
}
MEMORY = 2.5  # bytes for each weight while a model is dequantized


@contextlib.contextmanager
def readable_weights(job: Job, others: list[Path]) -> Iterator[tuple[Job, Outcome]]:
    """Yield the job with weights that its format reads, and a line that reports a conversion.

    `others` are the files beside the weights.
    """
    method = quantization(json.loads((job.weights / "config.json").read_text()))
    if not method or job.format == "vllm":
        yield job, Outcome()
        return
    if method not in READABLE:
        raise UserError(
            f"{job.weights} is quantized ({method}), which only vLLM reads: set PROFILE=cuda or FORMAT=vllm, or name "
            "the model that it was made from"
        )
    with tempfile.TemporaryDirectory(dir=job.folder) as folder:
        dequantize(job.weights, method, Path(folder))
        for file in others:
            if not (Path(folder) / file.name).exists() and file.name != INDEX:
                shutil.copyfile(file, Path(folder) / file.name)
        yield (
            replace(job, weights=Path(folder), movable=True),
            Outcome(f"weights in 16 bits, dequantized from {method}"),
        )


def dequantize(weights: Path, method: str, folder: Path) -> None:
    import transformers

    config = transformers.AutoConfig.from_pretrained(weights, local_files_only=True)
    settings: Any = getattr(transformers, READABLE[method])(dequantize=True)
    instead = "PROFILE=cuda serves it as it is"
    model = load_in_16_bits(weights, method, instead, config, quantization_config=settings)
    with quiet():
        model.save_pretrained(folder)


def load_in_16_bits(weights: Path, method: str, instead: str, config: PreTrainedConfig, **options: Any) -> Any:
    """Load with transformers' from_pretrained and these options. Raise if the memory is too small."""
    import torch
    import transformers

    with quiet(), torch.device("meta"):
        size = transformers.AutoModelForCausalLM.from_config(config).num_parameters()
    needed, free = MEMORY * size, free_memory()
    if needed > free:
        raise UserError(
            f"{weights} is quantized ({method}), and in 16 bits it takes about {needed / 1e9:.1f} GB of memory, of "
            f"which {free / 1e9:.1f} GB are free: {instead}"
        )
    with quiet():
        return transformers.AutoModelForCausalLM.from_pretrained(
            weights, config=config, dtype=torch.bfloat16, local_files_only=True, **options
        )
