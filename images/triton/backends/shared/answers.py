"""Turns a model's outputs into labels, entities, tokens and spans, with the arithmetic of transformers' pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from shared.types import Array, Tensors

ACTIVATIONS = ("softmax", "sigmoid", "tanh", "none")
SPANS_ALIGNED_TO_WORDS = 12  # as in transformers' pipeline


class Entity(NamedTuple):
    label: str
    score: float
    start: int
    end: int


class Window(NamedTuple):
    """The tokens of a question and of as much of its context as fits into the model."""

    start_logits: Array
    end_logits: Array
    in_context: Array
    offsets: Array  # of each token in characters
    word_offsets: Array  # of each token's word, or -1


class Span(NamedTuple):
    score: float
    start: int
    end: int


def softmax(logits: Array) -> Array:
    powers: Array = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities: Array = powers / powers.sum(axis=-1, keepdims=True)
    return probabilities


def activate(logits: Array, activation: str) -> Array:
    logits = logits.astype(np.float32)
    if activation == "softmax":
        return softmax(logits)
    if activation == "sigmoid":
        return (1 + np.tanh(logits / 2)) / 2
    return np.tanh(logits) if activation == "tanh" else logits


def classify(logits: Array, labels: list[str], activation: str = "softmax") -> Tensors:
    """Return each row's best label, its score and all scores, for logits [rows, labels]."""
    scores = activate(logits, activation)
    best = scores.argmax(axis=1)
    return {
        "label": np.array([[labels[i].encode()] for i in best], np.object_).reshape(-1, 1),
        "score": scores.max(axis=1, keepdims=True),
        "scores": scores,
    }


def entities(logits: Array, offsets: Array, special: Array, labels: list[str]) -> list[Entity]:
    """Return the entities of one text.

    Adjacent tokens of one kind are one entity. A label with B- begins another, and O is no entity.
    """
    scores = softmax(logits.astype(np.float32))
    groups: list[list[Entity]] = []
    previous = ""
    for token in np.flatnonzero(special == 0):
        best = int(scores[token].argmax())
        begins, kind = _parse_label(labels[best])
        if begins or kind != previous:
            groups.append([])
        start, end = offsets[token]
        groups[-1].append(Entity(kind, float(scores[token, best]), int(start), int(end)))
        previous = kind
    return [
        Entity(tokens[0].label, float(np.mean([token.score for token in tokens])), tokens[0].start, tokens[-1].end)
        for tokens in groups
        if tokens[0].label != "O"
    ]


def _parse_label(label: str) -> tuple[bool, str]:
    """Return (True, PER) for B-PER, and (False, PER) for I-PER and PER."""
    return label.startswith("B-"), label[2:] if label[:2] in ("B-", "I-") else label


def most_probable(logits: Array, count: int) -> tuple[Array, Array]:
    """Return the indices and probabilities of each row's best, best first, for logits [rows, vocabulary]."""
    probabilities = softmax(logits.astype(np.float32))
    best = np.argsort(-probabilities, axis=1, kind="stable")[:, :count]
    return best, np.take_along_axis(probabilities, best, axis=1)


def best_answer(context: str, windows: list[Window], max_tokens: int, align_to_words: bool) -> Span:
    """Return the most probable answer, with the summed score of the spans that read the same."""
    candidates: dict[str, Span] = {}
    for window in windows:
        for span in spans(window, max_tokens, align_to_words):
            text = context[span.start : span.end].lower()
            first = candidates.get(text, span._replace(score=0.0))
            candidates[text] = first._replace(score=first.score + span.score)
    return max(candidates.values(), key=lambda span: span.score, default=Span(0.0, 0, 0))


def spans(window: Window, max_tokens: int, align_to_words: bool) -> Iterator[Span]:
    """Yield the most probable spans of a window, best first: several may be parts of the same words."""
    # The first token competes, because a model that knows no answer points there.
    in_context = window.in_context.astype(bool)
    candidates = in_context.copy()
    candidates[0] = True
    starts, ends = (
        np.where(in_context, softmax(np.where(candidates, logits.astype(np.float32), -10000.0)), 0)
        for logits in (window.start_logits, window.end_logits)
    )
    scores = np.tril(np.triu(np.outer(starts, ends)), max_tokens - 1)
    count = min(SPANS_ALIGNED_TO_WORDS if align_to_words else 1, scores.size)
    best = np.argpartition(-scores, count - 1, axis=None)[:count]
    for index in best[np.argsort(-scores.flat[best], kind="stable")]:
        first, last = np.unravel_index(index, scores.shape)
        if scores[first, last] > 0:
            start, end = window.offsets[first, 0], window.offsets[last, 1]
            words = window.word_offsets[first, 0], window.word_offsets[last, 1]
            if align_to_words and min(words) >= 0:
                start, end = words
            yield Span(float(scores[first, last]), int(start), int(end))
