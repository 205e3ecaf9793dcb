"""The gateway's ASGI application.

A route is a function `async def route(request: Request) -> Response`. It finds what it needs in
`gateway_of(request)`, and raises ApiError. ROUTES lists all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from gateway.apis import audio, cohere, cohere_chat, hugging_face, messages, moderations, responses, vllm
from gateway.apis import tei as tei_api
from gateway.apis.completions import chat, completions
from gateway.edge.admission import METRICS_PATH, Admission
from gateway.edge.bodies import FILE_BODY, FORM_BODY, json_response
from gateway.edge.config import Config
from gateway.edge.counters import Counters
from gateway.edge.errors import ErrorForm, anthropic_form, cohere_form, not_found, openai_form, tei_form
from gateway.edge.monitoring import Monitoring
from gateway.edge.routes import ApiRoute, Endpoint, Routes
from gateway.page import boxes, front
from gateway.triton.context import Gateway, gateway_of
from gateway.triton.inference import Inference
from gateway.triton.served import Served, System
from triton_transformers.certificate import expiry
from triton_transformers.settings import Settings


async def health(request: Request) -> Response:
    return PlainTextResponse("ok\n")


async def metrics(request: Request) -> Response:
    """Return what GATEWAY_METRICS_PORT serves, in the format that the client asks for."""
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(gateway_of(request).counters.registry), media_type=media_type)


async def list_models(request: Request) -> Response:
    """Return the systems that a route answers for, with their adapters, or the one that the path names.

    The clients of each API get its own form, which their errors have, too.
    """
    gateway = gateway_of(request)
    models: dict[str, tuple[System, str]] = {}  # with the adapter
    for system in await gateway.served.systems():
        if gateway.served.routes_of(system):
            models[system.name] = system, ""
        models |= {f"{system.name}:{adapter}": (system, adapter) for adapter in system.adapters}
    entry, listing = MODEL_FORMS.get(request.scope["request_state"].error_form, (openai_model, openai_models))
    if (name := request.path_params.get("model")) is None:
        return json_response(listing([entry(gateway, id, *model) for id, model in models.items()], request))
    if name not in models:
        await gateway.served.find(name)  # raises ApiError 503 for a system that is not loaded now
        raise not_found(name)
    return json_response(entry(gateway, name, *models[name]))


def openai_model(gateway: Gateway, id: str, system: System, adapter: str) -> dict[str, Any]:
    # OpenAI's clients require a time of creation, which Triton does not know.
    parent = {"parent": system.name} if adapter else {}
    return {"id": id, "object": "model", "created": int(gateway.started), "owned_by": "triton-transformers"} | parent


def openai_models(models: list[dict[str, Any]], request: Request) -> dict[str, Any]:
    return {"object": "list", "data": models}


def anthropic_model(gateway: Gateway, id: str, system: System, adapter: str) -> dict[str, Any]:
    created = datetime.datetime.fromtimestamp(int(gateway.started), datetime.UTC)
    return {"type": "model", "id": id, "display_name": id, "created_at": created, "lifecycle": "active"}


def anthropic_models(models: list[dict[str, Any]], request: Request) -> dict[str, Any]:
    first, last = (models[0]["id"], models[-1]["id"]) if models else (None, None)
    return {"data": models, "has_more": False, "first_id": first, "last_id": last}


def cohere_model(gateway: Gateway, id: str, system: System, adapter: str) -> dict[str, Any]:
    names = {"chat": "chat", "embedding": "embed", "rerank": "rerank"}
    return {"name": id, "endpoints": [name for ability, name in names.items() if system.can([ability])]}


def cohere_models(models: list[dict[str, Any]], request: Request) -> dict[str, Any]:
    endpoint = request.query_params.get("endpoint")
    return {"models": [model for model in models if endpoint in (None, *model["endpoints"])]}


MODEL_FORMS: Mapping[ErrorForm, tuple[Callable[..., dict[str, Any]], Callable[..., dict[str, Any]]]] = {
    anthropic_form: (anthropic_model, anthropic_models),
    cohere_form: (cohere_model, cohere_models),
}


def api(
    paths: str,
    endpoint: Endpoint,
    abilities: str = "",
    error_form: ErrorForm | None = openai_form,
    method: str = "POST",
) -> list[ApiRoute]:
    """Return the routes of these paths. The page shows the first of them."""
    return [
        ApiRoute(path, endpoint, abilities, error_form, method, is_shown=number == 0)
        for number, path in enumerate(paths.split())
    ]


def tei(path: str, endpoint: Endpoint, abilities: str = "", method: str = "POST") -> list[ApiRoute]:
    """Return the routes of a path of TEI's API: for the only system of its kind, and for a named one."""
    return api(f"{path} /models/{{model}}{path}", endpoint, abilities, tei_form, method)


