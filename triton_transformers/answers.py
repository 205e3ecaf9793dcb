"""Compare two answers to the same request, within the limits of each use.

What compares answers as JSON imports the standard library only: `make smoke` runs in an environment without numpy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Limits:
    """How far two answers may differ and still be alike."""

    difference: float = math.inf  # the largest of two numbers, as a share of the largest number of the output
    cosine: float = -1.0  # the smallest of two vectors
    # Texts and whole numbers (labels, ranks, positions) are equal or not, and jump where other numbers differ a little.
    equal_texts: bool = True
    whole: int = 0  # the largest difference of two whole numbers, if they are compared

    def allow(self, cosine: float, difference: float) -> bool:
        return cosine >= self.cosine and difference <= self.difference


# The use of a comparison, and what is compared -> its limits. A row for each use, so that none loosens with another.
LIMITS = {
    # `make models`: what is served in this type, and the original in float32.
    ("original", "float32"): Limits(1e-3),
    ("original", "float16"): Limits(2e-2),
    ("original", "bfloat16"): Limits(1e-1),
    ("original", "gpt2"): Limits(1e-4),  # sums in fp32 depend on their order
    ("original", "onnx-int8"): Limits(cosine=0.9),
    # The server: an engine and ONNX Runtime, and texts without padding and with it, which two kernels in half precision
    # compute. `make tune`: another configuration and yours.
    ("engine", "graph"): Limits(0.03, 0.9999),
    ("engine", "flat"): Limits(0.03, 0.9995),
    ("tune", ""): Limits(0.03, 0.9999),
    # `make smoke`: a request beside others, and the same one alone.
    ("batch", ""): Limits(1e-2),  # models of the user's own
    ("batch", "float32"): Limits(1e-3),
    ("batch", "float16"): Limits(2e-2, equal_texts=False),
    ("batch", "bfloat16"): Limits(1e-1, equal_texts=False),
    ("batch", "onnx-int8"): Limits(0.5, equal_texts=False),  # scales the activations of a run by the largest of all
    ("batch", "int8"): Limits(0.2, equal_texts=False),  # equal on the CPUs measured; rounding amplifies any difference
    ("batch", "neuron"): Limits(0.1, equal_texts=False),  # it may compute in bfloat16
    ("batch", "exact"): Limits(1e-2),  # pipelines and models that generate: in float32, and in less
    ("batch", "inexact"): Limits(1e-2, equal_texts=False),
    # The kernels that bf16 takes for one row and for many round differently: measured on MiniLM, 3e-3.
    ("batch", "bf16"): Limits(3e-2, equal_texts=False),
    # `make smoke`: a request alone, and what `make models` saw, on another engine or machine.
    ("seen", "float32"): Limits(1e-2),
    ("seen", "float16"): Limits(2e-2, equal_texts=False),
    ("seen", "bfloat16"): Limits(1e-1, equal_texts=False),
    ("seen", "onnx-int8"): Limits(0.5, equal_texts=False),
    ("seen", "int8"): Limits(0.2, equal_texts=False),
    ("seen", "exact"): Limits(1e-2, whole=1),  # corners of boxes are rounded
    ("seen", "inexact"): Limits(1e-1, equal_texts=False),
    ("seen", "bf16"): Limits(3e-2, equal_texts=False),
    # `make bench`: a served model and its library, the vectors of other servers and the reference, ways to run texts.
    ("architectures", "float32"): Limits(1e-3),
    ("architectures", "float16"): Limits(0.03, equal_texts=False),
    ("architectures", "bfloat16"): Limits(0.1, equal_texts=False),
    ("architectures", "onnx-int8"): Limits(0.5, equal_texts=False),
    ("peers", ""): Limits(cosine=0.999),
    ("peers", "int8"): Limits(cosine=0.9),  # as ("original", "onnx-int8")
    ("gpu", ""): Limits(cosine=0.95),  # two kernels in half precision, at the depth of models with random weights
    # Drills: vectors that come from a busy server, whose engines differ in the last digits between batches.
    ("load", ""): Limits(cosine=0.99),
}


def limits(use: str, precision: str, engines: Iterable[str] = ()) -> Limits:
    """Return the limits for a system in this precision, whose models run on these engines."""
    own = LIMITS[use, precision]
    if not any("bf16" in engine or "bfloat16" in engine for engine in engines):
        return own
    return replace(own, difference=max(own.difference, LIMITS[use, "bf16"].difference), equal_texts=False)


# --- answers as JSON --------------------------------------------------------------------------------------------------

Outputs = dict[str, list[Any]]  # the elements of each output that belong to one row
# How an image (PNG) and a sound (WAV) in base64 begin.
FILES = PNG, _ = "iVBORw0KGgo", "UklGR"
PADDING = {"", -1, 0}  # of outputs whose rows differ in length
KEPT = 2048  # elements of an output in examples.json, which has the beginning of longer ones


class Difference(NamedTuple):
    """How far an output of a row is from the expected one."""

    size: float = 0.0  # as a share of the output's largest number; infinite for others
    row: int = 0
    words: str = ""


def largest_difference(expected: Sequence[Outputs], actual: Sequence[Outputs], own: Limits) -> Difference:
    """Return the largest difference of all rows. An answer with more elements than the expected one ends in padding."""
    worst = Difference()
    scales = {
        name: max((abs(x) for outputs in expected for x in outputs.get(name, ()) if isinstance(x, float)), default=0.0)
        for name in dict.fromkeys(name for outputs in expected for name in outputs)
    }
    for row, pair in enumerate(zip(expected, actual, strict=True)):
        before, after = in_one_order(*pair)
        for name, values in before.items():
            size, words = difference_of(values, after.get(name, []), scales[name] or 1.0, own)
            if not size <= worst.size:
                worst = Difference(size, row, f"{name} {words}")
    return worst


def in_one_order(expected: Outputs, actual: Outputs) -> tuple[Outputs, Outputs]:
    """Sort the weights of sparse vectors by token: their order in an answer depends on the last digit of a weight."""
    if not expected.keys() & actual.keys() >= {"token", "token_id", "weight"}:
        return expected, actual
    weights = [dict(zip(outputs["token_id"], outputs["weight"], strict=True)) for outputs in (expected, actual)]
    ids = sorted(weights[0].keys() | weights[1].keys())
    first, second = (
        {name: values for name, values in outputs.items() if name not in ("token", "token_id")}
        | {"weight": [own.get(id, 0.0) for id in ids]}
        for outputs, own in zip((expected, actual), weights, strict=True)
    )
    return first, second


def difference_of(expected: list[Any], actual: list[Any], scale: float, own: Limits) -> tuple[float, str]:
    """Return the largest difference between the elements of an output, and words for it."""
    is_whole = len(expected) != KEPT
    if len(actual) < len(expected) or (is_whole and not PADDING.issuperset(actual[len(expected) :])):
        return math.inf, f"has {len(actual)} elements instead of {len(expected)}"
    largest = 0.0
    for a, b in zip(expected, actual, strict=False):
        if isinstance(a, float) and isinstance(b, float | int):
            size = abs(a - b) / scale
            largest = math.inf if math.isnan(size) else max(largest, size)
        elif own.equal_texts and not is_equal(a, b, own.whole):
            return math.inf, f"is {shortened(b)} instead of {shortened(a)}"
    return largest, f"differs by {largest:.2g} of its largest value"


def is_equal(expected: Any, actual: Any, whole: int) -> bool:
    """Return whether two texts or whole numbers are equal. Of a file, examples.json keeps the beginning only."""
    if expected in FILES:
        return str(actual).startswith(expected)
    are_whole = type(expected) is type(actual) is int
    return abs(expected - actual) <= whole if are_whole else bool(expected == actual)


def shortened(value: Any) -> str:
    text = str(value)
    return f"'{text}'" if len(text) < 30 else f"'{text[:27]}...'"


def leaves(value: Any) -> list[Any]:
    """Return the numbers and texts of a pipeline's answer in order, with the names and lengths that hold them."""
    if isinstance(value, dict):
        return [leaf for name in sorted(value) for leaf in (name, *leaves(value[name]))]
    if isinstance(value, list):
        return [len(value), *(leaf for part in value for leaf in leaves(part))]
    return [value]


