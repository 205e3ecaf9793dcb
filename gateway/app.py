"""The gateway's ASGI application.

A route is a function `async def route(request: Request) -> Response`. It finds what it needs in
`gateway_of(request)`, and raises ApiError. Each API lists its own in ROUTES.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from gateway.apis import (
    audio,
    cohere,
    cohere_chat,
    completions,
    hugging_face,
    messages,
    models,
    moderations,
    responses,
    tei,
    vllm,
)
from gateway.edge.admission import METRICS_PATH, Admission
from gateway.edge.config import Config
from gateway.edge.counters import Counters
from gateway.edge.monitoring import Monitoring
from gateway.edge.routes import Routes
from gateway.page import boxes, front
from gateway.triton.context import Gateway, gateway_of
from gateway.triton.inference import Inference
from gateway.triton.served import Served
from triton_transformers.certificate import expiry
from triton_transformers.settings import Settings


async def health(request: Request) -> Response:
    return PlainTextResponse("ok\n")


async def metrics(request: Request) -> Response:
    """Return what GATEWAY_METRICS_PORT serves, in the format that the client asks for."""
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(gateway_of(request).counters.registry), media_type=media_type)


# Each path and method once; the path is the label `route` of the metrics. The page shows routes in this order.
APIS = (models, completions, responses, messages, audio, moderations, vllm, cohere_chat, cohere, tei, hugging_face)
ROUTES = [
    *(route for module in APIS for route in module.ROUTES),
    Route("/health", health),
    Route(METRICS_PATH, metrics),
    Route("/", front.index),
    *(Route(f"/{name}", front.asset) for name in front.MEDIA_TYPES),
    Route("/reports/{name}", front.report),
    Route("/try/{system}", boxes.try_it, methods=["POST"]),
]


def build(config: Config, settings: Settings | None = None) -> Admission:
    """Return the application. Its lifespan opens and closes the connections to Triton."""
    counters = Counters()
    routes = Routes(ROUTES)
    if config.tls:
        counters.certificate_expires(expiry(config.tls[0]))
    settings = settings or Settings()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        inference = Inference(config.triton, config.limits.timeout)
        served = Served(config, inference, routes)
        app.state.gateway = Gateway(config, inference, served, Monitoring(settings), counters)
        watch = asyncio.create_task(inference.watch_replicas())
        try:
            yield
        finally:
            watch.cancel()
            await inference.close()

    # Starlette's own routing and middleware would cost as much time as the rest: it only runs the lifespan.
    return Admission(Starlette(lifespan=lifespan), routes, config, counters)
