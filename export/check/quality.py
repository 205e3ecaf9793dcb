"""Measure what a cheaper graph changes in the answers that matter: neighbours, labels, and the order of results."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

NEIGHBOURS = 10
EQUAL = 1e-6  # cosines that differ less are equal
DOCUMENTS = 24  # that are ranked for each query
# The share of neighbours and of labels, and Kendall's tau, that must stay.
MIN_NEIGHBOURS, MIN_LABELS, MIN_TAU = 0.99, 0.998, 0.99


@dataclass(frozen=True)
class Quality:
    """The part of the answers that stays, what it is a part of, and the least that is accepted."""

    share: float
    noun: str
    bound: float
    facts: dict[str, float] = field(default_factory=dict)  # for the record

    @property
    def holds(self) -> bool:
        return self.share >= self.bound

    @property
    def allowed_loss(self) -> float:
        """Return how much may be lost, as a part of what is lost."""
        return (1 - self.bound) / (1 - self.share)

    @property
    def label(self) -> str:
        """Return the quality for a metric's label and the pages that show it."""
        return f"{self.share:.2%} of {self.noun}"

    @property
    def details(self) -> str:
        """Return the other facts, for people."""
        _, *others = self.facts.items()
        return "".join(f", {name.removeprefix('int8_').replace('_', ' ')} {value:.4f}" for name, value in others)


def measure_quality(task: str, activation: str, expected: list[np.ndarray], actual: list[np.ndarray]) -> Quality:
    """Compare the outputs of two encoders for the same texts, which have rows for each text."""
    pair = before, after = np.concatenate(expected), np.concatenate(actual)
    if task == "text-ranking" or before.shape[1] == 1:
        count = DOCUMENTS if task == "text-ranking" else len(before)
        rankings = (array.reshape(-1, count, array.shape[1]).swapaxes(1, 2).reshape(-1, count) for array in pair)
        tau = float(np.mean([kendall(a, b) for a, b in zip(*rankings, strict=True)]))
        return Quality(tau, "the order (Kendall's tau)", MIN_TAU, {"int8_tau": tau})
    if task.endswith("classification"):
        from serving.encoders.answers import activate

        labels = float((before.argmax(axis=1) == after.argmax(axis=1)).mean())
        change = float(np.abs(activate(before, activation) - activate(after, activation)).max())
        return Quality(labels, "labels", MIN_LABELS, {"int8_labels": labels, "int8_probability_change": change})
    share = kept_neighbours(before, after)
    facts = {"int8_neighbours": share, "int8_rank_correlation": rank_correlation(before, after)}
    return Quality(share, "neighbours", MIN_NEIGHBOURS, facts)


def kept_neighbours(expected: np.ndarray, actual: np.ndarray) -> float:
    """Return the share of the nearest neighbours of each vector, by cosine, that stay its neighbours.

    Of texts that the model does not tell apart, such as those of unknown letters, each is as near as the others.
    """
    before, after = (similarities(vectors) for vectors in (expected, actual))
    count = min(NEIGHBOURS, len(expected) - 1)
    for cosines in (before, after):
        np.fill_diagonal(cosines, -np.inf)  # a vector is no neighbour of its own
    farthest = np.partition(before, -count)[:, [-count]]
    found = np.take_along_axis(before, np.argpartition(after, -count)[:, -count:], axis=1)
    return float((found >= farthest - EQUAL).mean())


def similarities(vectors: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = vectors / np.maximum(norms, np.finfo(vectors.dtype).tiny)
    return vectors @ vectors.T


def rank_correlation(expected: np.ndarray, actual: np.ndarray) -> float:
    """Return Spearman's correlation of the similarities of all pairs of vectors."""
    pairs = np.triu_indices(len(expected), 1)
    ranks = [similarities(vectors)[pairs].argsort(kind="stable").argsort() for vectors in (expected, actual)]
    return float(np.corrcoef(np.stack(ranks))[0, 1])


def kendall(expected: np.ndarray, actual: np.ndarray) -> float:
    """Return Kendall's tau of two scores of the same texts: 1 if they rank them alike, -1 if in the opposite order."""
    pairs = np.triu_indices(len(expected), 1)
    signs = [np.sign(scores[:, None] - scores)[pairs] for scores in (expected, actual)]
    compared = np.sqrt(np.prod([np.abs(sign).sum(dtype=float) for sign in signs]))  # without pairs of equal scores
    return float((signs[0] * signs[1]).sum() / compared) if compared else float(np.array_equal(*signs))
