"""Requests and responses: what every backend here does the same way inside a Triton process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import triton_python_backend_utils as pb_utils

from shared.errors import BadRequest, Busy

Job = TypeVar("Job")
Result = TypeVar("Result")


def input_tensor(request, name: str):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        raise BadRequest(f"input '{name}' is missing")
    return tensor.as_numpy()


def texts(request, name: str, noun: str = "row") -> list[str]:
    """A BYTES input's rows as text; `noun`: what messages call one."""
    found = []
    for row, value in enumerate(input_tensor(request, name).ravel()):
        try:
            found.append(value.decode())
        except UnicodeDecodeError as error:
            raise BadRequest(f"input '{name}': {noun} {row} is not valid UTF-8 (byte {error.start})") from None
    return found


def wanted_outputs(request, outputs: Iterable[str]) -> list[str]:
    """What the request asks for, in the model's order: Triton hands the names over in none."""
    asked = request.requested_output_names()
    return [name for name in outputs if name in asked]


def serve(
    requests: Sequence, prepare: Callable[[object], Job], run: Callable[[list[Job]], list[Result]], reply: Callable
) -> list:
    """Prepare each request, run all that are sound as one batch, reply to each; one's fault never reaches another.

    prepare(request) -> job, run(jobs) -> results, reply(request, result) -> InferenceResponse.
    """
    responses: list = [None] * len(requests)
    jobs: dict[int, Job] = {}
    for i, request in enumerate(requests):
        try:
            jobs[i] = prepare(request)
        except Exception as error:
            responses[i] = error_response(error)
    for i, result in run_apart(jobs, run).items():
        try:
            responses[i] = error_response(result) if isinstance(result, Exception) else reply(requests[i], result)
        except Exception as error:
            responses[i] = error_response(error)
    return responses


def run_apart(jobs: dict[int, Job], run: Callable[[list[Job]], list[Result]]) -> dict[int, Result | Exception]:
    """All jobs in one run; where that fails, each in a run of its own, so that only the culprit bears its error."""
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


def error_response(error: Exception):
    code, message = pb_utils.TritonError.INTERNAL, f"{type(error).__name__}: {error}"
    if isinstance(error, BadRequest):
        code, message = pb_utils.TritonError.INVALID_ARG, str(error)
    elif isinstance(error, Busy):
        code, message = pb_utils.TritonError.UNAVAILABLE, str(error)
    elif type(error).__name__ == "InvalidArgument":  # ONNX Runtime's, for values the graph refuses
        code, message = pb_utils.TritonError.INVALID_ARG, f"the model refused the values of the inputs: {error}"
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))
