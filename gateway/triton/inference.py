"""Requests to Triton over gRPC.

`Inference` uses the protocol's messages directly: tritonclient's InferInput and InferResult objects would double the
CPU time of a request. If the task that awaits an answer is cancelled, the request ends in Triton too, where that is
safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import secrets
import socket
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import grpc
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from gateway.edge.counters import SLOT
from gateway.edge.errors import STATUSES
from triton_transformers.errors import ERROR_STATUS, decode
from triton_transformers.protocol import CANCEL, HEARTBEATS, SILENCE_S
from triton_transformers.tensors import Tensor
from triton_transformers.triton_messages import is_unknown_model

OPTIONS: Mapping[str, int | str] = {
    "grpc.max_receive_message_length": -1,
    "grpc.max_send_message_length": -1,
    # Connect again soon after Triton restarts.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,
    # The timeout of an attempt to connect, which takes long on a busy machine. Without another replica, the first
    # requests to an address that never answers wait for that time.
    "grpc.min_reconnect_backoff_ms": 5000,
    "grpc.lb_policy_name": "round_robin",
}
# Kubernetes' name server keeps an answer for 5 s, so asking more often finds a new replica hardly sooner.
RESOLVE_S = 2.0
# Seconds for the requests that are in flight on connections to earlier replicas, streams among them.
MAX_STREAM_S = 3600
# TRITON-FAULTS.md#cancellations
FIRST_SAFE_RELEASE = (2, 59)
# Triton reports its release at once, unless it loads a model.
RELEASE_S = 0.2
# How often to ask a model to end a text: the request for that may reach another replica, or arrive before the text.
ASK_AGAIN_S = 1.0
# The time for requests whose clients left, when the gateway ends.
CLOSE_S = 3.0
CRASHED = "The process that generates the text crashed. Try again."


Outputs = Mapping[str, Tensor]
Result = TypeVar("Result")


class Inference:
    """The connection to Triton. Methods raise grpc.RpcError, which Gateway and Served translate."""

    def __init__(self, address: str, timeout: float, options: Mapping[str, int] | None = None) -> None:
        self._address = address
        self._options = {**OPTIONS, "grpc.default_authority": address, **(options or {})}
        self._timeout = timeout  # seconds for a request whose client left
        self._release: asyncio.Task[tuple[int, ...]] | None = None  # of Triton, as last read
        self._background: set[asyncio.Task[Any]] = set()
        self._abandoned: set[asyncio.Task[None]] = set()
        self._connect(address)

    def _connect(self, target: str) -> None:
        self._channel = grpc.aio.insecure_channel(target, options=list(self._options.items()))
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        # A stream has one request here. Sent as a stream, its parts would take three operations in place of one, and
        # the first token would come half a millisecond later.
        self._stream_one = self._channel.unary_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )

    async def watch_replicas(self) -> None:
        """Share new requests among all addresses of Triton's host name, until the task is cancelled.

        gRPC's own resolver asks the name server again only after a failure: a new replica would get no request as long
        as the others answer.
        """
        host = self._address.rpartition(":")[0]
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(host.strip("[]"))
            return
        used: list[str] = []
        while True:
            # While the name has no address, because no replica is ready, the last ones stay. UnicodeError: the name is
            # none that a name server knows.
            with contextlib.suppress(OSError, UnicodeError):
                addresses = await resolved(host)
                if addresses != used:
                    self._use(addresses)
                    used = addresses
            await asyncio.sleep(RESOLVE_S)

    def _use(self, addresses: Sequence[str]) -> None:
        """Send new requests to these addresses. Requests in flight end where they began."""
        port = self._address.rpartition(":")[2]
        is_ipv6 = ":" in addresses[0]
        replicas = ",".join(f"[{address}]:{port}" if is_ipv6 else f"{address}:{port}" for address in addresses)
        before = self._channel
        self._connect(f"{'ipv6' if is_ipv6 else 'ipv4'}:{replicas}")
        _keep(self._background, before.close(MAX_STREAM_S))

    async def close(self) -> None:
        """Close the connection. Requests whose clients left have a moment to end, because this cancels them."""
        if self._abandoned:
            await asyncio.wait(self._abandoned, timeout=CLOSE_S)
        for task in self._abandoned | self._background:
            task.cancel()
        await self._channel.close()

    async def infer(
        self, model: str, tensors: Iterable[Tensor], outputs: Iterable[str] = (), cancellable: bool = False
    ) -> Outputs:
        """Return the named outputs of the model; all of them if none is named. See `stream` for `cancellable`."""
        request = request_message(model, tensors, outputs, cancellable)
        call = self._stub.ModelInfer(request)
        # A task that awaits the call itself would cancel it when it is cancelled.
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        call.add_done_callback(lambda _: None if ended.done() else ended.set_result(None))
        try:
            await ended
            return parsed(await call)
        finally:
            if not call.done():
                response = asyncio.ensure_future(call)
                response.add_done_callback(retrieve_error)
                self._abandon(call, response, request)

    async def stream(
        self, model: str, tensors: Iterable[Tensor], outputs: Iterable[str] = (), cancellable: bool = False
    ) -> AsyncGenerator[Outputs, None]:
        """Yield the responses of a decoupled model. Close the iterator early to end the request.

        Set `cancellable` if the model has the input `cancel`.
        """
        request = request_message(model, tensors, outputs, cancellable)
        if cancellable:
            request.parameters[HEARTBEATS].bool_param = True
        call = self._stream_one(request)
        responses: asyncio.Queue[service_pb2.ModelStreamInferResponse | None] = asyncio.Queue()
        # A task that awaits the call itself would cancel it when it is cancelled.
        reader = asyncio.create_task(_read(call, responses))
        reader.add_done_callback(retrieve_error)
        error_message, silence = "", None
        try:
            while (response := await _next(responses, silence)) is not None:
                if response.error_message:
                    error_message = response.error_message  # Triton ends the stream now
                elif response.infer_response.outputs:
                    yield parsed(response.infer_response)
                else:
                    silence = SILENCE_S if cancellable else None
            if error_message:
                raise _stream_error(error_message)
            await reader  # raises its error
        except TimeoutError:
            call.cancel()  # which is safe here, because nothing begins or ends
            await asyncio.wait([reader])
            raise rpc_error(grpc.StatusCode.ABORTED, CRASHED) from None
        finally:
            if not reader.done():
                self._abandon(call, reader, request)

    async def config(self, model: str) -> model_config_pb2.ModelConfig:
        return (await self._stub.ModelConfig(service_pb2.ModelConfigRequest(name=model))).config

    async def ready(self, model: str) -> bool:
        return bool((await self._stub.ModelReady(service_pb2.ModelReadyRequest(name=model))).ready)

    async def server_ready(self) -> bool:
        return bool((await self._stub.ServerReady(service_pb2.ServerReadyRequest())).ready)

    def _abandon(
        self, call: grpc.aio.Call, answer: asyncio.Future[Any], request: service_pb2.ModelInferRequest
    ) -> None:
        """End a request whose client has left. It keeps its slot until it has ended."""
        ending = _keep(self._abandoned, self._end(call, answer, request))
        if slot := SLOT.get(None):
            slot.hold()
            ending.add_done_callback(lambda _: slot.release())

    async def _end(
        self, call: grpc.aio.Call, answer: asyncio.Future[Any], request: service_pb2.ModelInferRequest
    ) -> None:
        """End the request, and wait until it has ended or its time is over.

        Do not cancel the call at that time: Triton may be answering.
        """
        end_request: asyncio.Task[None] | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout):
                while not answer.done():
                    if await self._is_safe_release():
                        call.cancel()
                    elif request.id and (end_request is None or end_request.done()):
                        end_request = _keep(self._background, self._ask_to_end(request, call))
                    await asyncio.wait([answer], timeout=ASK_AGAIN_S)

    async def _is_safe_release(self) -> bool:
        """Return whether this release of Triton bears cancellations; False if Triton does not report it in time."""
        if self._release is None or self._release.done():
            self._release = _keep(self._background, self._read_release())
        release = self._release
        await asyncio.wait([release], timeout=RELEASE_S)
        return release.done() and release.result() >= FIRST_SAFE_RELEASE

    async def _read_release(self) -> tuple[int, ...]:
        """Return the numbers of Triton's version, none if it does not answer."""
        try:
            version = (await self._stub.ServerMetadata(service_pb2.ServerMetadataRequest())).version
        except (grpc.RpcError, grpc.aio.UsageError):
            return ()
        return tuple(int(number) for number in re.findall(r"\d+", version))

    async def _ask_to_end(self, request: service_pb2.ModelInferRequest, call: grpc.aio.Call) -> None:
        """Send the model the id of the request, in place of its prompt."""
        tensors = [Tensor.from_texts("text_input", [""]), Tensor.from_texts(CANCEL, [request.id])]
        message = request_message(request.model_name, tensors)
        with contextlib.suppress(grpc.RpcError, grpc.aio.UsageError):
            if isinstance(call, grpc.aio.UnaryUnaryCall):
                await self._stub.ModelInfer(message)
            else:
                async for _ in self._stream_one(message):
                    pass


