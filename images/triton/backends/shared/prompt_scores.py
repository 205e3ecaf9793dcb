"""Score the tokens of prompts, for the option `prompt_logprobs`: how probable each is after those before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from shared.continuation import Logprobs
from shared.types import Array

# Positions that are scored together. The scores of each are a number for every token of the vocabulary.
CHUNK = 128


def logprobs_of(scores: Array, tokens: Sequence[int], count: int) -> Iterator[Logprobs]:
    """Yield the logprobs of each of these tokens, with `count` alternatives, by the row of scores at its place."""
    scores = scores - scores.max(-1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
    count = min(count, scores.shape[-1])
    for row, token in zip(scores, tokens, strict=True):
        top = np.argpartition(row, -count)[-count:] if count else np.array([], int)
        top = top[np.argsort(-row[top])]
        yield Logprobs(float(row[token]), [*zip(top.tolist(), row[top].tolist(), strict=True)])
