"""GET /v1/models and /v1/models/{model}."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.api_error import not_found
from gateway.bodies import json_response
from gateway.context import Gateway, gateway_of


async def list_models(request: Request) -> Response:
    return json_response({"object": "list", "data": await _models(gateway_of(request))})


async def show_model(request: Request) -> Response:
    name = request.path_params["model"]
    gateway = gateway_of(request)
    for model in await _models(gateway):
        if model["id"] == name:
            return json_response(model)
    await gateway.served.find(name)  # raises ApiError 503 for a system that is not loaded now
    raise not_found(name)


async def _models(gateway: Gateway) -> list[dict[str, Any]]:
    """Return the systems that have a route of OpenAI's API, as that API lists models."""
    # OpenAI's clients require a time of creation, which Triton does not know.
    created = int(gateway.started)
    return [
        {"id": system.name, "object": "model", "created": created, "owned_by": "triton-transformers"}
        for system in await gateway.served.systems()
        if system.kind != "other"
    ]
