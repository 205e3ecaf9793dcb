"""Spans of the backends' own steps, below those that Triton records of its models (TRACE=1, docs/loadtest.md).

A thread sends them where Triton sends its own, as OTLP/HTTP in JSON. It drops spans if no receiver listens there, or if
more arrive than it can send.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import secrets
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import triton_python_backend_utils as pb_utils

Json = dict[str, Any]

# A span links to this many of the other requests, those with the most tokens.
MAX_LINKS = 8
MAX_WAITING = 1000  # executions
MAX_SPANS = 2000  # in one message
SEND_INTERVAL_S = 0.5
TIMEOUT_S = 2


class Traced(NamedTuple):
    """A request that the server traces: its trace, Triton's span of this model, and when the backend received it."""

    trace: str
    span: str
    since_ns: int


class Step(NamedTuple):
    """A step of an execution. Each of the requests gets a span of it; the numbers are the requests' tokens."""

    name: str
    start_ns: int | None  # None: when the backend received the request
    end_ns: int
    requests: Mapping[Traced, int]
    links: Mapping[Traced, int] = {}
    attributes: Mapping[str, int] = {}


# None: the server does not trace.
sender: Sender | None = None


def start(model: str) -> None:
    global sender
    if os.environ.get("TRACE") == "1":
        sender = Sender(os.environ["TRACE_URL"], model)


def traced(request: pb_utils.InferenceRequest, now_ns: int) -> Traced | None:
    """Return the request's place in its trace; None if it is not traced."""
    context = sender and request.trace().get_context()
    if not context:
        return None
    _, trace, span, _ = json.loads(context)["traceparent"].split("-")
    return Traced(trace, span, now_ns)


class Sender:
    def __init__(self, url: str, model: str) -> None:
        self.url = url
        self.model = model
        self.waiting: queue.Queue[tuple[Step, ...]] = queue.Queue(MAX_WAITING)
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def add(self, *steps: Step) -> None:
        with contextlib.suppress(queue.Full):
            self.waiting.put_nowait(steps)

    def close(self) -> None:
        """Send the last spans before the process ends."""
        self.closed.set()
        self.thread.join(timeout=TIMEOUT_S)

    def _run(self) -> None:
        resource = {"attributes": _attributes({"service.name": "triton"})}
        closed = False
        while not closed:
            closed = self.closed.wait(SEND_INTERVAL_S)
            while spans := self._spans():
                scope = {"scope": {"name": self.model}, "spans": spans}
                self._post({"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]})

    def _spans(self) -> list[Json]:
        """Return the spans of the next message, none if nothing waits."""
        spans: list[Json] = []
        with contextlib.suppress(queue.Empty):
            while len(spans) < MAX_SPANS:
                for step in self.waiting.get_nowait():
                    spans += _spans(step)
        return spans

    def _post(self, message: Json) -> None:
        request = urllib.request.Request(self.url, json.dumps(message).encode(), {"Content-Type": "application/json"})
        with contextlib.suppress(OSError, http.client.HTTPException):
            urllib.request.urlopen(request, timeout=TIMEOUT_S).close()


def _spans(step: Step) -> Iterator[Json]:
    most_tokens = sorted(step.links, key=lambda request: step.links[request], reverse=True)[: MAX_LINKS + 1]
    for request, tokens in step.requests.items():
        links = [other for other in most_tokens if other != request][:MAX_LINKS]
        yield {
            "traceId": request.trace,
            "spanId": secrets.token_hex(8),
            "parentSpanId": request.span,
            "name": step.name,
            "kind": 1,  # internal
            "startTimeUnixNano": str(request.since_ns if step.start_ns is None else step.start_ns),
            "endTimeUnixNano": str(step.end_ns),
            "attributes": _attributes({"tokens": tokens, **step.attributes}),
            "links": [
                {
                    "traceId": other.trace,
                    "spanId": other.span,
                    "attributes": _attributes({"tokens": step.links[other]}),
                }
                for other in links
            ],
        }


def _attributes(values: Mapping[str, str | int]) -> list[Json]:
    return [
        {"key": key, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}}
        for key, value in values.items()
    ]
