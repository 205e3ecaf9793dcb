"""Builds random inputs that a model accepts, to time the engines that can run it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from serving.triton.parameters import int_parameter
from serving.triton.types import Array, ModelConfig, Tensors

# The rows and tokens of the runs that packing makes of short and of long texts, and for a single client.
PACKED_SHAPES = ((16, 16), (8, 32), (2, 64), (1, 16))
TOKENS = 16  # of a free axis, which has no fixed size
AXES = 8  # the maximum number of axes of an input
ROWS = 8
CHANNELS = 3
IMAGE_SIZES = (224, 384, 256, 336, 448, 512, 518)


@dataclass(frozen=True)
class InputSpec:
    """One input of a run: its numpy type, and its dims without the rows of a batch (-1: free)."""

    dtype: type
    dims: tuple[int, ...]

    @property
    def is_image(self) -> bool:
        return len(self.dims) > 2 and np.issubdtype(self.dtype, np.floating)

    def shape(self, free: tuple[int, ...]) -> list[int]:
        """Return the dims with these sizes, which belong to the last axes, for the free axes."""
        return [size if size >= 0 else free[i] for i, size in enumerate(self.dims, len(free) - len(self.dims))]


def packed_samples(
    config: ModelConfig, inputs: dict[str, InputSpec], limits: dict[str, int]
) -> Iterator[list[Tensors]]:
    """Yield the runs that packing makes: rows of unequal length, padded on the right.

    `limits` has the number of possible values of those inputs that index a table.
    """
    random = np.random.default_rng(0)
    pad = int_parameter(config, "pad_token_id", 0)
    requested = {tensor["name"] for tensor in config["input"]}
    feeds = []
    for rows, length in PACKED_SHAPES:
        rows = min(rows, max(1, config["max_batch_size"]))
        ends = random.integers(length // 2, length, rows, endpoint=True)
        ends[0] = length
        mask = np.arange(length) < ends[:, None]
        feed = {}
        for name, spec in inputs.items():
            values = random.integers(0, limits[name], mask.shape) if name in limits else mask
            padding = pad if name == "input_ids" else 0
            feed[name] = np.where(mask, values, padding).astype(spec.dtype) * (name in requested)
        feeds.append(feed)
    yield feeds


def batch_samples(config: ModelConfig, inputs: dict[str, InputSpec], limits: dict[str, int]) -> Iterator[list[Tensors]]:
    """Yield batches, the likeliest first, because a graph does not tell which sizes of its free axes it accepts."""
    random = np.random.default_rng(0)
    rows = [min(ROWS, config["max_batch_size"])] if config["max_batch_size"] else []
    if any(spec.is_image for spec in inputs.values()):
        sizes: list[tuple[int, ...]] = [(1, CHANNELS, size, size) for size in IMAGE_SIZES]
    else:
        # Without tokens, the keys and values of a language model's past are empty.
        sizes = [(TOKENS,) * AXES, (0,) * AXES]
    for free in sizes:
        feed: Tensors = {}
        for name, spec in inputs.items():
            floating = np.issubdtype(spec.dtype, np.floating)
            shape = rows + spec.shape(free if floating else (TOKENS,) * AXES)
            values: Array = random.standard_normal(shape) if floating else np.ones(shape)
            if name in limits:
                values = random.integers(0, limits[name], shape)
            feed[name] = values.astype(spec.dtype)
        yield [feed]
