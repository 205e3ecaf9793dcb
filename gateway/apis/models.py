"""The list of systems, in the form of each API's clients."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.edge.bodies import json_response
from gateway.edge.errors import ErrorForm, anthropic_form, cohere_form, not_found
from gateway.edge.routes import api
from gateway.triton.context import Gateway, gateway_of
from gateway.triton.served import System


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

ROUTES = [
    *api("/v1/models /models", list_models, error_form=None, method="GET"),
    *api("/v1/models/{model:path}", list_models, error_form=None, method="GET"),
]
