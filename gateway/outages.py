"""Hold requests while Triton restarts after a crash, instead of failing them at once.

Triton's supervisor and revive.py bring it back within seconds. Until then a request waits and is sent again. The limits
of requests in flight and of their time hold meanwhile.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from gateway.api_error import ApiError, from_triton

Result = TypeVar("Result")

# How long an outage may last. Then requests fail at once, until Triton answers again.
LIMIT_S = 10.0
# The time between two attempts, on average: so short that clients hardly notice it, and so long that 256 requests take
# a tenth of a core, which Triton needs for its start.
PAUSE_S = 0.5


class Outages:
    """The newest outage of Triton."""

    def __init__(self) -> None:
        self._began = -LIMIT_S
        self._is_new = True  # whether the next failure begins an outage: Triton has answered since the last one

    async def answer(self, send: Callable[[], Awaitable[Result]]) -> Result:
        """Return the result of `send`. Call it again as long as an outage is the reason of its ApiError."""
        arrived = time.monotonic()
        while True:
            try:
                result = await answer_at_once(send)
            except ApiError as failure:
                if not self._may_pass(failure) or time.monotonic() >= arrived + LIMIT_S:
                    raise
            else:
                self._is_new = True
                return result
            await asyncio.sleep(PAUSE_S * random.uniform(0.5, 1.5))

    def _may_pass(self, failure: ApiError) -> bool:
        now = time.monotonic()
        if failure.is_outage and self._is_new:
            self._began, self._is_new = now, False
        # After a restart, Triton has no models at first.
        return (failure.is_outage or failure.code == "model_not_ready") and now < self._began + LIMIT_S


async def answer_at_once(send: Callable[[], Awaitable[Result]]) -> Result:
    """Return the result of `send`. Raise ApiError for an error of Triton."""
    try:
        return await send()
    except grpc.RpcError as error:
        raise from_triton(error) from None