# --- answers as arrays ------------------------------------------------------------------------------------------------


def difference(expected: npt.ArrayLike, actual: npt.ArrayLike, scale: float = 0.0) -> float:
    """Return the largest difference between numbers, as a share of the scale: by default the largest expected one.

    The difference is infinite if the shapes differ, or if a number is not finite.
    """
    import numpy as np

    a, b = np.asarray(expected, float), np.asarray(actual, float)
    if a.shape != b.shape:
        return float("inf")
    distance = float(np.nan_to_num(np.abs(a - b), nan=np.inf).max(initial=0.0))
    return distance / (scale or largest([a]))


def largest(answers: list[Array]) -> float:
    """Return the largest number of these answers without its sign, or 1 if there is none above 0."""
    return max((float(abs(answer).max(initial=0.0)) for answer in answers), default=0.0) or 1.0


def smallest_cosine(expected: npt.ArrayLike, actual: npt.ArrayLike) -> float:
    """Return the smallest cosine between two rows."""
    return float(cosines(expected, actual).min(initial=1.0))


def cosines(expected: npt.ArrayLike, actual: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the cosine of each two rows; rows of one number have no direction, so they are one vector."""
    import numpy as np

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


def agreement(expected: Sequence[dict[str, Array]], actual: Sequence[dict[str, Array]]) -> dict[str, float]:
    """Return the share of equal labels, or the smallest cosine and the mean of an answer with another format's.

    Answers of one number are compared as one vector, because a number has no direction.
    """
    import numpy as np

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
