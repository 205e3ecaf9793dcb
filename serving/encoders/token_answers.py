"""Tasks whose answers are places in a text: its entities, and the answer to a question in it.

The arithmetic is in answers.py.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from serving.encoders import answers
from serving.text.tokenization import Answers, Rows
from serving.triton.parameters import choice_parameter, flag_parameter, int_parameter, parameter, version_file
from serving.triton.types import Array, InstanceArgs, ModelConfig, Tensors
from triton_transformers.protocol import LOGITS
from triton_transformers.tasks.table import ENCODERS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The parameter with the task whose answers an encoder gives in place of the outputs of its graph.
ANSWERS = "answers"


class TokenAnswers(Answers):
    """Makes the answers of a task from what the encoder and the tokenizer return for each token."""

    def __init__(self, config: ModelConfig, args: InstanceArgs) -> None:
        task = choice_parameter(config, ANSWERS, tuple(TASKS), parameter(config, ANSWERS))
        self.encoder = ENCODERS[task]
        self.answer = TASKS[task](config, args)

    def encoder_outputs(self, outputs: list[Any]) -> list[Any]:
        return [
            {"name": name, "data_type": "TYPE_FP32", "dims": [-1] * len(axes)}
            for name, axes in self.encoder.outputs.items()
        ]

    def needed(self, names: list[str], rows: Rows) -> list[str]:
        return [*self.encoder.outputs] if names else []

    def finished(self, names: list[str], rows: Rows, tokens: Tensors, outputs: Tensors) -> Tensors:
        return (self.answer(rows, tokens | outputs) | outputs) if names else {}


Answer = Callable[[Rows, Tensors], Tensors]


def token_classification(config: ModelConfig, args: InstanceArgs) -> Answer:
    labels = json.loads(version_file(args, "labels.json", "a JSON list of the labels").read_text(encoding="utf-8"))
    strategy = choice_parameter(config, "aggregation_strategy", answers.STRATEGIES, "simple")
    inside_words = word_continuations(config, args) if strategy in answers.WORD_STRATEGIES else None

    def answer(rows: Rows, tensors: Tensors) -> Tensors:
        columns = (tensors[LOGITS], tensors["offsets"], tensors["special_tokens_mask"])
        inside = inside_words(rows, tensors) if inside_words else [None] * len(rows.texts)
        found = [
            answers.entities(logits, offsets, special, labels, strategy, tokens)
            for logits, offsets, special, tokens in zip(*columns, inside, strict=True)
        ]
        shape = (len(found), max(map(len, found), default=0))
        outputs = {
            "label": np.full(shape, b"", np.object_),
            "score": np.zeros(shape, np.float32),
            "start": np.full(shape, -1, np.int64),
            "end": np.full(shape, -1, np.int64),
        }
        for i, row in enumerate(found):
            for j, entity in enumerate(row):
                outputs["label"][i, j] = entity.label.encode()
                outputs["score"][i, j], outputs["start"][i, j], outputs["end"][i, j] = entity[1:]
        return outputs

    return answer


def word_continuations(config: ModelConfig, args: InstanceArgs) -> Callable[[Rows, Tensors], list[Array]]:
    """Return a function that marks the tokens of each text that continue a word, as transformers' pipeline does."""
    from tokenizers import Tokenizer

    tokenizer: Tokenizer = Tokenizer.from_file(str(version_file(args, "tokenizer.json")))
    unknown = tokenizer.token_to_id(parameter(config, "unknown_token"))
    prefix = getattr(tokenizer.model, "continuing_subword_prefix", None)

    def inside(text: str, ids: Array, offsets: Array) -> Array:
        if prefix:
            lengths = np.array([len(tokenizer.id_to_token(int(i)) or "") for i in ids])
            marks = lengths != offsets[:, 1] - offsets[:, 0]
        else:
            # If the tokenizer marks no word beginnings, the pipeline takes the text between two spaces for a word.
            marks = np.array([start > 0 and " " not in text[start - 1 : start + 1] for start, _ in offsets])
        continues: Array = marks if unknown is None else marks & (ids != unknown)
        return continues

    def all_inside(rows: Rows, tensors: Tensors) -> list[Array]:
        return [inside(*row) for row in zip(rows.texts, tensors["input_ids"], tensors["offsets"], strict=True)]

    return all_inside


def question_answering(config: ModelConfig, args: InstanceArgs) -> Answer:
    max_tokens = int_parameter(config, "longest_answer", 15)
    align_to_words = flag_parameter(config, "align_to_words", True)
    first_token_competes = flag_parameter(config, "first_token_competes", True)

    def answer(rows: Rows, tensors: Tensors) -> Tensors:
        names = ("start_logits", "end_logits", "second_text_mask", "offsets", "word_offsets")
        windows = [answers.Window(*row) for row in zip(*(tensors[name] for name in names), strict=True)]
        ends = np.cumsum(np.bincount(tensors["pair"].ravel())).tolist()
        spans = [
            answers.best_answer(context, windows[start:end], max_tokens, align_to_words, first_token_competes)
            for (_, context), (start, end) in zip(rows.texts, itertools.pairwise([0, *ends]), strict=True)
        ]
        texts = [context[span.start : span.end].encode() for (_, context), span in zip(rows.texts, spans, strict=True)]
        return {
            "answer": np.array(texts, np.object_).reshape(-1, 1),
            "score": np.array([[span.score] for span in spans], np.float32),
            "start": np.array([[span.start] for span in spans], np.int64),
            "end": np.array([[span.end] for span in spans], np.int64),
        }

    return answer


TASKS: dict[str, Callable[[ModelConfig, InstanceArgs], Answer]] = {
    "token-classification": token_classification,
    "question-answering": question_answering,
}
