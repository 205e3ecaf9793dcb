"""The state that routes share, and the steps that most of them begin with."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import cast

import grpc
from starlette.requests import Request

from gateway.edge import bodies
from gateway.edge.bodies import Body
from gateway.edge.config import Config
from gateway.edge.counters import Counters
from gateway.edge.errors import from_triton
from gateway.edge.monitoring import Monitoring
from gateway.triton.inference import Inference, Outputs
from gateway.triton.served import Served, System
from triton_transformers.tensors import Tensor

# Parts of long requests that Triton has at a time, for each model. The requests of other clients wait behind them, also
# after the client has left: TRITON-FAULTS.md#cancellations. Two would keep one instance busy.
PARTS_AT_ONCE = 4


@dataclass
class Gateway:
    """The state that routes share: `request.app.state.gateway`, or `gateway_of(request)`."""

    config: Config
    inference: Inference
    served: Served
    monitoring: Monitoring
    counters: Counters
    started: float = field(default_factory=time.time)
    turns: defaultdict[str, asyncio.Semaphore] = field(  # by model
        default_factory=lambda: defaultdict(lambda: asyncio.Semaphore(PARTS_AT_ONCE))
    )

    async def infer(self, system: System, tensors: Iterable[Tensor], outputs: Iterable[str]) -> Outputs:
        """Return these outputs of the system. Raise ApiError for an error of Triton."""
        try:
            return await self.inference.infer(system.name, tensors, outputs, system.cancellable)
        except grpc.RpcError as error:
            raise from_triton(error, system.name) from None

    async def responses(
        self, system: System, tensors: Iterable[Tensor], outputs: Iterable[str]
    ) -> AsyncGenerator[Outputs, None]:
        """Yield the responses of the system: one, unless it streams. Raise ApiError for an error of Triton."""
        if not system.streams:
            yield await self.infer(system, tensors, outputs)
            return
        try:
            async with aclosing(self.inference.stream(system.name, tensors, outputs, system.cancellable)) as stream:
                async for response in stream:
                    yield response
        except grpc.RpcError as error:
            raise from_triton(error, system.name) from None


def gateway_of(request: Request) -> Gateway:
    return cast(Gateway, request.app.state.gateway)


async def read(request: Request, struct: type[Body], *abilities: str) -> tuple[Gateway, Body, System]:
    """Return the gateway, the body, and the system that answers it. Raise ApiError if it has none of the abilities."""
    body = await bodies.read(request, struct)
    return gateway_of(request), body, await system_for(request, body, *abilities)


async def system_for(request: Request, body: object, *abilities: str) -> System:
    """Return the system that the address or the body names, or the only one that has one of the abilities."""
    served = gateway_of(request).served
    name = request.path_params.get("model", getattr(body, "model", None))
    if name is not None:
        return await served.find(name, *abilities)
    return await served.only("/" + request.scope["request_state"].route.rpartition("/")[2], *abilities)
