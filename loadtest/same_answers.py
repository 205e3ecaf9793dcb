"""The server's answers to a few requests, to see whether another configuration changes them."""

from __future__ import annotations

import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from tritonclient.http import InferResult

from loadtest.examples import http_request
from triton_transformers.answers import difference, smallest_cosine
from triton_transformers.http import opener
from triton_transformers.settings import UserError
from triton_transformers.tensors import Tensor

REQUESTS = 12
TIMEOUT_S = 120
# As the server itself compares engines (docs/backends.md).
MINIMUM_COSINE, MAXIMUM_DIFFERENCE = 0.9999, 0.03


@dataclass
class Answers:
    """The answers of the original configuration, which is loaded when this is created."""

    url: str
    model: str
    requests: list[list[Tensor]]
    expected: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        step = max(1, len(self.requests) // REQUESTS)
        self.requests = self.requests[::step][:REQUESTS]
        try:
            self.expected = [self.ask(request) for request in self.requests]
        except (OSError, ValueError) as error:
            raise UserError(f"'{self.model}' refuses an example request: {error}. See `make logs`") from None

    def difference(self) -> str:
        """Return how the answers now differ from those of the original configuration, or nothing."""
        for request, expected in zip(self.requests, self.expected, strict=True):
            try:
                actual = self.ask(request)
            except (OSError, ValueError) as error:
                return f"a request failed: {error}"
            for name, array in expected.items():
                if reason := differs(actual.get(name), array):
                    return f"the answers differ from those of your configuration: output '{name}' {reason}"
        return ""

    def ask(self, tensors: list[Tensor]) -> dict[str, Any]:
        """Return the outputs by name."""
        encoded = http_request(tensors)
        headers = {"Inference-Header-Content-Length": str(encoded.header_length)}
        request = urllib.request.Request(f"{self.url}/v2/models/{self.model}/infer", encoded.body, headers)
        try:
            with opener.open(request, timeout=TIMEOUT_S) as response:
                header_length = int(response.headers.get("Inference-Header-Content-Length", 0)) or None
                result = InferResult.from_response_body(response.read(), header_length=header_length)
        except urllib.error.HTTPError as error:
            raise ValueError(f"{error.code} {error.read()[:200].decode(errors='replace')}") from None
        return {output["name"]: result.as_numpy(output["name"]) for output in result.get_response()["outputs"]}


def differs(actual: Any, expected: Any) -> str:
    """Return how an output differs, or nothing."""
    if actual is None or actual.shape != expected.shape:
        return "has another shape"
    if expected.dtype.kind != "f":
        return "" if (actual == expected).all() else "has another value"
    cosine, distance = smallest_cosine(expected, actual), difference(expected, actual)
    if cosine >= MINIMUM_COSINE and distance <= MAXIMUM_DIFFERENCE:
        return ""
    return f"has a cosine of {cosine:.5f}, and differs by {distance:.1%} of its largest number"
