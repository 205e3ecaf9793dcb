"""Check each request before its route (keys, limits), and turn errors into responses.

A request is refused before its body is read wherever that is possible, and always before Triton is touched.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import hashlib
import hmac
import ipaddress
import itertools
import logging
import math
import re
import secrets
import traceback
from collections.abc import Iterable, Mapping
from typing import cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.edge.bodies import media_type
from gateway.edge.config import Config
from gateway.edge.counters import SLOT, Counters, InFlightSlot
from gateway.edge.errors import FORMS, RETRY, ApiError, ErrorForm, form_of_client, shown, timed_out
from gateway.edge.monitoring import is_loopback
from gateway.edge.outages import Outages
from gateway.edge.request_state import RequestState
from gateway.edge.routes import OTHER, ApiRoute, Routes

logger = logging.getLogger("gateway")

Headers = Mapping[bytes, bytes]  # names in lower case
REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:]*))(?::\d+)?")
# Clients need no key for these.
OPEN_PATHS = ("/health",)
# Clients on this machine need no key for this one.
METRICS_PATH = "/metrics"
# A proxy adds these to the requests that it passes on, and others that begin with X-Forwarded-.
PROXY_HEADERS = (b"forwarded", b"via", b"x-real-ip")
# The status in the metrics of a client that left, which gets no response.
CLIENT_LEFT = 499
CLOSE = {"connection": "close"}
# The schemes by which clients of an API, and browsers, send their key.
BEARER, BASIC = "Bearer", 'Basic realm="gateway", charset="UTF-8"'
# Headers for pages of GATEWAY_ORIGINS: those of a response that they may read, and what they may send.
READABLE = (
    b"access-control-expose-headers",
    b"x-request-id, retry-after, retry-after-ms, x-compute-type, x-compute-time",
)
VARY = b"vary", b"origin"
PREFLIGHT = {"access-control-allow-methods": "GET, POST", "access-control-max-age": "600"}
# The pauses that refusals ask for: 600 to 3000 ms, well mixed, so that clients that were refused together return one
# after the other. OpenAI's clients read milliseconds.
PAUSES_MS = [600 + 24 * (37 * step % 101) for step in range(101)]


class Admission:
    """The ASGI application: it admits a request to its route, or refuses it."""

    def __init__(self, app: ASGIApp, routes: Routes, config: Config, counters: Counters) -> None:
        self.counters = counters
        self._app = app  # what routes know as request.app
        self._routes = routes
        self._keys = config.keys
        self._origins = config.origins
        self._limits = config.limits
        self._outages = Outages()
        self._prefix = secrets.token_hex(6).encode()
        self._numbers = itertools.count()
        self._refusals = {
            form: itertools.cycle([_serialized(self._busy(pause_ms).response(form=form)) for pause_ms in PAUSES_MS])
            for form in FORMS
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: Headers = dict(scope["headers"])
        state = RequestState(self._request_id(headers), send, self._limits.timeout)
        scope["app"], scope["request_state"] = self._app, state
        if self._origins:
            state.headers = [*state.headers, VARY]
        if self._is_allowed(origin := headers.get(b"origin", b"")):
            state.headers = [*state.headers, (b"access-control-allow-origin", origin), READABLE]
        try:
            try:
                response = await self._response(state, scope, headers, receive)
            except (ApiError, RecursionError) as error:
                if isinstance(error, RecursionError):  # at JSON that could just be read, too
                    error = ApiError(400, "The body is nested too deeply.")
                # A client that waits for "100 Continue" may send its body, or not: only a new connection is clear.
                more = CLOSE if b"expect" in headers and not state.has_body else {}
                state.failure, response = error.cause, error.response(more, state.error_form)
            if response:
                # GatewayProtocol reports a client that leaves, so the response gets a `receive` that never returns.
                await response(scope, _wait_forever, state.send)
        except asyncio.CancelledError:
            await self._report_cancellation(state, scope)
        except Exception as error:
            state.failure = _origin(error)
            state.status = 500
            if not state.has_response:
                failed = ApiError(500, "The gateway failed. Its log shows where (`make logs`).")
                await failed.response(form=state.error_form)(scope, _wait_forever, state.send)
        finally:
            state.end()
            self.counters.request(state.route, state.status, state.seconds if state.has_body else None)
            if state.status >= 500:
                # Neither texts nor keys: they may be in the messages of exceptions.
                text = "request %s: %s was answered with %d%s"
                logger.error(text, state.id.decode(), state.route, state.status, state.failure)

    def client_left(self, scope: Scope) -> None:
        """End the request of a connection that was lost."""
        if "request_state" in scope:
            scope["request_state"].client_left()

    def refuse_at_once(self, url: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
        """Return the whole response to a POST if there are too many already; None if it needs a closer look."""
        if self.counters.running < self._limits.in_flight:
            return None
        fields: Headers = dict(headers)
        try:
            self._check_client(fields)
        except ApiError:
            return None
        if self._is_allowed(fields.get(b"origin", b"")):  # whose page may read the refusal
            return None
        path = url.partition(b"?")[0].decode("latin-1")
        route = self._routes.match({"type": "http", "method": "POST", "path": path})
        self.counters.request(route.path if route else OTHER, 429)
        return next(self._refusals[_error_form(route, path, fields)]) % self._request_id(fields)

    async def _response(self, state: RequestState, scope: Scope, headers: Headers, receive: Receive) -> Response | None:
        """Return the response of the request's route, or None if the client leaves before the end of its body."""
        if scope["method"] == "OPTIONS" and self._is_allowed(headers.get(b"origin", b"")):
            # Browsers ask before they send a page's request, without its key.
            asked = headers.get(b"access-control-request-headers", b"").decode("latin-1")
            return Response(status_code=204, headers=PREFLIGHT | {"access-control-allow-headers": asked})
        route = self._admit(state, scope, headers)
        body: bytes | None = b""
        is_post = scope["method"] == "POST"
        if is_post:
            state.slot = InFlightSlot(self.counters)
            SLOT.set(state.slot)
            state.slot.hold()
            body = await self._read_body(state, receive)
        if body is None:
            state.status = CLIENT_LEFT
            return None
        request = _ReadRequest(scope, body)
        state.body_is_read()

        async def answer() -> Response:
            return cast(Response, await route.endpoint(request))

        # A GET holds none of GATEWAY_IN_FLIGHT, so it does not wait.
        return await (self._outages.answer(answer) if is_post else answer())

    async def _report_cancellation(self, state: RequestState, scope: Scope) -> None:
        if state.ended_by == "client":
            state.status = CLIENT_LEFT
            return
        if state.ended_by == "time" and not state.has_body:
            error = ApiError(408, "The body arrived too slowly for GATEWAY_TIMEOUT.", code="timeout", headers=CLOSE)
        elif state.ended_by == "time":
            error = timed_out()
        else:
            error = ApiError(503, "The gateway is being stopped. Try again.", headers=RETRY)
        state.status = error.status
        if not state.has_response:
            await error.response(form=state.error_form)(scope, _wait_forever, state.send)

    # --- checks -----------------------------------------------------------------------------------------------------

    def _request_id(self, headers: Headers) -> bytes:
        own = headers.get(b"x-request-id", b"")
        return own if REQUEST_ID.fullmatch(own) else b"%s-%x" % (self._prefix, next(self._numbers))

    def _admit(self, state: RequestState, scope: Scope, headers: Headers) -> Route:
        """Return the request's route. Raise ApiError if it is not admitted."""
        _check_host(scope)
        path = scope["path"]
        route = self._routes.match(scope)
        is_api = isinstance(route, ApiRoute)
        state.error_form = _error_form(route, path, headers)
        if path not in OPEN_PATHS and not (path == METRICS_PATH and _is_from_this_machine(scope, headers)):
            self._check_client(headers, BEARER if is_api or path.startswith("/v1/") else BASIC)
        if route is None:
            raise self._routes.not_found(path)
        state.route = route.path
        self._routes.check_method(route, scope)
        if scope["method"] == "POST":
            self._check_origin(headers)
            if isinstance(route, ApiRoute):
                _check_media_type(route, headers)
            _check_encoding(headers)
            if self.counters.running >= self._limits.in_flight:
                raise self._busy()
            if int(headers.get(b"content-length", 0)) > self._limits.body:
                raise self._too_large()
        return route

    def _check_client(self, headers: Headers, scheme: str = BEARER) -> None:
        if not self._keys:
            # The name of another site can lead to this machine. Then the browser sends that name.
            if not _is_local_name(headers.get(b"host", b"").decode("latin-1")):
                message = "Without API_KEYS the gateway answers only requests to localhost or to an IP address."
                raise ApiError(403, message, code="host_not_allowed")
        elif not (self._has_key(headers.get(b"authorization", b"")) or self._has_own_header(headers)):
            message = "Incorrect or missing API key: send one of API_KEYS as 'Authorization: Bearer KEY'."
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": scheme})

    def _has_key(self, authorization: bytes) -> bool:
        scheme, _, value = authorization.partition(b" ")
        if scheme.lower() == b"basic":  # a browser's: any user, and the key as the password
            try:
                value = base64.b64decode(value.strip(), validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != b"bearer":
            return False
        return self._is_key(value)

    def _has_own_header(self, headers: Headers) -> bool:
        """Return whether a header of Anthropic's or Azure's clients has a key."""
        return any(self._is_key(headers.get(name, b"")) for name in (b"x-api-key", b"api-key"))

    def _is_allowed(self, origin: bytes) -> bool:
        return origin.lower() in self._origins

    def _is_key(self, value: bytes) -> bool:
        digest = hashlib.sha256(value.strip()).digest()
        # Compare with all, so that the time does not reveal which one is equal.
        return any([hmac.compare_digest(digest, key) for key in self._keys])

    def _check_origin(self, headers: Headers) -> None:
        """Refuse what a page of another site makes a browser send. No page of another site knows a key."""
        origin = headers.get(b"origin")
        is_bearer = bool(self._keys) and headers.get(b"authorization", b"")[:6].lower() == b"bearer"
        if origin is None or is_bearer or self._is_allowed(origin) or self._has_own_header(headers):
            return
        # The scheme does not matter: a proxy may end TLS.
        if origin.lower().partition(b"://")[2] != headers.get(b"host", b"").lower():
            message = (
                "Pages of other sites must send a key of API_KEYS as 'Authorization: Bearer KEY', or be listed in "
                "GATEWAY_ORIGINS on the server."
            )
            raise ApiError(403, message, code="origin_not_allowed")

    async def _read_body(self, state: RequestState, receive: Receive) -> bytes | None:
        """Return the body, or None if the client leaves before its end."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message["body"])
            size += len(message["body"])
            state.body_grew(len(message["body"]))
            if size > self._limits.body:
                raise self._too_large()
            if not message["more_body"]:
                return b"".join(parts)

    def _busy(self, pause_ms: int = 1000) -> ApiError:
        message = f"{self._limits.in_flight} requests are in flight, the limit (GATEWAY_IN_FLIGHT). Try again."
        pause = {"retry-after": str(math.ceil(pause_ms / 1000)), "retry-after-ms": str(pause_ms)}
        return ApiError(429, message, code="rate_limit_exceeded", headers=pause)

    def _too_large(self) -> ApiError:
        message = f"The body is larger than {self._limits.body} bytes (GATEWAY_BODY)."
        return ApiError(413, message, code="request_too_large")


def _error_form(route: Route | None, path: str, headers: Headers) -> ErrorForm:
    """Return the form of errors of the route's API, or of the client's if the path is of no API or of several."""
    return (route.error_form if isinstance(route, ApiRoute) else None) or form_of_client(path, headers)


def _serialized(response: Response) -> bytes:
    """Return a response as it goes over the wire, with %b for the request's id."""
    head = b"".join(b"%b: %b\r\n" % header for header in response.raw_headers)
    return b"HTTP/1.1 429 Too Many Requests\r\n%bx-request-id: %%b\r\n\r\n%b" % (head, bytes(response.body))


class _ReadRequest(Request):
    """A request whose body was read."""

    def __init__(self, scope: Scope, body: bytes) -> None:
        super().__init__(scope, _wait_forever)
        self._content = body

    async def body(self) -> bytes:
        return self._content


async def _wait_forever() -> Message:
    return cast(Message, await asyncio.get_running_loop().create_future())


def _is_from_this_machine(scope: Scope, headers: Headers) -> bool:
    """Return whether a client on this machine sent the request, for itself.

    A page of another site whose name leads to this machine has that name in the header Host. In a container, clients on
    the host come from the address of Docker's bridge. Others may come from there, too, so that address does not count.
    """
    address, _ = scope["client"] or ("", 0)
    is_local = is_loopback(address) and is_loopback(_name(headers.get(b"host", b"").decode("latin-1")))
    return is_local and not any(name in PROXY_HEADERS or name.startswith(b"x-forwarded-") for name in headers)


def _name(host: str) -> str:
    """Return the name or address in a Host header, or the whole header if it is neither."""
    match = HOST.fullmatch(host)
    return (match[1] or match[2]).lower() if match else host


@functools.lru_cache(1024)
def _is_local_name(host: str) -> bool:
    """Return whether a Host header is an address, localhost, or a name without a domain, such as a container's."""
    name = _name(host)
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.endswith(".localhost") or "." not in name
    return True


def _check_host(scope: Scope) -> None:
    """Raise ApiError unless the request names one host, as HTTP/1.1 requires."""
    hosts = [name for name, _ in scope["headers"]].count(b"host")
    if hosts > 1 or (not hosts and scope["http_version"] == "1.1"):
        raise ApiError(400, f"The request has {hosts or 'no'} Host header{'s' * (hosts > 1)}: send exactly one.")


def _check_encoding(headers: Headers) -> None:
    """Raise ApiError for a compressed body: unpacked, it may be larger than GATEWAY_BODY."""
    encoding = headers.get(b"content-encoding", b"").strip().lower()
    if encoding not in (b"", b"identity"):
        message = (
            f"Bodies with 'content-encoding: {shown(encoding.decode('latin-1'))}' are refused: do not compress them."
        )
        raise ApiError(415, message, headers={"accept-encoding": "identity"})


def _check_media_type(route: ApiRoute, headers: Headers) -> None:
    """Raise ApiError unless the route reads such a body."""
    if not route.body.types.fullmatch(media_type(headers.get(b"content-type", b"").decode("latin-1"))):
        raise ApiError(415, f"Send {route.body.description}.")


def _origin(error: Exception) -> str:
    """Return the kind of the exception and where it was raised, without its message."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({type(error).__name__} in {frame.filename}, line {frame.lineno})"
