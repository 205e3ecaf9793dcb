"""Requests as they go over the wire. Users encode each of them once, before the load begins."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tritonclient.grpc import service_pb2

from loadtest.examples import Tensor


@dataclass(frozen=True)
class HttpRequest:
    """A KServe v2 request with binary tensors: a JSON header, then the tensors' data."""

    body: bytes
    header_length: int


@dataclass(frozen=True)
class Route:
    """A route of the gateway. `body` builds a request from the texts by the names of their tensors."""

    path: str
    answers: str  # the field of a response that holds them
    body: Callable[[dict[str, str]], dict[str, Any]]


# For each kind of system that the gateway answers for (triton_transformers/kinds.py).
ROUTES = {
    # OpenAI's own clients ask for base64.
    "embedding": Route("/v1/embeddings", "data", lambda t: {"input": t["input_text"], "encoding_format": "base64"}),
    "sparse": Route("/v1/embeddings", "data", lambda t: {"input": t["input_text"], "embedding_type": "sparse"}),
    "multi": Route("/v1/embeddings", "data", lambda t: {"input": t["input_text"], "embedding_type": "multi"}),
    "classify": Route("/v1/classify", "data", lambda t: {"input": t["input_text"]}),
    "rerank": Route("/v1/rerank", "results", lambda t: {"query": t["query"], "documents": [t["text"]]}),
    # Temperature 0 takes the most likely token, as Triton does without further inputs.
    "generation": Route("/v1/completions", "choices", lambda t: {"prompt": next(iter(t.values())), "temperature": 0}),
}


def gateway_request(model: str, kind: str, tensors: list[Tensor]) -> bytes:
    """Return the body of a request to the route of this kind."""
    body = ROUTES[kind].body({t.name: t.data[4:].decode() for t in tensors if t.datatype == "BYTES"})
    for tensor in tensors:
        if tensor.name == "max_new_tokens":
            body["max_tokens"] = int.from_bytes(tensor.data, "little")
    return json.dumps({"model": model, **body}).encode()


def http_request(tensors: list[Tensor], outputs: Sequence[str] = ()) -> HttpRequest:
    """Return a request for these outputs, or for all outputs of the model."""
    fields: dict[str, Any] = {
        "inputs": [
            {
                "name": tensor.name,
                "shape": tensor.shape,
                "datatype": tensor.datatype,
                "parameters": {"binary_data_size": len(tensor.data)},
            }
            for tensor in tensors
        ],
        "parameters": {"binary_data_output": True},  # of outputs that are not named
    }
    if outputs:
        fields["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    header = json.dumps(fields, separators=(",", ":")).encode()
    return HttpRequest(header + b"".join(tensor.data for tensor in tensors), len(header))


def grpc_request(model: str, tensors: list[Tensor], outputs: Sequence[str] = ()) -> service_pb2.ModelInferRequest:
    """Return a request for these outputs, or for all outputs of the model."""
    request = service_pb2.ModelInferRequest(model_name=model)
    for name in outputs:
        request.outputs.add(name=name)
    for tensor in tensors:
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        request.raw_input_contents.append(tensor.data)
    return request
