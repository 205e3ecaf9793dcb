"""The rows of the suite, the forms of errors of each API, and how to send a row and read its errors."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from tests.support.gateway import Reply
from tests.support.triton_stand_in import Received, rows_of
from triton_transformers.tensors import TOKEN_IDS

KEY = "a-key"
KEYED = {"authorization": f"Bearer {KEY}"}
BOUNDARY = "multipart/form-data; boundary=xyz"
PIECE = b" ein"  # in the first piece of each stream
# The kind of an error that each API reports for a status; clients retry by it.
KINDS: dict[str, dict[int, str]] = {
    "openai": {429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "server_error"},
    "anthropic": {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
    | {429: "rate_limit_error", 500: "api_error", 503: "overloaded_error", 504: "timeout_error"},
    "tei": {429: "Overloaded", 500: "Backend", 503: "Unhealthy", 504: "Backend"},
}
ABSENT = object()  # the value of a field that is left out
# Inputs of every request to a generator that sets nothing else.
ALWAYS: dict[str, Any] = {"temperature": [1.0], "exclude_input_in_output": [True]}
# What differs if a request is sent again, or as a stream: only a model that streams counts its tokens of reasoning.
DIFFERS = {"reasoning_tokens", "id", "call_id", "response_id", "generation_id", "created", "created_at"}
OTHER_KIND = {"openai": "invalid_request_error", "anthropic": "invalid_request_error", "tei": "Validation"}


@dataclass(frozen=True)
class Case:
    """A request that is answered. The runner sends it through every fault, and, if the API streams, as a stream.

    `triton` has all inputs that Triton gets, and may name the model and its outputs. `answer` has what the client gets,
    whole or as the joined pieces of a stream: a function, or fields beside which there may be others.
    """

    id: str
    path: str  # of the route
    body: dict[str, Any]
    form: str = "openai"  # of its errors
    stream: str = ""  # the form of an error within a stream; the API does not stream without it
    system: str = ""  # takes the place of {model}
    many: str = ""  # the field that takes a list of texts
    prompt: str = ""  # the field that a prompt comes in which may be too long
    is_form: bool = False  # the body is a form, not JSON
    triton: dict[str, Any] | None = None
    answer: Any = None

    @property
    def url(self) -> str:
        return self.path.replace("{model}", self.system)

    def sent(self, **fields: Any) -> tuple[bytes, dict[str, str]]:
        """Return the body with more fields, and the headers."""
        body = {name: value for name, value in (self.body | fields).items() if value is not ABSENT}
        if self.is_form:
            return multipart(*body.items()), {"content-type": BOUNDARY} | KEYED
        return json.dumps(body).encode(), {"content-type": "application/json"} | KEYED


@dataclass(frozen=True)
class Given:
    """Fields that a case gets in addition: by what Triton's request changes, and what the client gets."""

    fields: dict[str, Any]
    triton: dict[str, Any] | None = None  # the changed inputs; ABSENT is one that the request lacks
    answer: Any = None
    system: str = ""  # another one
    streams: bool = True  # False: the model does not


def neutral(*given: dict[str, Any]) -> list[Given]:
    """Return rows of fields that must change nothing in the request that Triton gets."""
    return [Given(fields, {}) for fields in given]


@dataclass(frozen=True)
class Wrong:
    """Fields that make the request of a case wrong, and the name of the field that the refusal gives."""

    fields: dict[str, Any]
    param: str = ""
    reason: str = ""  # a part of the message
    status: int = 400
    code: str = ""
    system: str = ""  # another one
    by_model: bool = False  # the request reaches a model


def wrong(param: str, *given: dict[str, Any]) -> list[Wrong]:
    """Return a row for each of the fields that is wrong by the same name."""
    return [Wrong(fields, param) for fields in given]


class Exactly(dict[str, Any]):
    """The fields of an answer that has no others."""


