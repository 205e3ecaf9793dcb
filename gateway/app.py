"""The gateway's ASGI application.

A route is a function `async def route(request: Request) -> Response`. It finds what it needs in
`gateway_of(request)`, and raises ApiError or lets Triton's grpc.RpcError through. ROUTES lists all of them.
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

from gateway import front_page
from gateway.admission import METRICS_PATH, Admission
from gateway.chat import chat
from gateway.completions import completions
from gateway.config import Config
from gateway.context import Gateway, gateway_of
from gateway.counters import Counters
from gateway.embeddings import embeddings
from gateway.inference import Inference
from gateway.model_list import list_models, show_model
from gateway.monitoring import Monitoring
from gateway.ranking import classify, rerank
from gateway.replicas import Replicas
from gateway.routes import Routes
from gateway.served_systems import Served
from gateway.short_requests import ShortRequests
from gateway.try_it import try_it
from scripts.common.certificate import expiry
from scripts.common.settings import Settings


async def health(request: Request) -> Response:
    return PlainTextResponse("ok\n")


async def metrics(request: Request) -> Response:
    """Return what GATEWAY_METRICS_PORT serves, in the format that the client asks for."""
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(gateway_of(request).counters.registry), media_type=media_type)


# Each path once; the path is the label `route` of the metrics.
ROUTES = [
    Route("/health", health),
    Route(METRICS_PATH, metrics),
    Route("/", front_page.index),
    *(Route(f"/{name}", front_page.asset) for name in front_page.MEDIA_TYPES),
    Route("/reports/{name}", front_page.report),
    Route("/try/{system}", try_it, methods=["POST"]),
    Route("/v1/models", list_models),
    Route("/v1/models/{model:path}", show_model),
    Route("/v1/embeddings", embeddings, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/chat/completions", chat, methods=["POST"]),
    Route("/v1/rerank", rerank, methods=["POST"]),
    Route("/v1/classify", classify, methods=["POST"]),
]


def build(config: Config, settings: Settings | None = None) -> Admission:
    """Return the application. Its lifespan opens and closes the connections to Triton."""
    counters = Counters()
    if config.tls:
        counters.certificate_expires(expiry(config.tls[0]))
    settings = settings or Settings()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        inference = Inference(config.triton, config.limits.timeout)
        short_requests = (
            ShortRequests(config.triton_http, inference, config.limits.timeout) if config.triton_http else None
        )
        app.state.gateway = Gateway(
            config, inference, short_requests, Served(config, inference), Monitoring(settings), counters
        )
        clients = [inference.use, *([short_requests.use] if short_requests else [])]
        watch = asyncio.create_task(Replicas(config.triton.rpartition(":")[0], clients).watch())
        try:
            yield
        finally:
            watch.cancel()
            await inference.close()
            if short_requests:
                short_requests.close()

    # Starlette's own routing and middleware would cost as much time as the rest: it only runs the lifespan.
    return Admission(Starlette(lifespan=lifespan), Routes(ROUTES), config, counters)
