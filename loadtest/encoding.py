"""Requests as they go over the wire. Users encode each of them once, before the load begins."""

from __future__ import annotations

import json
from dataclasses import dataclass

from tritonclient.grpc import service_pb2

from loadtest.examples import Tensor


@dataclass(frozen=True)
class HttpRequest:
    """A KServe v2 request with binary tensors: a JSON header, then the tensors' data."""

    body: bytes
    header_length: int


def http_request(tensors: list[Tensor]) -> HttpRequest:
    header = json.dumps(
        {
            "inputs": [
                {
                    "name": tensor.name,
                    "shape": tensor.shape,
                    "datatype": tensor.datatype,
                    "parameters": {"binary_data_size": len(tensor.data)},
                }
                for tensor in tensors
            ],
            "parameters": {"binary_data_output": True},
        },
        separators=(",", ":"),
    ).encode()
    return HttpRequest(header + b"".join(tensor.data for tensor in tensors), len(header))


def grpc_request(model: str, tensors: list[Tensor]) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=model)
    for tensor in tensors:
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        request.raw_input_contents.append(tensor.data)
    return request
