"""Requests to Triton over gRPC.

`Inference` uses the protocol's messages directly: tritonclient's InferInput and InferResult objects would double the
CPU time of a request. If the task that awaits an answer is cancelled, gRPC cancels the request in Triton.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import grpc
import numpy as np
import numpy.typing as npt
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

DTYPES = {
    "BOOL": "?", "INT8": "i1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8",
    "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8",
    "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Connect again soon after Triton restarts.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.lb_policy_name", "round_robin"),
)
# Seconds for the requests that are in flight on connections to earlier replicas, streams among them.
MAX_STREAM_S = 3600
# Errors in a stream have no status, so these find it in the message: of Triton, and of our backends (shared/errors.py).
# With the metadata triton_grpc_error they would have one, but Triton 2.51 crashes on an error that comes quickly.
STREAM_ERRORS = (
    (re.compile(r"unknown model"), grpc.StatusCode.NOT_FOUND),
    (re.compile(r"^\d+ texts wait already"), grpc.StatusCode.UNAVAILABLE),
    (re.compile(r"^(inputs?|option|unknown [a-z ]+) '|^this (model|server) has no "), grpc.StatusCode.INVALID_ARGUMENT),
)


class Tensor(NamedTuple):
    """An input or output; `data` is in Triton's binary format."""

    name: str
    datatype: str
    shape: Sequence[int]
    data: bytes

    @classmethod
    def from_texts(cls, name: str, texts: Sequence[str], shape: Sequence[int] | None = None) -> Tensor:
        """Build a BYTES tensor; the shape is [number of texts] unless it is given."""
        encoded = [text.encode() for text in texts]
        data = b"".join([part for text in encoded for part in (len(text).to_bytes(4, "little"), text)])
        return cls(name, "BYTES", shape or [len(encoded)], data)

    @classmethod
    def from_values(cls, name: str, datatype: str, values: Any) -> Tensor:
        """Build a tensor of numbers, of the shape of the values."""
        array = np.asarray(values, DTYPES[datatype])
        return cls(name, datatype, list(array.shape), array.tobytes())

    def array(self) -> npt.NDArray[Any]:
        return np.frombuffer(self.data, DTYPES[self.datatype]).reshape(self.shape)

    def texts(self) -> list[str]:
        """Return the elements of a BYTES tensor. Replace what is not UTF-8."""
        texts, start = [], 0
        for _ in range(math.prod(self.shape)):
            end = start + 4 + int.from_bytes(self.data[start : start + 4], "little")
            texts.append(self.data[start + 4 : end].decode(errors="replace"))
            start = end
        return texts


Outputs = Mapping[str, Tensor]


class Inference:
    """The connection to Triton. Methods raise grpc.RpcError, which the app turns into a response."""

    def __init__(self, address: str, options: Mapping[str, int] | None = None) -> None:
        self._address = address
        self._options = {**dict(OPTIONS), "grpc.default_authority": address, **(options or {})}
        self._connect(address)
        self._closing: set[asyncio.Task[None]] = set()

    def _connect(self, target: str) -> None:
        self._channel = grpc.aio.insecure_channel(target, options=list(self._options.items()))
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def use(self, addresses: Sequence[str]) -> None:
        """Share new requests among the replicas at these addresses. Requests in flight end where they began."""
        port = self._address.rpartition(":")[2]
        is_ipv6 = ":" in addresses[0]
        replicas = ",".join(f"[{address}]:{port}" if is_ipv6 else f"{address}:{port}" for address in addresses)
        before = self._channel
        self._connect(f"{'ipv6' if is_ipv6 else 'ipv4'}:{replicas}")
        closing = asyncio.create_task(before.close(MAX_STREAM_S))
        self._closing.add(closing)  # asyncio itself keeps no reference
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for closing in self._closing:
            closing.cancel()
        await self._channel.close()

    async def infer(self, model: str, tensors: Iterable[Tensor], outputs: Iterable[str] = ()) -> Outputs:
        """Return the named outputs of the model; all of them if none is named."""
        return parsed(await self._stub.ModelInfer(request_message(model, tensors, outputs)))

    async def stream(
        self, model: str, tensors: Iterable[Tensor], outputs: Iterable[str] = ()
    ) -> AsyncGenerator[Outputs, None]:
        """Yield the responses of a decoupled model. Close the iterator early to cancel the request."""
        call = self._stub.ModelStreamInfer()
        try:
            await call.write(request_message(model, tensors, outputs))
            await call.done_writing()
            async for response in call:
                if response.error_message:
                    raise _stream_error(response.error_message)
                yield parsed(response.infer_response)
        finally:
            call.cancel()  # does nothing if it has ended

    async def config(self, model: str) -> model_config_pb2.ModelConfig:
        return (await self._stub.ModelConfig(service_pb2.ModelConfigRequest(name=model))).config

    async def ready(self, model: str) -> bool:
        return bool((await self._stub.ModelReady(service_pb2.ModelReadyRequest(name=model))).ready)

    async def server_ready(self) -> bool:
        return bool((await self._stub.ServerReady(service_pb2.ServerReadyRequest())).ready)


def _stream_error(message: str) -> grpc.aio.AioRpcError:
    """Return the error of a response, with the status that it has outside of streams."""
    codes = (code for pattern, code in STREAM_ERRORS if pattern.search(message))
    return rpc_error(next(codes, grpc.StatusCode.UNKNOWN), message)


def rpc_error(code: grpc.StatusCode, message: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), message)


def request_message(model: str, tensors: Iterable[Tensor], outputs: Iterable[str]) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=model)
    for tensor in tensors:
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        request.raw_input_contents.append(tensor.data)
    for name in outputs:
        request.outputs.add(name=name)
    return request


def parsed(response: service_pb2.ModelInferResponse) -> Outputs:
    return {
        output.name: Tensor(output.name, output.datatype, output.shape, data)
        for output, data in zip(response.outputs, response.raw_output_contents, strict=True)
    }
