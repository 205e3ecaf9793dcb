"""Compare the answers of an exported model with the original's."""

from __future__ import annotations

import numpy as np

from scripts.common.settings import UserError

Answers = list[np.ndarray]


def check_parity(original: Answers, exported: Answers, minimum: float) -> float:
    """Return the smallest cosine over the examples, or raise if it is below the minimum."""
    cosine, example = smallest_cosine(original, exported)
    if cosine < minimum:
        raise UserError(
            f"the exported model answers differently from the original: cosine {cosine:.6f} on example {example}, at "
            f"least {minimum} is required"
        )
    return cosine


def smallest_cosine(original: Answers, exported: Answers) -> tuple[float, int]:
    """Return the smallest cosine between two answers to the same example, and the example's number."""
    cosines = [_cosine(a, b) for a, b in zip(original, exported, strict=True)]
    example = int(np.argmin(cosines))
    return cosines[example], example


def _cosine(original: np.ndarray, exported: np.ndarray) -> float:
    if original.shape != exported.shape:
        raise UserError(
            f"the exported model answers differently from the original: {exported.shape} instead of {original.shape}"
        )
    a, b = original.astype(float).ravel(), exported.astype(float).ravel()
    return float(np.nan_to_num(a @ b / np.linalg.norm(a) / np.linalg.norm(b), nan=-1.0))
