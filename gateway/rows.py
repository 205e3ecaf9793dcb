"""Requests of many texts: split into as many rows as a model takes, sent a few at a time, and joined again."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import grpc
import numpy as np
import numpy.typing as npt

from gateway.api_error import ApiError, from_triton
from gateway.context import PARTS_AT_ONCE, Gateway
from gateway.inference import Outputs, Tensor
from gateway.served_systems import System
from scripts.common.kinds import TOKEN_COUNT

Result = TypeVar("Result")
Columns = Mapping[str, Sequence[str]]  # input -> the text of each row
# Up to this size, requests take the cheaper way to Triton, which cannot cancel them.
SHORT_TEXTS, SHORT_CHARACTERS = 8, 16_000
# An error names so many empty texts.
NAMED_TEXTS = 10


async def infer_rows(gateway: Gateway, system: System, columns: Columns, outputs: Sequence[str]) -> list[Outputs]:
    """Return the outputs of each part of the rows, in their order.

    Ask for the number of tokens too, if the system has that output.
    """
    if TOKEN_COUNT in system.outputs:
        outputs = [*outputs, TOKEN_COUNT]
    try:
        return await _infer(gateway, system, columns, outputs)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.INVALID_ARGUMENT or "batch-size must be" not in (error.details() or ""):
            raise from_triton(error, system.name) from None
    # The model was loaded again with a smaller max_batch_size.
    gateway.served.forget(system.name)
    try:
        return await _infer(gateway, await gateway.served.find(system.name, system.kind), columns, outputs)
    except grpc.RpcError as error:
        raise from_triton(error, system.name) from None


async def _infer(gateway: Gateway, system: System, columns: Columns, outputs: Sequence[str]) -> list[Outputs]:
    count = len(next(iter(columns.values())))
    infer = gateway.short_requests.infer if gateway.short_requests and _is_short(columns) else gateway.inference.infer
    if count <= system.max_batch:
        return [await infer(system.name, _tensors(columns, 0, count), outputs)]
    # A request asks for no more turns than there are, so that long requests take them in rotation.
    own_turns, turns = asyncio.Semaphore(PARTS_AT_ONCE), gateway.turns[system.name]

    async def part(start: int) -> Outputs:
        async with own_turns, turns:
            return await infer(system.name, _tensors(columns, start, start + system.max_batch), outputs)

    return await together(part(start) for start in range(0, count, system.max_batch))


def _is_short(columns: Columns) -> bool:
    """Return whether the rows are so few and short that to cancel them would save little."""
    texts = [text for column in columns.values() for text in column]
    return len(texts) <= SHORT_TEXTS and sum(map(len, texts)) <= SHORT_CHARACTERS


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


def joined(parts: Sequence[Outputs], name: str) -> npt.NDArray[Any]:
    """Return the rows of an output of numbers."""
    arrays = [part[name].array() for part in parts]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def token_count(parts: Sequence[Outputs]) -> int | None:
    """Return the number of tokens of all rows, or None if the model does not report it."""
    if TOKEN_COUNT not in parts[0]:
        return None
    return sum(sum(part[TOKEN_COUNT].array().ravel().tolist()) for part in parts)


def check_count(gateway: Gateway, count: int, param: str) -> None:
    """Raise ApiError if a request has no texts, or too many."""
    limit = gateway.limits.texts
    if not count:
        raise ApiError(400, f"'{param}' must not be empty.", param)
    if count > limit:
        message = f"'{param}' has {count} elements; at most {limit} are possible (GATEWAY_TEXTS)."
        raise ApiError(400, message, param, "too_many_inputs")


def check_texts(gateway: Gateway, texts: Sequence[str], param: str, is_list: bool = True) -> None:
    """Raise ApiError if a request has no texts, too many, or empty ones."""
    check_count(gateway, len(texts), param)
    if all(texts):
        return
    empty = [f"{param}[{index}]" if is_list else param for index, text in enumerate(texts) if not text]
    if len(texts) == 1:
        raise ApiError(400, f"'{empty[0]}' must not be an empty string.", empty[0])
    names = ", ".join(f"'{name}'" for name in empty[:NAMED_TEXTS])
    others = f" and {len(empty) - NAMED_TEXTS} others" if len(empty) > NAMED_TEXTS else ""
    verb = "are empty strings" if len(empty) > 1 else "is an empty string"
    message = f"{names}{others} {verb}, so none of the {len(texts)} texts was answered. Leave empty strings out."
    raise ApiError(400, message, empty[0])
