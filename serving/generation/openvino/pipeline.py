"""Load a language model with OpenVINO GenAI. The export uses it too, to measure the model as it will be served."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import openvino
import openvino_genai as genai
from openvino import opset13 as ops

from serving.generation.openvino.image_rows import ImageRows
from serving.triton.parameters import UNPINNED

T = TypeVar("T")

MODEL = "openvino_model"
NO_TOKEN = 2**31 - 1  # the end token where there is none
SETTINGS = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    # Beside weights in 8 or 4 bits, OpenVINO rounds activations to 8 bits; this many share a scale. With 32, its
    # default, 32 texts get a quarter fewer tokens per second (Sapphire Rapids).
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 128,
    **UNPINNED,
}
FLOAT32, BFLOAT16 = "float32", "bfloat16"
# The type in which a model computes -> the precisions that its keys and values may have. The first is the default, and
# OpenVINO's name of the type. With float32 and f32, greedy texts equal those of transformers.
PRECISIONS = {FLOAT32: ("f32", "f16", "u8"), BFLOAT16: ("bf16", "u8")}


def load_pipeline(
    folder: Path,
    scheduler: genai.SchedulerConfig,
    tokenizer: genai.Tokenizer | None = None,
    **settings: object,
) -> genai.ContinuousBatchingPipeline:
    settings = SETTINGS | settings | {"extensions": [ImageRows]}
    return genai.ContinuousBatchingPipeline(folder, tokenizer or new_tokenizer([b""]), scheduler, "CPU", **settings)


def read_graph(folder: Path) -> openvino.Model:
    core = openvino.Core()
    core.add_extension(ImageRows)
    return core.read_model(folder / f"{MODEL}.xml")


def precision_settings(dtype: str, cache_precision: str = "") -> dict[str, str]:
    precision = PRECISIONS[dtype][0]
    return {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": cache_precision or precision}


def new_tokenizer(vocabulary: Sequence[bytes]) -> genai.Tokenizer:
    """Return a tokenizer that only satisfies the pipeline: tokens go in and come out.

    GenAI reads the bytes of the tokens, for structured output, from three inputs of a node with this name.
    """
    ends = np.cumsum([len(token) for token in vocabulary], dtype=np.int32)
    data = np.frombuffer(b"".join(vocabulary), np.uint8).astype(np.int32)
    tokens = ops.parameter([-1, -1], np.int64)
    parts = (np.append(0, ends[:-1]).astype(np.int32), ends, data)
    ids = ops.convert(ops.reshape(tokens, [-1], False), np.int32)
    node = ops.concat([ids, *map(ops.constant, parts)], 0)
    node.set_friendly_name("VocabDecoder")
    model = openvino.Model([ops.result(node)], [tokens], "vocabulary")
    return saved(model, "openvino_detokenizer", lambda folder: genai.Tokenizer(write_encoder(folder)))


def write_encoder(folder: str) -> str:
    """Write a model that encodes any text to one token: GenAI compares a draft model's tokenizer with it."""
    texts = ops.parameter([-1], openvino.Type.string)
    tokens = ops.broadcast(ops.constant(np.int64(0)), ops.concat([ops.shape_of(texts), ops.constant(np.array([1]))], 0))
    results = [ops.result(tokens) for _ in range(2)]
    for result, name in zip(results, ("input_ids", "attention_mask"), strict=True):
        result.output(0).get_tensor().set_names({name})
    openvino.save_model(openvino.Model(results, [texts], "encoder"), f"{folder}/openvino_tokenizer.xml")
    return folder


def saved(model: openvino.Model, name: str, load: Callable[[str], T]) -> T:
    """Save a model under a name in a folder, and load the folder."""
    with tempfile.TemporaryDirectory() as folder:
        openvino.save_model(model, f"{folder}/{name}.xml", compress_to_fp16=False)
        return load(folder)


def tensor(tokens: list[int]) -> openvino.Tensor:
    return openvino.Tensor(np.array([tokens], np.int64))
