"""Requests and responses: reading inputs, and running a batch so that one bad request fails alone."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import triton_python_backend_utils as pb_utils

from serving.triton.types import Array, BadRequest, Busy, Cancelled

Job = TypeVar("Job")
Result = TypeVar("Result")

# Error -> its HTTP status, and the name of Triton's code for that.
STATUSES: dict[type[Exception], int] = {BadRequest: 400, Cancelled: 499, Busy: 503}
CODES = {400: "INVALID_ARG", 499: "CANCELLED", 503: "UNAVAILABLE"}
# A place in the source of a library, which some write into their messages.
SOURCE = re.compile(r"[\w./+-]+\.(cc|cpp|cu|h|hpp|py):\d+:?\s*")


class Response:
    """The response to a request that is answered after its execution."""

    def __init__(self, request: pb_utils.InferenceRequest) -> None:
        self.sender = request.get_response_sender()
        self.names = request.requested_output_names()

    def send(self, result: Mapping[str, Array] | Exception) -> None:
        """Send the outputs that were requested, or the error. Call this once."""
        try:
            # An error raised here would refer to itself, and keep the arrays of its frames until Python collects it.
            response = error_response(result) if isinstance(result, Exception) else tensors_response(result, self.names)
        except Exception as error:
            response = error_response(error)
        send_last(self.sender, response)
        del self.sender  # frees its shared memory


def infer(model: str, inputs: Mapping[str, Array], outputs: list[str]) -> pb_utils.InferenceResponse:
    """Send a request to another model of this server."""
    return pb_utils.InferenceRequest(
        model_name=model,
        inputs=[pb_utils.Tensor(name, array) for name, array in inputs.items()],
        requested_output_names=outputs,
        preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
    ).exec()


class Later(NamedTuple):
    """The result of a request that takes long: begin its work, which sends the response."""

    begin: Callable[[Response], None]


def input_tensor(request: pb_utils.InferenceRequest, name: str) -> Array:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        raise BadRequest(f"input '{name}' is missing")
    return tensor.as_numpy()


def texts(request: pb_utils.InferenceRequest, name: str, noun: str = "row") -> list[str]:
    """Return the rows of a BYTES input as text. Error messages call a row `noun`."""
    return [text(value, name, row, noun) for row, value in enumerate(input_tensor(request, name).ravel())]


def text(value: bytes, name: str, row: int, noun: str) -> str:
    """Return one row of a BYTES input as text."""
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"input '{name}': {noun} {row} is not valid UTF-8 (byte {error.start})") from None


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
            responses[i] = error_response(error)
    for i, result in run_apart(jobs, run).items():
        try:
            responses[i] = error_response(result) if isinstance(result, Exception) else respond(requests[i], result)
        except Exception as error:
            responses[i] = error_response(error)
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


def status_and_message(error: Exception) -> tuple[int, str]:
    """Return the HTTP status of an error, and the message for the client. Log an unexpected error."""
    status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), 500)
    message = f"{type(error).__name__}: {error}" if status == 500 else str(error)
    if type(error).__name__ == "InvalidArgument":  # ONNX Runtime's, for values that the graph refuses
        status, message = STATUSES[BadRequest], f"the model refused the values of the inputs: {error}"
    if isinstance(error, RecursionError):  # at JSON that could just be read
        status, message = STATUSES[BadRequest], "the request is nested too deeply"
    if status == 500:
        # Not the message, which may hold texts of clients.
        places = [f" in {frame.filename}, line {frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        pb_utils.Logger.log_error(f"a request failed: {type(error).__name__}{''.join(places[-1:])}")
    # JSON can escape half a character, which Triton does not take.
    return status, SOURCE.sub("", message).encode(errors="backslashreplace").decode()


def with_status(error: Exception) -> str:
    """Return the message with its HTTP status before it, as in "[400] "."""
    status, message = status_and_message(error)
    return f"[{status}] {message}"


def error_response(error: Exception, shows_status: bool = False) -> pb_utils.InferenceResponse:
    status, message = status_and_message(error)
    return coded_response(status, f"[{status}] {message}" if shows_status else message)


def coded_response(status: int, message: str) -> pb_utils.InferenceResponse:
    """Return an error that has this HTTP status."""
    code = getattr(pb_utils.TritonError, CODES.get(status, "INTERNAL"))
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))


def send_last(sender: pb_utils.InferenceResponseSender, response: pb_utils.InferenceResponse) -> None:
    """Send the last response of a request."""
    try:
        sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    except Exception as error:  # the other requests of the batch still need their responses
        pb_utils.Logger.log_warn(f"could not send a response: {error}")
