"""The last step of an ensemble: a model's numbers become the task's answer (shared/answers.py)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

sys.path.append(str(Path(__file__).resolve().parents[1]))

from shared import answers, serving
from shared.config import choice_parameter, int_parameter, parameter
from shared.errors import ConfigError
from shared.metrics import Metrics

Tensors = dict[str, np.ndarray]


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        return auto_complete_model_config

    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.inputs = [tensor["name"] for tensor in config["input"]]
        folder = Path(args["model_repository"]) / args["model_version"]
        task = choice_parameter(config, "task", tuple(TASKS), parameter(config, "task") or "?")
        self.answer: Callable[[Tensors], Tensors] = TASKS[task](config, folder)
        self.metrics = Metrics(args)

    def finalize(self):
        self.metrics.close()

    def execute(self, requests):
        return serving.serve(requests, self.prepare, self.run, self.reply)

    def prepare(self, request) -> Tensors:
        return {name: serving.input_tensor(request, name) for name in self.inputs}

    def run(self, batch: list[Tensors]) -> list[Tensors]:
        return [self.answer(tensors) for tensors in batch]

    def reply(self, request, tensors: Tensors):
        wanted = serving.wanted_outputs(request, tensors)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, tensors[name]) for name in wanted])


def classification(config: dict, folder: Path) -> Callable[[Tensors], Tensors]:
    labels = read_labels(folder)
    activation = choice_parameter(config, "activation", answers.ACTIVATIONS, "softmax")
    return lambda tensors: answers.classify(tensors["logits"], labels, activation)


def token_classification(config: dict, folder: Path) -> Callable[[Tensors], Tensors]:
    labels = read_labels(folder)

    def answer(tensors: Tensors) -> Tensors:
        columns = (tensors["logits"], tensors["offsets"], tensors["special_tokens_mask"])
        rows = [answers.entities(*row, labels) for row in zip(*columns, strict=True)]
        shape = (len(rows), max(map(len, rows), default=0))
        found = {
            "label": np.full(shape, b"", np.object_),
            "score": np.zeros(shape, np.float32),
            "start": np.full(shape, -1, np.int64),
            "end": np.full(shape, -1, np.int64),
        }
        for i, row in enumerate(rows):
            for j, entity in enumerate(row):
                found["label"][i, j] = entity.label.encode()
                found["score"][i, j], found["start"][i, j], found["end"][i, j] = entity[1:]
        return found

    return answer


def fill_mask(config: dict, folder: Path) -> Callable[[Tensors], Tensors]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    count = int_parameter(config, "count", 5)

    def answer(tensors: Tensors) -> Tensors:
        best, probabilities = answers.most_probable(tensors["mask_logits"], count)
        words = [[tokenizer.decode([int(i)]).encode() for i in row] for row in best]
        return {"token": np.array(words, np.object_).reshape(best.shape), "score": probabilities}

    return answer


def question_answering(config: dict, folder: Path) -> Callable[[Tensors], Tensors]:
    longest = int_parameter(config, "longest_answer", 15)

    def answer(tensors: Tensors) -> Tensors:
        columns = (tensors[name] for name in ("start_logits", "end_logits", "second_text_mask", "offsets"))
        spans = [answers.best_span(*row, longest) for row in zip(*columns, strict=True)]
        contexts = (value.decode() for value in tensors["context"].ravel())
        texts = [[context[span.start : span.end].encode()] for context, span in zip(contexts, spans, strict=True)]
        return {
            "answer": np.array(texts, np.object_).reshape(-1, 1),
            "score": np.array([[span.score] for span in spans], np.float32).reshape(-1, 1),
            "start": np.array([[span.start] for span in spans], np.int64).reshape(-1, 1),
            "end": np.array([[span.end] for span in spans], np.int64).reshape(-1, 1),
        }

    return answer


TASKS = {
    "text-classification": classification,
    "image-classification": classification,
    "token-classification": token_classification,
    "fill-mask": fill_mask,
    "question-answering": question_answering,
}


def read_labels(folder: Path) -> list[str]:
    path = folder / "labels.json"
    if not path.is_file():
        raise ConfigError(f"{path} is missing: a JSON list of the labels, or run `make models`")
    return json.loads(path.read_text(encoding="utf-8"))
