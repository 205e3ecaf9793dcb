"""Compare the answers of a served system with those of the reference library: alone, and padded in a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np

from export.catalogue import FormatUnavailable, Job, Outcome
from export.check.examples import keep_examples
from export.check.served import Tensors, served_system
from triton_transformers.answers import LIMITS, difference, largest
from triton_transformers.cli import err
from triton_transformers.protocol import TOKEN_COUNT
from triton_transformers.settings import UserError

# The tokens, padding included, of a run of examples that are padded together. Longer examples run only alone.
TOGETHER_TOKENS = 2048


@dataclass(frozen=True)
class Difference:
    """The largest difference between two answers, relative to the largest value of its tensor."""

    size: float
    example: int = 0
    tensor: str = ""

    def check(self, tolerance: float, condition: str) -> None:
        if not self.size <= tolerance:
            raise UserError(
                f"the served model answers differently from the original {condition}: '{self.tensor}' of example "
                f"{self.example} differs by {self.size:.1e} of its largest value, at most {tolerance:.0e} is allowed"
            )


@dataclass(frozen=True)
class Parity:
    """The largest differences between the served answers and the reference's."""

    examples: int
    alone: Difference
    together: Difference
    tolerance: float
    subject: str = ""  # what is compared, if it is not what is served

    def check(self) -> None:
        self.alone.check(self.tolerance, "to a request alone")
        self.together.check(self.tolerance, "to a request in a batch")

    def outcome(self, noun: str) -> Outcome:
        return Outcome(
            f"{self.subject} differs from the original by at most {self.alone.size:.0e} alone and "
            f"{self.together.size:.0e} in a batch on {self.examples} {noun} ({self.tolerance:.0e} is allowed)".lstrip(),
            {
                "parity_examples": self.examples,
                "difference_alone": self.alone.size,
                "difference_together": self.together.size,
                "tolerance": self.tolerance,
            },
        )


@contextlib.contextmanager
def of_format(form: str) -> Iterator[None]:
    """Let a graph that fails or answers differently be unavailable, as one that cannot be exported."""
    try:
        yield
    except Exception as error:  # ONNX Runtime raises anything for an operation that it cannot compute
        if form == "python" or (isinstance(error, OSError) and error.errno):  # such as a full disk
            raise
        is_sentence = isinstance(error, UserError) or type(error).__module__.startswith("serving.")
        failure = str(error) if is_sentence else type(error).__name__
        raise FormatUnavailable(f"exported to ONNX, {failure.partition(': [ONNXRuntimeError]')[0]}") from error


def measure_parity(
    job: Job,
    requests: list[Tensors],
    reference: list[Tensors],
    comparable: Callable[[Tensors], Tensors] = lambda tensors: tensors,
) -> Parity:
    """Compare the assembled system's answers with the reference's. `comparable` gives them the reference's form."""
    err.step("comparing with the original")
    alone, in_batch, dtype = serve(job, requests, {name for tensors in reference for name in tensors})
    numbers = [number for number, _ in in_batch]
    together = largest_difference([reference[i] for i in numbers], [comparable(tensors) for _, tensors in in_batch])
    return Parity(
        len(requests),
        largest_difference(reference, [comparable(tensors) for tensors in alone]),
        replace(together, example=numbers[together.example]),
        LIMITS["original", dtype].difference,
        "its fp32 graph" if job.format.endswith("int8") else "",
    )


def serve(
    job: Job, requests: list[Tensors], outputs: Collection[str]
) -> tuple[list[Tensors], list[tuple[int, Tensors]], str]:
    """Return the assembled system's tensors for each request, those in padded batches by number, and its dtype."""
    with served_system(job.system, job.folder) as served:
        keep_examples(job, served)
        served.outputs = {*outputs, TOKEN_COUNT}
        alone = served.alone(requests)
        in_batch: list[tuple[int, Tensors]] = []
        for batch in padded_batches([row_length(tensors) for tensors in alone]):
            in_batch += zip(batch, served.together([requests[i] for i in batch]), strict=True)
        return alone, in_batch, served.dtype


def row_length(tensors: Tensors) -> int:
    """Return the tokens of an example, or 1 for an image: those are not padded."""
    return int(tensors[TOKEN_COUNT].sum()) if TOKEN_COUNT in tensors else 1  # the sum of all windows


def padded_batches(lengths: list[int]) -> list[list[int]]:
    """Put long examples beside short ones, so that the short ones get much padding, within TOGETHER_TOKENS."""
    remaining = [i for i in np.argsort(lengths, kind="stable").tolist() if 2 * lengths[i] <= TOGETHER_TOKENS]
    batches = []
    while remaining:
        longest = remaining.pop()
        rows = TOGETHER_TOKENS // lengths[longest] - 1
        batches.append([longest, *remaining[:rows]])
        remaining = remaining[rows:]
    return batches


def largest_difference(expected: list[Tensors], actual: list[Tensors]) -> Difference:
    worst = Difference(0.0)
    for name in dict.fromkeys(name for tensors in expected for name in tensors):
        pairs = {
            number: (a[name], b[name]) for number, (a, b) in enumerate(zip(expected, actual, strict=True)) if name in a
        }
        scale = largest([a for a, _ in pairs.values()])
        for example, (a, b) in pairs.items():
            size = difference(a, b, scale)
            if size > worst.size:
                worst = Difference(size, example, name)
    return worst