class Begins(str):
    """Equals each text that begins so."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and other.startswith(str(self))

    __hash__ = str.__hash__


def difference(expected: Any, got: Any, place: str = "") -> str:
    """Return the first place at which an answer is not as expected, or nothing."""
    if isinstance(expected, dict) and isinstance(got, dict):
        if isinstance(expected, Exactly) and (others := got.keys() - expected.keys()):
            return f"{place} has {others}"
        parts = ((name, value, got.get(name, ABSENT)) for name, value in expected.items())
        return next((found for name, *pair in parts if (found := difference(*pair, f"{place}.{name}"))), "")
    if isinstance(expected, list | tuple) and isinstance(got, list | tuple) and len(expected) == len(got):
        pairs = enumerate(zip(expected, got, strict=True))
        return next((found for number, pair in pairs if (found := difference(*pair, f"{place}[{number}]"))), "")
    if isinstance(expected, Real) and isinstance(got, Real):
        is_right = math.isclose(expected, got, rel_tol=1e-5, abs_tol=1e-6)
    else:
        is_right = expected(got) if callable(expected) else expected == got
    return "" if is_right else f"{place} is {got!r}, not {expected!r}"


def read_request(request: Received, streams: bool = False) -> dict[str, Any]:
    """Return the inputs of a request to Triton, with the options of sampling among them, its model and outputs."""
    inputs = {
        name: [read_row(row) for row in rows_of(tensor)] if tensor.datatype == "BYTES" else tensor.array().tolist()
        for name, tensor in request.inputs.items()
    }
    for name in inputs.keys() & {"messages", "parameters"}:
        inputs[name] = json.loads(inputs[name][0])
    assert inputs.pop("stream", [False]) == [True] or not streams
    inputs |= {"outputs": request.outputs, "model": request.model}
    return inputs | json.loads(inputs.pop("sampling_parameters", ["{}"])[0])


def read_row(row: bytes) -> Any:
    """Return a row as its token ids, as a text, or as bytes."""
    if row.startswith(TOKEN_IDS):
        return np.frombuffer(row[1:], "<i4").tolist()
    try:
        return row.decode()
    except UnicodeDecodeError:
        return row


def read_answer(reply: Reply) -> Any:
    return reply.json if reply.headers["content-type"].startswith("application/json") else reply.body


def without_ids(value: Any) -> Any:
    """Return an answer without what differs if it is asked for again."""
    if isinstance(value, dict):
        return {name: without_ids(own) for name, own in value.items() if name not in DIFFERS}
    return [*map(without_ids, value)] if isinstance(value, list) else value


def multipart(*fields: tuple[str, str | bytes]) -> bytes:
    parts = []
    for name, value in fields:
        kind = b'; filename="a.wav"\r\nContent-Type: audio/wav' if name == "file" else b""
        content = value if isinstance(value, bytes) else value.encode()
        parts.append(
            b'--xyz\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (name.encode(), kind, content)
        )
    return b"".join(parts) + b"--xyz--\r\n"


def read_error(form: str, status: int, error: Any) -> dict[str, Any]:
    """Return an error's fields, after a check of its form and of its kind."""
    kind = KINDS.get(form, {}).get(status, OTHER_KIND.get(form))
    if form == "openai":
        assert error.keys() == {"error"} and error["error"].keys() == {"message", "type", "param", "code"}, error
        assert error["error"]["type"] == kind, error
        return dict(error["error"])
    if form == "anthropic":
        assert error.keys() == {"type", "error"} and error["type"] == "error", error
        assert error["error"]["type"] == kind, error
        return dict(error["error"])
    if form == "tei":
        assert error.keys() == {"error", "error_type"} and error["error_type"] == kind, error
        return {"message": error["error"]}
    assert form == "cohere" and error.keys() == {"message"}, error
    return dict(error)


def read_last(form: str, status: int, body: bytes) -> str:
    """Return the message of the error that ends a stream."""
    last = body.decode().rstrip().rpartition("\n")[2].removeprefix("data: ")
    assert last != "[DONE]", "the stream ends as if it were whole"
    event = json.loads(last)
    if form == "responses":
        assert (event["type"], event["response"]["status"]) == ("response.failed", "failed"), event
        assert event["response"]["error"]["code"] == "server_error", event
        return str(event["response"]["error"]["message"])
    if form == "cohere v2":
        assert (event["type"], event["delta"]["finish_reason"]) == ("message-end", "ERROR"), event
        return str(event["delta"]["error"])
    if form == "cohere v1":
        assert (event["event_type"], event["finish_reason"]) == ("stream-end", "ERROR"), event
        return str(event["response"]["text"])
    return str(read_error(form, status, event)["message"])
