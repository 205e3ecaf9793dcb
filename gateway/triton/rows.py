"""Send the rows of a request to a model: as many at a time as it takes, and join the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from gateway.edge.errors import ApiError
from gateway.triton.context import PARTS_AT_ONCE, Gateway
from gateway.triton.inference import Outputs
from gateway.triton.served import System
from triton_transformers.protocol import TOKEN_COUNT, TOKENIZED
from triton_transformers.tensors import Row, Tensor
from triton_transformers.triton_messages import is_too_large_batch

Result = TypeVar("Result")
Columns = Mapping[str, Sequence[Row]]  # input -> its rows


@dataclass(frozen=True)
class Answers:
    """The outputs of all rows of a request, in the parts in which Triton answered them."""

    parts: Sequence[Outputs]

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return an output of numbers, of the same shape for each row."""
        arrays = [part[name].array() for part in self.parts]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def arrays(self, name: str) -> list[npt.NDArray[Any]]:
        """Return an output of numbers for each row. The rows of a part are padded to the longest of them."""
        return [row for part in self.parts for row in part[name].array()]

    def texts(self, name: str) -> list[str]:
        return [text for part in self.parts for text in part[name].texts()]

    @property
    def token_counts(self) -> list[int] | None:
        """Return the number of tokens of each row, or None if the model does not report it."""
        return self.array(TOKEN_COUNT).ravel().tolist() if TOKEN_COUNT in self.parts[0] else None

    @cached_property
    def tokens(self) -> int | None:
        """Return the number of tokens of all rows, or None if the model does not report it."""
        counts = self.token_counts
        return None if counts is None else sum(counts)


async def infer_rows(gateway: Gateway, system: System, columns: Columns, outputs: Sequence[str]) -> Answers:
    """Return the outputs of the rows. Count their tokens, if the system reports the number."""
    if TOKEN_COUNT in system.outputs and [*outputs] != [TOKENIZED]:
        outputs = [*outputs, TOKEN_COUNT]
    try:
        parts = await _infer(gateway, system, columns, outputs)
    except ApiError as error:
        if error.status != 400 or not is_too_large_batch(error.message):
            raise
        # The model was loaded again with a smaller max_batch_size.
        gateway.served.forget(system.name)
        parts = await _infer(gateway, await gateway.served.find(system.name), columns, outputs)
    return counted(gateway, parts)


def counted(gateway: Gateway, parts: Sequence[Outputs]) -> Answers:
    """Return the answers, and count their tokens."""
    answers = Answers(parts)
    gateway.counters.tokens(answers.tokens or 0)
    return answers


async def _infer(gateway: Gateway, system: System, columns: Columns, outputs: Sequence[str]) -> list[Outputs]:
    count = len(next(iter(columns.values())))
    if count <= system.max_batch:
        return [await gateway.infer(system, _tensors(columns, 0, count), outputs)]
    # A request asks for no more turns than there are, so that long requests take them in rotation.
    own_turns, turns = asyncio.Semaphore(PARTS_AT_ONCE), gateway.turns[system.name]

    async def part(start: int) -> Outputs:
        async with own_turns, turns:
            return await gateway.infer(system, _tensors(columns, start, start + system.max_batch), outputs)

    return await together(part(start) for start in range(0, count, system.max_batch))


def _tensors(columns: Columns, start: int, end: int) -> list[Tensor]:
    rows = {name: texts[start:end] for name, texts in columns.items()}
    return [Tensor.from_texts(name, texts, [len(texts), 1]) for name, texts in rows.items()]


async def together(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return the results of all. If one fails, cancel the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
