"""Requests and responses: reading inputs, and running a batch so that one bad request fails alone."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import triton_python_backend_utils as pb_utils

from serving.triton.types import Array, BadRequest, CalledModelError, RequestError, Tensors
from triton_transformers.errors import ERROR_STATUS, TypedError, decode

Job = TypeVar("Job")
Result = TypeVar("Result")

# HTTP status of an error -> the name of Triton's code for it.
CODES = {400: "INVALID_ARG", 499: "CANCELLED", 503: "UNAVAILABLE"}
# A place in the source of a library, which some write into their messages.
SOURCE = re.compile(r"[\w./+-]+\.(cc|cpp|cu|h|hpp|py):\d+:?\s*")


class Response:
    """The response to a request that is answered after its execution."""

    def __init__(self, request: pb_utils.InferenceRequest) -> None:
        self.sender = request.get_response_sender()
        self.names = request.requested_output_names()
        self.is_typed = asks_typed(request)

    def send(self, result: Mapping[str, Array] | Exception) -> None:
        """Send the outputs that were requested, or the error. Call this once."""
        try:
            # An error raised here would refer to itself, and keep the arrays of its frames until Python collects it.
            response = (
                error_response(result, self.is_typed)
                if isinstance(result, Exception)
                else tensors_response(result, self.names)
            )
        except Exception as error:
            response = error_response(error, self.is_typed)
        send_last(self.sender, response)
        del self.sender  # frees its shared memory


def infer(model: str, inputs: Tensors, outputs: list[str]) -> Tensors:
    """Return the answer of another model of this server, or raise its error."""
    answer = pb_utils.InferenceRequest(
        model_name=model,
        inputs=[pb_utils.Tensor(name, array) for name, array in inputs.items()],
        requested_output_names=outputs,
        parameters={ERROR_STATUS: True},
        preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
    ).exec()
    if answer.has_error():
        message = answer.error().message()
        typed = decode(message)
        raise CalledModelError(typed) if typed else RuntimeError(message)
    return {tensor.name(): tensor.as_numpy() for tensor in answer.output_tensors()}


class Later(NamedTuple):
    """The result of a request that takes long: begin its work, which sends the response."""

    begin: Callable[[Response], None]


def input_tensor(request: pb_utils.InferenceRequest, name: str) -> Array:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        raise BadRequest(f"input '{name}' is missing", name)
    return tensor.as_numpy()


def texts(request: pb_utils.InferenceRequest, name: str, noun: str = "row") -> list[str]:
    """Return the rows of a BYTES input as text. Error messages call a row `noun`."""
    return [text(value, name, row, noun) for row, value in enumerate(input_tensor(request, name).ravel())]


def text(value: bytes, name: str, row: int, noun: str) -> str:
    """Return one row of a BYTES input as text."""
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"input '{name}': {noun} {row} is not valid UTF-8 (byte {error.start})", name) from None


def text_bytes(request: pb_utils.InferenceRequest) -> int:
    """Return how many bytes the texts of a request have."""
    tensors = (tensor.as_numpy() for tensor in request.inputs())
    return sum(len(value) for array in tensors if array.dtype == np.object_ for value in array.ravel())


def requested_outputs(request: pb_utils.InferenceRequest, outputs: Iterable[str]) -> list[str]:
    """Return the names that the request asks for, in the model's order; Triton passes them in no order."""
    requested = request.requested_output_names()
    return [name for name in outputs if name in requested]


def serve(
    requests: Sequence[pb_utils.InferenceRequest],
    prepare: Callable[[pb_utils.InferenceRequest], Job],
    run: Callable[[list[Job]], Sequence[Any]],
    respond: Callable[[pb_utils.InferenceRequest, Any], pb_utils.InferenceResponse | None],
) -> list[pb_utils.InferenceResponse | None]:
    """Prepare each request, run all valid ones as one batch, respond to each: None stands for a later response.

    An error in one request never reaches another.
    """
    responses: dict[int, pb_utils.InferenceResponse | None] = {}
    jobs: dict[int, Job] = {}
    for i, request in enumerate(requests):
        try:
            jobs[i] = prepare(request)
        except Exception as error:
            responses[i] = error_response(error, asks_typed(requests[i]))
    for i, result in run_apart(jobs, run).items():
        if not isinstance(result, Exception):
            try:
                responses[i] = respond(requests[i], result)
                continue
            except Exception as error:
                result = error
        responses[i] = error_response(result, asks_typed(requests[i]))
    return [responses[i] for i in range(len(requests))]


def run_apart(
    jobs: dict[int, Job], run: Callable[[list[Job]], Sequence[Result | Exception]]
) -> dict[int, Result | Exception]:
    """Run all jobs at once. If that fails, run each alone, so that only the job at fault gets the error."""
    if not jobs:
        return {}
    try:
        return dict(zip(jobs, run(list(jobs.values())), strict=True))
    except Exception as error:
        if len(jobs) == 1:
            return dict.fromkeys(jobs, error)
    results: dict[int, Result | Exception] = {}
    for i, job in jobs.items():
        results |= run_apart({i: job}, run)
    return results


def tensors_response(tensors: Mapping[str, Array], names: Iterable[str]) -> pb_utils.InferenceResponse:
    """Return those of the tensors that have these names."""
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, tensors[name]) for name in tensors if name in names])


def asks_typed(request: pb_utils.InferenceRequest) -> bool:
    """Return whether the request asks for typed errors."""
    try:
        return bool(json.loads(request.parameters() or "{}").get(ERROR_STATUS))
    except UnicodeDecodeError:  # in another parameter
        return False


def typed(error: Exception) -> TypedError:
    """Return an error as programs read it. Log an unexpected error."""
    known = request_error(error)
    if known.status == 500 and not isinstance(error, CalledModelError):
        # Not the message, which may hold texts of clients.
        places = [f" in {frame.filename}, line {frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        pb_utils.Logger.log_error(f"a request failed: {type(error).__name__}{''.join(places[-1:])}")
    # JSON can escape half a character, which Triton does not take.
    sentence = SOURCE.sub("", str(known)).encode(errors="backslashreplace").decode()
    return TypedError.from_sentence(known.status, sentence, known.code, known.fields, known.index)


def request_error(error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if type(error).__name__ == "InvalidArgument":  # ONNX Runtime's, for values that the graph refuses
        return BadRequest(f"the model refused the values of the inputs: {error}")
    if isinstance(error, RecursionError):  # at JSON that could just be read
        return BadRequest("the request is nested too deeply")
    return RequestError(f"{type(error).__name__}: {error}")


def error_response(error: Exception, is_typed: bool = False) -> pb_utils.InferenceResponse:
    known = typed(error)
    code = getattr(pb_utils.TritonError, CODES.get(known.status, "INTERNAL"))
    message = known.encode() if is_typed else known.sentence
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))


def send_last(sender: pb_utils.InferenceResponseSender, response: pb_utils.InferenceResponse) -> None:
    """Send the last response of a request."""
    try:
        sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    except Exception as error:  # the other requests of the batch still need their responses
        pb_utils.Logger.log_warn(f"could not send a response: {error}")
