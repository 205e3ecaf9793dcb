"""Compute the answers that a text system must give, with the library that its users know: one example at a time.

A reference takes a model and its requests, and returns tensors by the names that the served models give them: those
that a client gets, or outputs of the encoder if the answers are discrete (spans, words), because these jump on a tie.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from triton_transformers.models.exporters.served import Tensors
from triton_transformers.models.exporters.text_model import WINDOW_STRIDE, TextModel

LONGEST_ANSWER = 15  # tokens
SPANS = 12  # of a window that may be parts of the same words

Reference = Callable[[TextModel, list[Tensors]], list[Tensors]]


def transformers_outputs(model: TextModel, requests: list[Tensors]) -> list[Tensors]:
    """Return the outputs of transformers' model for what its own tokenizer makes of each request."""
    return [model_outputs(model, tokenize(model, texts_of(model, request))) for request in requests]


def vectors(model: TextModel, requests: list[Tensors]) -> list[Tensors]:
    """Return the vector of each request's text, with the prompt that the request chooses."""
    output = next(iter(model.task.outputs))
    return [
        {output: model.encode(texts_of(model, request), **prompt_of(model, request))} | span_vectors(model, request)
        for request in requests
    ]


def span_vectors(model: TextModel, request: Tensors) -> Tensors:
    """Return the vectors of a request's spans, if it has any."""
    if "spans" not in request:
        return {}
    (text,), (spans,) = texts_of(model, request), request["spans"]
    return {"span_embeddings": model.encode_spans(text, spans)[None]}


def model_answers(model: TextModel, requests: list[Tensors]) -> list[Tensors]:
    """Return the answer of a multi-vector model's own library to each request."""
    return [model.answers(*texts_of(model, request), **prompt_of(model, request)) for request in requests]


def ranking_scores(model: TextModel, requests: list[Tensors]) -> list[Tensors]:
    """Return what predict() returns for each request, with the prompt that it chooses.

    On Neuron only the encoder's outputs can be compared, which are scores without an activation.
    """
    name, options = ("logits", {"activation_fn": torch.nn.Identity()}) if model.job.neuron else ("score", {})
    cross_encoder = model.original
    if cross_encoder.tokenizer.pad_token is None:
        # `predict` asks for padding even of one pair, which then gets none.
        cross_encoder.tokenizer.pad_token = cross_encoder.tokenizer.eos_token
    scores = [
        cross_encoder.predict([texts_of(model, request)], **prompt_of(model, request), **options)
        for request in requests
    ]
    return [{name: np.asarray(row).reshape(1, -1)} for row in scores]


def prompt_of(model: TextModel, request: Tensors) -> dict[str, str]:
    return {name: request[name][0, 0].decode() for name in model.optional_inputs if name in request}


def answer_scores(model: TextModel, requests: list[Tensors]) -> list[Tensors]:
    """Return the scores of the answers, or on Neuron the encoder's outputs."""
    if model.job.neuron:
        return transformers_outputs(model, requests)
    answer = partial(find_answer, model.original, model.hugging_face_tokenizer, max_length=model.max_length)
    answers = [answer(*texts_of(model, request)) for request in requests]
    return [{"score": np.array([[answer.score]], np.float32)} for answer in answers]


class Answer(NamedTuple):
    text: str
    score: float
    start: int
    end: int


@torch.inference_mode()
def find_answer(
    network: Any, tokenizer: Any, question: str, context: str, max_length: int, align_to_words: bool = True
) -> Answer:
    """Return the answer by the rule of the pipeline that transformers had before release 5, with its defaults."""
    settings = {"truncation": "only_second", "max_length": max_length, "stride": min(max_length // 2, WINDOW_STRIDE)}
    windows = tokenizer(question, context, return_overflowing_tokens=True, **settings)
    answers: dict[str, Answer] = {}
    for window, encoding in enumerate(windows.encodings):
        names = tokenizer.model_input_names
        outputs = network(**{name: torch.tensor([windows[name][window]]) for name in names if name in windows})
        in_context = torch.tensor([text == 1 for text in encoding.sequence_ids])
        competing = in_context | (torch.tensor(encoding.ids) == tokenizer.cls_token_id)
        starts, ends = (
            outputs[name][0].masked_fill(~competing, -10000.0).softmax(-1) * in_context
            for name in ("start_logits", "end_logits")
        )
        scores = starts.outer(ends).triu().tril(LONGEST_ANSWER - 1)
        for index in scores.ravel().argsort(descending=True)[: SPANS if align_to_words else 1].tolist():
            first, last = divmod(index, len(ends))
            if (score := float(scores[first, last])) > 0:
                start, end = characters(encoding, first, last, align_to_words)
                text = context[start:end].lower()  # spans that read the same share an answer
                same = answers.get(text, Answer(context[start:end], 0.0, start, end))
                answers[text] = same._replace(score=same.score + score)
    return max(answers.values(), key=lambda answer: answer.score, default=Answer("", 0.0, 0, 0))


def characters(encoding: Any, first: int, last: int, align_to_words: bool) -> tuple[int, int]:
    """Return the characters of these tokens, or of the words that they are in."""
    words = [encoding.token_to_word(token) for token in (first, last)]
    if align_to_words and None not in words:
        return encoding.word_to_chars(words[0], 1)[0], encoding.word_to_chars(words[1], 1)[1]
    return encoding.offsets[first][0], encoding.offsets[last][1]


# Tasks whose reference is another than the outputs of transformers' model.
REFERENCES: dict[str, Reference] = {
    "sentence-similarity": vectors,
    "sparse-embedding": vectors,
    "multi-vector-embedding": model_answers,
    "hybrid-embedding": model_answers,
    "text-ranking": ranking_scores,
    "question-answering": answer_scores,
}


def reference(model: TextModel, requests: list[Tensors]) -> list[Tensors]:
    return REFERENCES.get(model.job.task, transformers_outputs)(model, requests)


def request_of(model: TextModel, *texts: str) -> Tensors:
    """Return a request with one row. The second of two texts may be optional."""
    return {name: np.array([[text.encode()]], np.object_) for name, text in zip(model.task.inputs, texts, strict=False)}


def texts_of(model: TextModel, request: Tensors) -> list[str]:
    """Return the texts of a request's row."""
    return [request[name][0, 0].decode() for name in model.task.inputs if name in request]


def tokenize(model: TextModel, texts: list[str]) -> dict[str, torch.Tensor]:
    if model.task.second_is_optional:
        texts = texts[:1] + [text for text in texts[1:] if text]  # the pipeline ignores an empty second text
    return model.hugging_face_tokenizer(
        *([text] for text in texts),  # as lists: beside a single text, transformers ignores an empty second one
        truncation=model.task.truncation,
        max_length=model.max_length,
        return_tensors="pt",
    )


@torch.inference_mode()
def model_outputs(model: TextModel, tokens: dict[str, torch.Tensor]) -> Tensors:
    original: Any = model.original
    accepted = inspect.signature(original.forward).parameters
    outputs = original(**{name: tensor for name, tensor in tokens.items() if name in accepted})
    if model.mask:
        position = int((tokens["input_ids"][0] == model.hugging_face_tokenizer.mask_token_id).int().argmax())
        return {"mask_logits": outputs.logits[:, position].numpy()}
    return {name: outputs[name].numpy() for name in model.task.outputs}