# Each path and method once; the path is the label `route` of the metrics.
ROUTES = [
    *api("/v1/models /models", list_models, error_form=None, method="GET"),
    *api("/v1/models/{model:path}", list_models, error_form=None, method="GET"),
    *api("/v1/embeddings /embeddings", vllm.embeddings, "embedding sparse multi"),
    *api("/v1/completions", completions, "generation"),
    *api("/v1/chat/completions", chat, "chat"),
    *api("/v1/responses", responses.responses, "chat"),
    *api("/v1/messages", messages.messages, "chat", anthropic_form),
    *api("/v1/messages/count_tokens", messages.count_tokens, "", anthropic_form),
    ApiRoute("/v1/audio/transcriptions", audio.transcriptions, "transcription", body=FORM_BODY),
    ApiRoute("/v1/audio/translations", audio.translations, "translation", body=FORM_BODY),
    *api("/v1/audio/speech", audio.speech, "speech"),
    # Not every classifier moderates, so the page does not show it.
    ApiRoute("/v1/moderations", moderations.moderate, "classify", is_shown=False),
    *api("/v1/rerank /rerank", vllm.rerank, "rerank"),
    *api("/v1/classify /classify", vllm.classify, "classify"),
    *api("/v1/score /score", vllm.score, "rerank embedding"),
    *api("/pooling", vllm.pooling, "embedding multi classify"),
    *api("/tokenize", vllm.tokenize, "tokens"),
    *api("/detokenize", vllm.detokenize, "tokens"),
    *api("/v2/chat", cohere_chat.chat_v2, "chat", cohere_form),
    *api("/v1/chat", cohere_chat.chat_v1, "chat", cohere_form),
    *api("/v2/embed", cohere.embed_v2, "embedding", cohere_form),
    *api("/v1/embed", cohere.embed_v1, "embedding", cohere_form),
    *api("/v2/rerank", cohere.rerank, "rerank", cohere_form),
    *tei("/embed", tei_api.embed, "embedding"),
    *tei("/embed_sparse", tei_api.embed_sparse, "sparse"),
    *tei("/embed_all", tei_api.embed_all, "multi"),
    *tei("/predict", tei_api.predict, "classify"),
    *tei("/similarity", tei_api.similarity, "embedding"),
    # The page shows /tokenize and /detokenize.
    ApiRoute("/models/{model}/tokenize", tei_api.tokenize, "tokens", tei_form, is_shown=False),
    *(
        ApiRoute(path, tei_api.decode, "tokens", tei_form, is_shown=False)
        for path in ("/decode", "/models/{model}/decode")
    ),
    *tei("/info", tei_api.info, method="GET"),
    ApiRoute("/models/{model}/health", tei_api.health, error_form=tei_form, method="GET"),
    ApiRoute("/models/{model}/rerank", vllm.rerank, error_form=tei_form),
    *api("/", tei_api.any_task, "", tei_form),
    ApiRoute(
        "/models/{model}",
        hugging_face.answer,
        error_form=tei_form,
        body=FILE_BODY,
        answers_for=hugging_face.is_only_route,
    ),
    *api("/models/{model}/v1/completions", hugging_face.text_completions),
    *api("/models/{model}/v1/chat/completions /models/{model}/chat/completions", hugging_face.chat),
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
