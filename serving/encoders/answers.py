"""Turns a model's outputs into labels, entities, tokens and spans, with the arithmetic of transformers' pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from serving.triton.types import Array, Tensors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ACTIVATIONS = ("softmax", "sigmoid", "tanh", "none")
SPANS_ALIGNED_TO_WORDS = 12  # as in transformers' pipeline
# The aggregation strategies of the pipeline `token-classification`. Word strategies give a word one label.
WORD_STRATEGIES = ("first", "average", "max")
STRATEGIES = ("none", "simple", *WORD_STRATEGIES)


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
        sigmoid: Array = (1 + np.tanh(logits / 2)) / 2
        return sigmoid
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


def entities(
    logits: Array,
    offsets: Array,
    special: Array,
    labels: list[str],
    strategy: str = "simple",
    inside: Array | None = None,
) -> list[Entity]:
    """Return the entities of one text, as transformers' pipeline does with this aggregation_strategy.

    `inside` marks the tokens that continue a word. The strategies of WORD_STRATEGIES give a word one label: that of its
    first token, of its mean scores, or of its most certain token.
    """
    scores = softmax(logits.astype(np.float32))
    # Lists for the tokens alone: NumPy takes ten times as long for each, and other requests wait.
    best, highest, places = scores.argmax(axis=1).tolist(), scores.max(axis=1).tolist(), offsets.tolist()
    groups: list[list[int]] = []
    for token in np.flatnonzero(special == 0).tolist():
        if groups and strategy in WORD_STRATEGIES and inside is not None and inside[token]:
            groups[-1].append(token)
        else:
            groups.append([token])
    words = [
        Entity(labels[best[tokens[0]]], highest[tokens[0]], *places[tokens[0]])
        if len(tokens) == 1
        else _labelled(scores[tokens], offsets[tokens], labels, strategy)
        for tokens in groups
    ]
    return [entity for entity in (words if strategy == "none" else _joined(words)) if entity.label != "O"]


def _labelled(scores: Array, offsets: Array, labels: list[str], strategy: str) -> Entity:
    """Return one word, or one token, with its label."""
    row = scores[0]
    if strategy == "average":
        row = scores.mean(axis=0)
    elif strategy == "max":
        row = scores[scores.max(axis=1).argmax()]
    best = int(row.argmax())
    return Entity(labels[best], float(row[best]), int(offsets[0, 0]), int(offsets[-1, 1]))


def _joined(words: list[Entity]) -> list[Entity]:
    """Join neighbours of one kind, unless a label with B- begins another entity."""
    groups: list[list[Entity]] = []
    for word in words:
        if groups and not word.label.startswith("B-") and _kind(word.label) == _kind(groups[-1][-1].label):
            groups[-1].append(word)
        else:
            groups.append([word])
    return [
        # The pipeline compares kinds without B- and I-, but returns the label without whatever precedes its first dash.
        Entity(
            group[0].label.split("-", 1)[-1],
            sum(word.score for word in group) / len(group),
            group[0].start,
            group[-1].end,
        )
        for group in groups
        if group[0].label != "O"
    ]


def _kind(label: str) -> str:
    """Return PER for B-PER, I-PER and PER."""
    return label[2:] if label[:2] in ("B-", "I-") else label


def active_dimensions(row: Array) -> tuple[Array, Array]:
    """Return the indices and weights of a sparse vector, the largest weight first."""
    ids = np.flatnonzero(row)
    ids = ids[np.argsort(-row[ids], kind="stable")]
    return ids, row[ids]


def sparse_tensors(rows: list[tuple[Array, Array]], tokenizer: Tokenizer) -> Tensors:
    """Return the tokens and weights of each text, from their ids and weights. Shorter rows end in "", -1 and 0."""
    shape = (len(rows), max((len(ids) for ids, _ in rows), default=0))
    outputs = {
        "token": np.full(shape, b"", np.object_),
        "token_id": np.full(shape, -1, np.int64),
        "weight": np.zeros(shape, np.float32),
    }
    for i, (ids, weights) in enumerate(rows):
        outputs["token"][i, : len(ids)] = [(tokenizer.id_to_token(int(token)) or "").encode() for token in ids]
        outputs["token_id"][i, : len(ids)], outputs["weight"][i, : len(ids)] = ids, weights
    return outputs


def most_probable(logits: Array, count: int) -> tuple[Array, Array]:
    """Return the indices and probabilities of each row's best, best first, for logits [rows, vocabulary]."""
    probabilities = softmax(logits.astype(np.float32))
    best = np.argsort(-probabilities, axis=1, kind="stable")[:, :count]
    return best, np.take_along_axis(probabilities, best, axis=1)


def best_answer(
    context: str, windows: list[Window], max_tokens: int, align_to_words: bool, first_token_competes: bool = True
) -> Span:
    """Return the most probable answer, with the summed score of the spans that read the same.

    The first token competes if it is one for classification: a model that knows no answer points there.
    """
    candidates: dict[str, Span] = {}
    for window in windows:
        for span in spans(window, max_tokens, align_to_words, first_token_competes):
            text = context[span.start : span.end].lower()
            first = candidates.get(text, span._replace(score=0.0))
            candidates[text] = first._replace(score=first.score + span.score)
    return max(candidates.values(), key=lambda span: span.score, default=Span(0.0, 0, 0))


def spans(window: Window, max_tokens: int, align_to_words: bool, first_token_competes: bool) -> Iterator[Span]:
    """Yield the most probable spans of a window, best first: several may be parts of the same words."""
    in_context = window.in_context.astype(bool)
    candidates = in_context.copy()
    candidates[0] |= first_token_competes
    starts, ends = (
        np.where(in_context, softmax(np.where(candidates, logits.astype(np.float32), -10000.0)), 0)
        for logits in (window.start_logits, window.end_logits)
    )
    # scores[first, further]: a matrix of all pairs of tokens would be many times as large.
    scores = np.zeros((len(starts), min(max_tokens, len(starts))), np.float32)
    for further in range(scores.shape[1]):
        scores[: len(starts) - further, further] = starts[: len(starts) - further] * ends[further:]
    count = min(SPANS_ALIGNED_TO_WORDS if align_to_words else 1, scores.size)
    best = np.argpartition(-scores, count - 1, axis=None)[:count]
    for index in best[np.argsort(-scores.flat[best], kind="stable")]:
        first, further = divmod(int(index), scores.shape[1])
        if (score := float(scores[first, further])) > 0:
            start, end = window.offsets[first, 0], window.offsets[first + further, 1]
            words = window.word_offsets[first, 0], window.word_offsets[first + further, 1]
            if align_to_words and min(words) >= 0:
                start, end = words
            yield Span(score, int(start), int(end))
