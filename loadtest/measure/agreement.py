"""Compare the answers of a system in several formats, to the requests that the users send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from triton_transformers.answers import cosines

# How many of the users' requests are compared, one at a time: the slowest formats answer a few per second.
REQUESTS = 64

Answer = dict[str, Any]  # output -> its array


def agreement(expected: Sequence[Answer], actual: Sequence[Answer]) -> dict[str, float]:
    """Return the share of equal labels, or the smallest cosine and the mean of an answer with another format's.

    Answers of one number are compared as one vector, because a number has no direction.
    """
    if "label" in expected[0]:
        pairs = zip(expected, actual, strict=True)
        same = [np.array_equal(before["label"], after["label"]) for before, after in pairs]
        return {"equal_labels": float(np.mean(same))}
    nearness = []
    for name in [name for name, array in expected[0].items() if array.dtype.kind == "f"]:
        before, after = ([answer[name] for answer in answers] for answers in (expected, actual))
        if all(array.size == 1 for array in before):
            before, after = [np.ravel(before)], [np.ravel(after)]
        nearness += [cosines(*pair) for pair in zip(before, after, strict=True)]
    values = np.concatenate(nearness)
    return {"cosine_min": float(values.min()), "cosine_mean": float(values.mean())}
