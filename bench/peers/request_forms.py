"""The form of a request and of its response for each kind of server: one text in, one vector out."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from loadtest.encoding import HttpRequest, http_request
from loadtest.examples import Tensor

DIMENSIONS = 384
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class RequestForm:
    path: str
    body: Callable[[str], bytes]
    vector: Callable[[bytes], Any]  # the vector in the body of a response
    headers: Callable[[str], dict[str, str]] = field(default=lambda text: JSON)


def triton_request(text: str) -> HttpRequest:
    data = text.encode()
    tensor = Tensor("input_text", "BYTES", [1, 1], len(data).to_bytes(4, "little") + data)
    return http_request([tensor], ["output__0"])


def triton_headers(text: str) -> dict[str, str]:
    length = triton_request(text).header_length
    return {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(length)}


def openai_form(path: str, model: str) -> RequestForm:
    return RequestForm(
        path,
        lambda text: json.dumps({"model": model, "input": [text], "encoding_format": "base64"}).encode(),
        lambda body: np.frombuffer(base64.b64decode(json.loads(body)["data"][0]["embedding"]), np.float32),
    )


FORMS = {
    # The servers whose source is in this folder.
    "embed": RequestForm(
        "/embed",
        lambda text: json.dumps({"text": text}).encode(),
        lambda body: json.loads(body)["embedding"],
    ),
    "openai": openai_form("/embeddings", "model"),
    "gateway": openai_form("/v1/embeddings", "embedding"),
    "triton": RequestForm(
        "/v2/models/embedding/infer",
        lambda text: triton_request(text).body,
        lambda body: np.frombuffer(body[-DIMENSIONS * 4 :], np.float32),
        triton_headers,
    ),
}
