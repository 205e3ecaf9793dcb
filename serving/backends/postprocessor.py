"""Backend `postprocessor`: the last step of an ensemble, which turns a model's outputs into the task's answer.

The arithmetic is in serving/encoders/answers.py.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import triton_python_backend_utils as pb_utils

from serving.encoders import answers
from serving.triton import responses
from serving.triton.backend import BatchBackend
from serving.triton.parameters import choice_parameter, flag_parameter, int_parameter, parameter, version_file
from serving.triton.types import Array, ConfigError, InstanceArgs, ModelConfig, Tensors
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


def token_classification(config: ModelConfig, args: InstanceArgs) -> Callable[[Tensors], Tensors]:
    labels = read_labels(args)
    strategy = choice_parameter(config, "aggregation_strategy", answers.STRATEGIES, "simple")
    inside_words = word_continuations(config, args) if strategy in answers.WORD_STRATEGIES else None

    def postprocess(tensors: Tensors) -> Tensors:
        columns = (tensors[LOGITS], tensors["offsets"], tensors["special_tokens_mask"])
        inside = inside_words(tensors) if inside_words else [None] * len(tensors[LOGITS])
        rows = [
            answers.entities(logits, offsets, special, labels, strategy, tokens)
            for logits, offsets, special, tokens in zip(*columns, inside, strict=True)
        ]
        shape = (len(rows), max(map(len, rows), default=0))
        outputs = {
            "label": np.full(shape, b"", np.object_),
            "score": np.zeros(shape, np.float32),
            "start": np.full(shape, -1, np.int64),
            "end": np.full(shape, -1, np.int64),
        }
        for i, row in enumerate(rows):
            for j, entity in enumerate(row):
                outputs["label"][i, j] = entity.label.encode()
                outputs["score"][i, j], outputs["start"][i, j], outputs["end"][i, j] = entity[1:]
        return outputs

    return postprocess


def word_continuations(config: ModelConfig, args: InstanceArgs) -> Callable[[Tensors], list[Array]]:
    """Return a function that marks the tokens of each text that continue a word, as transformers' pipeline does."""
    inputs = {tensor["name"] for tensor in config["input"]}
    if not {"input_ids", "input_text"} <= inputs:
        raise ConfigError(
            "parameter 'aggregation_strategy': first, average and max need the tokens and the text, which this model "
            "does not get: run `make models` again with the system's FORMAT"
        )
    tokenizer = read_tokenizer(args)
    unknown = tokenizer.token_to_id(parameter(config, "unknown_token"))
    prefix = getattr(tokenizer.model, "continuing_subword_prefix", None)

    def inside(text: str, ids: Array, offsets: Array) -> Array:
        if prefix:
            lengths = np.array([len(tokenizer.id_to_token(int(i)) or "") for i in ids])
            marks = lengths != offsets[:, 1] - offsets[:, 0]
        else:
            # If the tokenizer marks no word beginnings, the pipeline takes the text between two spaces for a word.
            marks = np.array([start > 0 and " " not in text[start - 1 : start + 1] for start, _ in offsets])
        return marks if unknown is None else marks & (ids != unknown)

    def all_inside(tensors: Tensors) -> list[Array]:
        texts = (value.decode() for value in tensors["input_text"].ravel())
        return [inside(*row) for row in zip(texts, tensors["input_ids"], tensors["offsets"], strict=True)]

    return all_inside


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


def question_answering(config: ModelConfig, args: InstanceArgs) -> Callable[[Tensors], Tensors]:
    max_tokens = int_parameter(config, "longest_answer", 15)
    align_to_words = flag_parameter(config, "align_to_words", True)
    first_token_competes = flag_parameter(config, "first_token_competes", True)

    def postprocess(tensors: Tensors) -> Tensors:
        names = ("start_logits", "end_logits", "second_text_mask", "offsets", "word_offsets")
        windows = [answers.Window(*row) for row in zip(*(tensors[name] for name in names), strict=True)]
        # The context is in the first of its windows.
        _, first = np.unique(tensors["pair"].ravel(), return_index=True)
        contexts = [tensors["second_text"].ravel()[row].decode() for row in first]
        windows_of = [windows[start:end] for start, end in itertools.pairwise([*first, len(windows)])]
        spans = [
            answers.best_answer(context, own, max_tokens, align_to_words, first_token_competes)
            for context, own in zip(contexts, windows_of, strict=True)
        ]
        texts = [[context[span.start : span.end].encode()] for context, span in zip(contexts, spans, strict=True)]
        return {
            "answer": np.array(texts, np.object_).reshape(-1, 1),
            "score": np.array([[span.score] for span in spans], np.float32).reshape(-1, 1),
            "start": np.array([[span.start] for span in spans], np.int64).reshape(-1, 1),
            "end": np.array([[span.end] for span in spans], np.int64).reshape(-1, 1),
        }

    return postprocess


TASKS = {
    "text-classification": classification,
    "text-ranking": ranking,
    "image-classification": classification,
    "token-classification": token_classification,
    "fill-mask": fill_mask,
    "question-answering": question_answering,
    "sparse-embedding": sparse_embedding,
}


def read_tokenizer(args: InstanceArgs) -> Tokenizer:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(version_file(args, "tokenizer.json")))


def read_labels(args: InstanceArgs) -> list[str]:
    return json.loads(version_file(args, "labels.json", "a JSON list of the labels").read_text(encoding="utf-8"))
