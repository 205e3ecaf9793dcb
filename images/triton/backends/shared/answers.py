"""What a model's numbers mean: labels, entities, tokens, spans. The arithmetic is that of transformers' pipelines."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

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


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def activate(logits: np.ndarray, activation: str) -> np.ndarray:
    logits = logits.astype(np.float32)
    if activation == "softmax":
        return softmax(logits)
    return (1 + np.tanh(logits / 2)) / 2 if activation == "sigmoid" else logits


def classify(logits: np.ndarray, labels: list[str], activation: str = "softmax") -> dict[str, np.ndarray]:
    """[N, L] -> the best label of each row, its score, and the scores of all."""
    scores = activate(logits, activation)
    best = scores.argmax(axis=1)
    return {
        "label": np.array([[labels[i].encode()] for i in best], np.object_).reshape(-1, 1),
        "score": scores.max(axis=1, keepdims=True),
        "scores": scores,
    }


def entities(logits: np.ndarray, offsets: np.ndarray, special: np.ndarray, labels: list[str]) -> list[Entity]:
    """One text's: neighbouring tokens of one kind are one entity, B- begins another; O is none."""
    scores = softmax(logits.astype(np.float32))
    groups: list[list[tuple[str, float, int, int]]] = []
    before = ""
    for token in np.flatnonzero(special == 0):
        best = int(scores[token].argmax())
        begins, kind = _tag(labels[best])
        if begins or kind != before:
            groups.append([])
        groups[-1].append((kind, float(scores[token, best]), *map(int, offsets[token])))
        before = kind
    return [
        Entity(group[0][0], float(np.mean([score for _, score, *_ in group])), group[0][2], group[-1][3])
        for group in groups
        if group[0][0] != "O"
    ]


def _tag(label: str) -> tuple[bool, str]:
    """B-PER -> (True, PER), I-PER and PER -> (False, PER)."""
    return label.startswith("B-"), label[2:] if label[:2] in ("B-", "I-") else label


def most_probable(logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """[N, V] -> indices and probabilities of each row's best, best first."""
    probabilities = softmax(logits.astype(np.float32))
    best = np.argsort(-probabilities, axis=1, kind="stable")[:, :count]
    return best, np.take_along_axis(probabilities, best, axis=1)


def best_span(
    start: np.ndarray, end: np.ndarray, in_context: np.ndarray, offsets: np.ndarray, longest: int = 15
) -> Span:
    """One question's: the most probable [start, end] of at most `longest` tokens of the context, in characters."""
    # The first token competes: a model that knows no answer points there.
    candidates = in_context.astype(bool).copy()
    candidates[0] = True
    starts, ends = (softmax(np.where(candidates, side.astype(np.float32), -10000.0)) for side in (start, end))
    starts[~in_context.astype(bool)] = ends[~in_context.astype(bool)] = 0
    scores = np.tril(np.triu(np.outer(starts, ends)), longest - 1)
    first, last = np.unravel_index(scores.argmax(), scores.shape)
    if not scores[first, last] > 0:
        return Span(0.0, 0, 0)
    return Span(float(scores[first, last]), int(offsets[first, 0]), int(offsets[last, 1]))
