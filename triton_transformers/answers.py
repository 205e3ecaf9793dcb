"""Compare two answers to the same request. Each caller has its own limits.

serving/engines/choice.py has the same rules for inside Triton, where this package is absent.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]


def difference(expected: npt.ArrayLike, actual: npt.ArrayLike, scale: float = 0.0) -> float:
    """Return the largest difference between numbers, as a share of the scale: by default the largest expected one.

    The difference is infinite if the shapes differ, or if a number is not finite.
    """
    a, b = np.asarray(expected, float), np.asarray(actual, float)
    if a.shape != b.shape:
        return float("inf")
    distance = float(np.nan_to_num(np.abs(a - b), nan=np.inf).max(initial=0.0))
    return distance / (scale or largest([a]))


def largest(answers: list[Array]) -> float:
    """Return the largest number of these answers without its sign, or 1 if there is none above 0."""
    return max((float(np.abs(answer).max(initial=0.0)) for answer in answers), default=0.0) or 1.0


def smallest_cosine(expected: npt.ArrayLike, actual: npt.ArrayLike) -> float:
    """Return the smallest cosine between two rows."""
    return float(cosines(expected, actual).min(initial=1.0))


def cosines(expected: npt.ArrayLike, actual: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the cosine of each two rows; rows of one number have no direction, so they are one vector."""
    a, b = np.asarray(expected, float), np.asarray(actual, float)
    if a.shape != b.shape:
        return np.array([-1.0])
    if not a.size:
        return np.array([])
    count = len(a) if a.ndim > 1 and a[0].size > 1 else 1
    a, b = a.reshape(count, -1), b.reshape(count, -1)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    found = np.divide((a * b).sum(axis=1), norms, out=(a == b).all(axis=1).astype(float), where=norms != 0)
    return np.asarray(np.nan_to_num(found, nan=-1.0))