def _keep(tasks: set[asyncio.Task[Result]], work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """Start a task, and keep it in the set until it ends: asyncio itself keeps no reference."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def _read(
    call: grpc.aio.UnaryStreamCall[Any, Any],
    responses: asyncio.Queue[service_pb2.ModelStreamInferResponse | None],
) -> None:
    """Put the responses into the queue, then None."""
    try:
        async for response in call:
            responses.put_nowait(response)
    finally:
        responses.put_nowait(None)


async def _next(
    responses: asyncio.Queue[service_pb2.ModelStreamInferResponse | None], silence: float | None
) -> service_pb2.ModelStreamInferResponse | None:
    async with asyncio.timeout(silence):
        return await responses.get()


def retrieve_error(answer: asyncio.Future[Any]) -> None:
    """Retrieve the error, or asyncio logs it if no task awaits the answer."""
    if not answer.cancelled():
        answer.exception()


def _stream_error(message: str) -> grpc.aio.AioRpcError:
    """Return the error of a response, with the status that it has outside of streams.

    See TRITON-FAULTS.md#errors-in-streams.
    """
    if typed := decode(message):
        return rpc_error(STATUSES.get(typed.status, grpc.StatusCode.UNKNOWN), message)
    return rpc_error(grpc.StatusCode.NOT_FOUND if is_unknown_model(message) else grpc.StatusCode.UNKNOWN, message)


def rpc_error(code: grpc.StatusCode, message: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), message)


def request_message(
    model: str, tensors: Iterable[Tensor], outputs: Iterable[str] = (), cancellable: bool = False
) -> service_pb2.ModelInferRequest:
    # Any client of Triton that knows the id can end the request, so it cannot be guessed.
    request = service_pb2.ModelInferRequest(model_name=model, id=secrets.token_urlsafe(16) if cancellable else "")
    request.parameters[ERROR_STATUS].bool_param = True
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


async def resolved(host: str) -> list[str]:
    """Return the IPv4 addresses of the host; those of IPv6 if it has no others. Raise OSError if it has none.

    gRPC takes addresses of one family, and Triton listens on IPv4 by default.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    families = {family: {str(address[0]) for other, *_, address in found if other == family} for family, *_ in found}
    return sorted(families.get(socket.AF_INET) or families[found[0][0]])
