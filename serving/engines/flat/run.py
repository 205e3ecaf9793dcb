"""Texts as one flat row of tokens on the device, and which texts the models of this thread run so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch

from serving.triton.types import Array, Tensors

Tensor = torch.Tensor


class NeedsPadding(Exception):
    """Raised when a model cannot run flat."""


@dataclass(frozen=True)
class FlatRun:
    """The texts of a run."""

    shape: tuple[int, int]  # with padding
    longest: int  # tokens; no text has more
    columns: Tensor  # [tokens]: the position of each token in its text
    places: Tensor  # [tokens]: the index of each token in the padded run
    starts: Tensor  # [texts + 1]: where each text begins in the row, and the end

    def flat(self, padded: Tensor) -> Tensor:
        """Return [1, tokens, ...] of [texts, length, ...]."""
        return padded.flatten(0, 1)[self.places][None]

    def padded(self, flat: Tensor) -> Tensor:
        """Return [texts, length, ...] of [1, tokens, ...]."""
        rows = flat.new_zeros(self.shape[0] * self.shape[1], *flat.shape[2:])
        rows[self.places] = flat[0]
        return rows.view(*self.shape, *flat.shape[2:])

    def present(self) -> Tensor:
        """Return whether each token of the padded run is no padding: [texts, 1, 1, length]."""
        return self.padded(torch.ones_like(self.places, dtype=torch.bool)[None])[:, None, None]


CURRENT: ContextVar[FlatRun | None] = ContextVar("flat run", default=None)


@contextmanager
def current(run: FlatRun | None) -> Iterator[None]:
    """Let models that `flatten` changed run these texts flat inside the block."""
    token = CURRENT.set(run)
    try:
        yield
    finally:
        CURRENT.reset(token)


def on_device(feed: Tensors, device: torch.device, mask: Array | None) -> tuple[dict[str, Tensor], FlatRun | None]:
    """Copy a run to the device. With its mask, also return it flat, if it may and should run so."""
    if mask is None or not should_run_flat(mask, device):
        return {name: torch.from_numpy(array).to(device) for name, array in feed.items()}, None
    places = np.flatnonzero(mask)
    parts = [*feed.values(), places % mask.shape[1], places, np.cumsum([0, *mask.sum(axis=1)])]
    # One copy for all, from memory that the system does not move, so that this thread need not wait for it.
    joined = torch.from_numpy(np.concatenate([part.ravel() for part in parts]))
    if device.type == "cuda":
        joined = joined.pin_memory().to(device, non_blocking=True)
    *tensors, columns, there, starts = joined.split([part.size for part in parts])
    run = FlatRun((len(mask), mask.shape[1]), int(mask.sum(axis=1).max()), columns, there, starts.int())
    return {name: tensor.view(mask.shape) for name, tensor in zip(feed, tensors, strict=True)}, run


def should_run_flat(mask: Array, device: torch.device) -> bool:
    """Return whether all masked tokens are after a text's last one, and whether leaving them out saves time."""
    if mask.all():
        return device.type != "cpu"  # there, attention to all texts at once is faster
    lengths = mask.sum(axis=1)
    return bool(lengths.all() and (mask == (np.arange(mask.shape[1]) < lengths[:, None])).all())
