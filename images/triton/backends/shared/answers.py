"""Turns a model's outputs into labels, entities, tokens and spans, with the arithmetic of transformers' pipelines."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shared.types import Array, Tensors

ACTIVATIONS = ("softmax", "sigmoid", "none")


class Entity(NamedTuple):
    label: str
    score: float
    start: int
    end: int


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
    return (1 + np.tanh(logits / 2)) / 2 if activation == "sigmoid" else logits


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


def best_span(start: Array, end: Array, in_context: Array, offsets: Array, max_tokens: int = 15) -> Span:
    """Return the most probable span of one question's context, in characters."""
    # The first token competes, because a model that knows no answer points there.
    candidates = in_context.astype(bool).copy()
    candidates[0] = True
    starts, ends = (softmax(np.where(candidates, side.astype(np.float32), -10000.0)) for side in (start, end))
    starts[~in_context.astype(bool)] = ends[~in_context.astype(bool)] = 0
    scores = np.tril(np.triu(np.outer(starts, ends)), max_tokens - 1)
    first, last = np.unravel_index(scores.argmax(), scores.shape)
    if not scores[first, last] > 0:
        return Span(0.0, 0, 0)
    return Span(float(scores[first, last]), int(offsets[first, 0]), int(offsets[last, 1]))
