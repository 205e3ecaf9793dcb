"""Backend `postprocessor`: the last step of an ensemble, which turns a model's outputs into the task's answer.

The arithmetic is in serving/encoders/answers.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import triton_python_backend_utils as pb_utils

from serving.encoders import answers
from serving.triton import responses
from serving.triton.backend import BatchBackend
from serving.triton.parameters import choice_parameter, int_parameter, parameter, version_file
from serving.triton.types import InstanceArgs, ModelConfig, Tensors
from triton_transformers.protocol import LOGITS

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TritonPythonModel(BatchBackend[Tensors]):
    def set_up(self, config: ModelConfig, args: InstanceArgs) -> None:
        self.inputs = [tensor["name"] for tensor in config["input"]]
        task = choice_parameter(config, "task", tuple(TASKS), parameter(config, "task") or "?")
        self.postprocess: Callable[[Tensors], Tensors] = TASKS[task](config, args)

    def prepare(self, request: pb_utils.InferenceRequest) -> Tensors:
        return {name: responses.input_tensor(request, name) for name in self.inputs}

    def run_batch(self, jobs: list[Tensors]) -> list[Tensors]:
        return [self.postprocess(tensors) for tensors in jobs]


def classification(config: ModelConfig, args: InstanceArgs) -> Callable[[Tensors], Tensors]:
    labels = read_labels(args)
    activation = choice_parameter(config, "activation", answers.ACTIVATIONS, "softmax")
    return lambda tensors: answers.classify(tensors[LOGITS], labels, activation)


def ranking(config: ModelConfig, args: InstanceArgs) -> Callable[[Tensors], Tensors]:
    activation = choice_parameter(config, "activation", answers.ACTIVATIONS, "sigmoid")
    return lambda tensors: {"score": answers.activate(tensors[LOGITS], activation)}


def fill_mask(config: ModelConfig, args: InstanceArgs) -> Callable[[Tensors], Tensors]:
    tokenizer = read_tokenizer(args)
    count = int_parameter(config, "count", 5)

    def postprocess(tensors: Tensors) -> Tensors:
        tokens, probabilities = answers.most_probable(tensors["mask_logits"], count)
        words = [[tokenizer.decode([int(i)], skip_special_tokens=False).encode() for i in row] for row in tokens]
        return {
            "token": np.array(words, np.object_).reshape(tokens.shape),
            "token_id": tokens.astype(np.int64),
            "score": probabilities,
        }

    return postprocess


def sparse_embedding(config: ModelConfig, args: InstanceArgs) -> Callable[[Tensors], Tensors]:
    tokenizer = read_tokenizer(args)

    return lambda tensors: answers.sparse_tensors(
        [answers.active_dimensions(row) for row in tensors["sparse_embedding"]], tokenizer
    )


TASKS = {
    "text-classification": classification,
    "text-ranking": ranking,
    "image-classification": classification,
    "fill-mask": fill_mask,
    "sparse-embedding": sparse_embedding,
}


def read_tokenizer(args: InstanceArgs) -> Tokenizer:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(version_file(args, "tokenizer.json")))


def read_labels(args: InstanceArgs) -> list[str]:
    return json.loads(version_file(args, "labels.json", "a JSON list of the labels").read_text(encoding="utf-8"))
