"""Report errors in the form of each API, and translate Triton's gRPC errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import grpc
import msgspec
from starlette.responses import Response

from triton_transformers.errors import CONTEXT_LENGTH, INVALID_VALUE, TypedError, decode
from triton_transformers.triton_messages import is_outage, is_unknown_model, own_message

RETRY = {"retry-after": "1"}  # seconds
# The HTTP status of a model's typed error -> Triton's status for it.
STATUSES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    499: grpc.StatusCode.CANCELLED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
}
# The codes of models that clients read too.
CLIENT_CODES = (CONTEXT_LENGTH, INVALID_VALUE)


class ApiError(Exception):
    """An error that a client gets, in the form of the API that it uses.

    `param` names the field of the request, such as `input[3]`, and `others` those that the message names beside it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
        others: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.text = TypedError.from_sentence(status, message, fields=[param, *others] if param else ())
        self.code = code
        self.headers = dict(headers or {})
        self.details = details  # that clients of Anthropic's API read
        self.typed: TypedError | None = None  # of the model, if the request is wrong
        self.cause = ""  # what the log shows beside the status
        self.outage: str | None = None  # the system that may answer in a moment, because Triton or its process restarts

    @property
    def message(self) -> str:
        return self.text.sentence

    @property
    def param(self) -> str | None:
        return self.text.fields[0] if self.text.fields else None

    def rename(self, new_name: Callable[[str], str]) -> None:
        """Let the error name its fields as another API does."""
        self.text = replace(self.text, fields=[*map(new_name, self.text.fields)])

    @property
    def type(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def response(self, headers: Mapping[str, str] | None = None, form: ErrorForm | None = None) -> Response:
        content = msgspec.json.encode((form or openai_form)(self))
        return Response(content, self.status, {**self.headers, **(headers or {})}, "application/json")


ErrorForm = Callable[[ApiError], dict[str, Any]]


def openai_form(error: ApiError) -> dict[str, Any]:
    """Return the error as OpenAI, vLLM and Jina report it."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def cohere_form(error: ApiError) -> dict[str, Any]:
    return {"message": error.message}


def anthropic_form(error: ApiError) -> dict[str, Any]:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
    kinds |= {429: "rate_limit_error", 500: "api_error", 503: "overloaded_error", 504: "timeout_error"}
    kind = kinds.get(error.status, "invalid_request_error")
    details = {"details": error.details} if error.details else {}
    return {"type": "error", "error": {"type": kind, "message": error.message} | details}


def tei_form(error: ApiError) -> dict[str, Any]:
    """Return the error as text-embeddings-inference reports it."""
    kinds = {404: "Validation", 424: "Backend", 429: "Overloaded", 500: "Backend", 503: "Unhealthy", 504: "Backend"}
    return {"error": error.message, "error_type": kinds.get(error.status, "Validation")}


FORMS: Sequence[ErrorForm] = (openai_form, cohere_form, anthropic_form, tei_form)
# For each API: how its own paths begin, a header of its clients with a part of its value, and its form of errors.
CLIENTS: Sequence[tuple[str, bytes, bytes, ErrorForm]] = (
    ("/v1/messages", b"anthropic-version", b"", anthropic_form),
    ("/v2/", b"x-fern-sdk-name", b"cohere", cohere_form),
    ("/models/", b"user-agent", b"hf_hub/", tei_form),
    ("/models/", b"user-agent", b"@huggingface/", tei_form),
)


def form_of_client(path: str, headers: Mapping[bytes, bytes]) -> ErrorForm:
    """Return the form of the API that the path or the client belongs to, for paths that are of no API or of several."""
    for start, header, value, form in CLIENTS:
        if path.startswith(start) or (header in headers and value in headers[header]):
            return form
    return openai_form


def from_triton(error: grpc.RpcError, model: str = "") -> ApiError:
    """Return the error that a client gets for an error of Triton. Pass on only messages about the request."""
    details = error.details() or ""
    typed = decode(details)
    translated = _translated(error, typed, model)
    translated.cause = f" (Triton: {error.code().name})"
    if is_outage(details) and not typed:
        translated.outage = model
    return translated


def _translated(error: grpc.RpcError, typed: TypedError | None, model: str) -> ApiError:
    status = STATUSES.get(typed.status, grpc.StatusCode.UNKNOWN) if typed else error.code()
    message = typed.sentence if typed else own_message(error.details() or "")
    if status is grpc.StatusCode.INVALID_ARGUMENT:
        wrong = ApiError(400, message)
        wrong.typed = typed
        return wrong
    if is_not_loaded(error):
        return not_ready(model)
    if status is grpc.StatusCode.ABORTED:
        return ApiError(503, message, headers=RETRY)
    if status in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE) or is_outage(message):
        return ApiError(503, "The inference server is busy or restarting. Try again.", headers=RETRY)
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return timed_out()
    return ApiError(500, "The inference server failed to answer. Its log shows why (`make logs`).")


def about_request(error: ApiError, fields: Mapping[str, str], rows: Mapping[str, Sequence[str]]) -> ApiError:
    """Return a model's error about its inputs and options as one about the fields of the request.

    `fields` has those with other names; `rows` the places in the request that the rows of an input come from.
    """
    if not (typed := error.typed) or not typed.fields:
        return error
    names = [fields.get(name, name) for name in typed.fields]
    first = rows.get(typed.fields[0], ())
    if typed.index is not None:
        if typed.index >= len(first):
            return error
        names[0] = first[typed.index]
    code = typed.code if typed.code in CLIENT_CODES else None
    message = typed.message.format(*[f"'{name}'" for name in names])
    return ApiError(error.status, message, names[0], code, others=names[1:])


def is_not_loaded(error: grpc.RpcError) -> bool:
    """Return whether Triton has no such model, or has not loaded it."""
    if error.code() is grpc.StatusCode.NOT_FOUND:
        return True
    return error.code() is grpc.StatusCode.UNAVAILABLE and is_unknown_model(error.details() or "")


def not_found(model: str, param: str = "model") -> ApiError:
    """Return OpenAI's error for a model that does not exist."""
    message = f"The model '{shown(model)}' does not exist. GET /v1/models lists the models."
    return ApiError(404, message, param, "model_not_found")


def not_ready(model: str) -> ApiError:
    name = f" '{shown(model)}'" if model else ""
    message = f"The model{name} is not ready: it is loading, or failed to load. Try again."
    error = ApiError(503, message, "model", "model_not_ready", RETRY)
    error.outage = model  # after a restart, Triton has no models at first
    return error


def timed_out() -> ApiError:
    return ApiError(504, "The answer took longer than GATEWAY_TIMEOUT allows.", code="timeout")


def shown(text: str) -> str:
    """Return a client's text as an error message may repeat it."""
    return text if len(text) <= 80 else f"{text[:77]}..."
