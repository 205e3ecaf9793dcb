"""The rows of the suite, the forms of errors of each API, and how to send a row and read its errors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

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
OTHER_KIND = {"openai": "invalid_request_error", "anthropic": "invalid_request_error", "tei": "Validation"}


@dataclass(frozen=True)
class Case:
    """A request that is answered. The runner sends it through every fault, and, if the API streams, as a stream."""

    id: str
    path: str  # of the route
    body: dict[str, Any]
    form: str = "openai"  # of its errors
    stream: str = ""  # the form of an error within a stream; the API does not stream without it
    system: str = ""  # takes the place of {model}
    many: str = ""  # the field that takes a list of texts
    prompt: str = ""  # the field that a prompt comes in which may be too long
    is_form: bool = False  # the body is a form, not JSON

    @property
    def url(self) -> str:
        return self.path.replace("{model}", self.system)

    def sent(self, **fields: Any) -> tuple[bytes, dict[str, str]]:
        """Return the body with more fields, and the headers."""
        body = self.body | fields
        if self.is_form:
            return multipart(*body.items()), {"content-type": BOUNDARY} | KEYED
        return json.dumps(body).encode(), {"content-type": "application/json"} | KEYED


@dataclass(frozen=True)
class Wrong:
    """Fields that make the request of a case wrong, and the name of the field that the refusal gives."""

    case: str
    fields: dict[str, Any]
    param: str


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
