"""The state that routes share."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import cast

from starlette.requests import Request

from gateway.config import Config, Limits
from gateway.counters import Counters
from gateway.inference import Inference
from gateway.monitoring import Monitoring
from gateway.served_systems import Served

# Parts of long requests that Triton has at a time, for each model. The requests of other clients wait behind them, also
# after the client has left: docs/triton-faults.md#cancellations. Two would keep one instance busy.
PARTS_AT_ONCE = 4


def new_turns() -> asyncio.Semaphore:
    return asyncio.Semaphore(PARTS_AT_ONCE)


@dataclass
class Gateway:
    """The state that routes share: `request.app.state.gateway`, or `gateway_of(request)`."""

    config: Config
    inference: Inference
    served: Served
    monitoring: Monitoring
    counters: Counters
    started: float = field(default_factory=time.time)
    turns: defaultdict[str, asyncio.Semaphore] = field(default_factory=lambda: defaultdict(new_turns))  # by model

    @property
    def limits(self) -> Limits:
        return self.config.limits


def gateway_of(request: Request) -> Gateway:
    return cast(Gateway, request.app.state.gateway)
