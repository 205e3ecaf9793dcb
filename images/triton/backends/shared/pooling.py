"""The pooling modes of sentence-transformers: one vector from the vectors of a text's tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensor = torch.Tensor


def first(tokens: Tensor, mask: Tensor) -> Tensor:
    return tokens[torch.arange(len(tokens)), mask.int().argmax(1)]


def last(tokens: Tensor, mask: Tensor) -> Tensor:
    # A row without a token gets zeros.
    return first(tokens.flip(1), mask.flip(1)) * mask.any(1, keepdim=True)


def maximum(tokens: Tensor, mask: Tensor) -> Tensor:
    return tokens.masked_fill(mask[..., None] == 0, float("-inf")).amax(1)


def mean(tokens: Tensor, weights: Tensor) -> Tensor:
    weights = weights[..., None].to(tokens.dtype)
    return (tokens * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


def mean_sqrt_len_tokens(tokens: Tensor, mask: Tensor) -> Tensor:
    return mean(tokens, mask) * mask.sum(1, keepdim=True).to(tokens.dtype).sqrt()


def weighted_mean(tokens: Tensor, mask: Tensor) -> Tensor:
    return mean(tokens, mask * torch.arange(1, mask.shape[1] + 1, device=mask.device))


MODES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": first,
    "max": maximum,
    "mean": mean,
    "mean_sqrt_len_tokens": mean_sqrt_len_tokens,
    "weightedmean": weighted_mean,
    "lasttoken": last,
}
