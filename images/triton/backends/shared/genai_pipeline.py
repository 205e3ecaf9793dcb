"""Load a language model with OpenVINO GenAI. The export uses it too, to measure the model as it will be served."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import openvino
import openvino_genai as genai
from openvino import opset13 as ops

MODEL = "openvino_model"
NO_TOKEN = 2**31 - 1  # the end token where there is none
SETTINGS = {
    # On a CPU with AMX, OpenVINO 2026.4 chooses bf16, and its paged attention then ends the process with a
    # floating-point exception.
    "INFERENCE_PRECISION_HINT": "f32",
    # Beside weights in 8 or 4 bits, OpenVINO rounds activations to 8 bits; this many share a scale. With 32, its
    # default, 32 texts get a quarter fewer tokens per second (Sapphire Rapids).
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 128,
    # Pinned threads of several processes would share the first cores and leave the others idle.
    "ENABLE_CPU_PINNING": False,
}
# The precisions of keys and values. With the first, the default, greedy texts equal those of transformers in float32.
CACHE_PRECISIONS = ("f32", "f16", "u8")


def load_pipeline(
    folder: Path, scheduler: genai.SchedulerConfig, cache_precision: str = CACHE_PRECISIONS[0], **settings: object
) -> genai.ContinuousBatchingPipeline:
    settings = SETTINGS | {"KV_CACHE_PRECISION": cache_precision} | settings
    return genai.ContinuousBatchingPipeline(folder, no_tokenizer(), scheduler, "CPU", **settings)


def no_tokenizer() -> genai.Tokenizer:
    """Return a tokenizer that only satisfies the pipeline: tokens go in and come out."""
    tokens = ops.parameter([-1, -1], np.int64)
    with tempfile.TemporaryDirectory() as folder:
        model = openvino.Model([ops.result(tokens)], [tokens], "no_tokenizer")
        openvino.save_model(model, f"{folder}/openvino_detokenizer.xml")
        return genai.Tokenizer(folder)


def tensor(tokens: list[int]) -> openvino.Tensor:
    return openvino.Tensor(np.array([tokens], np.int64))
