"""Responses with JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response


def json_response(answer: Any) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
