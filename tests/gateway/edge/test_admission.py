"""The gateway's checks before a route runs, and requests that end early; Triton is a stand-in."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import logging
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock
from urllib.parse import unquote

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway import app
from gateway.edge import request_state, server
from gateway.edge.config import Config, Limits
from gateway.edge.request_state import RequestState
from tests.support.gateway import RunningGateway, gateway_before, running_gateway
from tests.support.triton_stand_in import Model, TritonStandIn, embedding
from triton_transformers.tensors import Tensor

PATH = "/v1/embeddings"
BODY = {"model": "embedding", "input": "a text"}
JSON = {"content-type": "application/json"}
CLOSE = b"connection: close\r\n"
KEYS = ("first-key-of-the-test", "second-key-of-the-test")
LIMITS = Limits(in_flight=2, body=2000, timeout=60)


@pytest.fixture(scope="module")
def triton() -> Iterator[TritonStandIn]:
    with TritonStandIn(embedding()) as stand_in:
        yield stand_in


@pytest.fixture(scope="module")
def config(triton: TritonStandIn) -> Config:
    return Config(triton=triton.address, systems=("embedding",), limits=LIMITS)


@pytest.fixture(scope="module")
def gateway(config: Config) -> Iterator[RunningGateway]:
    with running_gateway(config) as running:
        yield running


@pytest.fixture(scope="module")
def locked(config: Config) -> Iterator[RunningGateway]:
    """Run a gateway that requires one of two keys."""
    keys = tuple(hashlib.sha256(key.encode()).digest() for key in KEYS)
    with running_gateway(replace(config, keys=keys)) as running:
        yield running


@pytest.fixture(scope="module")
def hasty(config: Config) -> Iterator[RunningGateway]:
    """Run a gateway whose requests have one second, in which Triton gets them on a busy machine too."""
    with running_gateway(replace(config, limits=replace(LIMITS, timeout=1.0))) as running:
        yield running


@pytest.fixture
def held(triton: TritonStandIn) -> Iterator[Model]:
    """Hold back Triton's answers until the end of the test, or until the model's gate is opened."""
    model = triton.models["embedding"]
    triton.wait_until(lambda: not triton.running)
    triton.received.clear()
    triton.cancelled.clear()
    model.gate.clear()
    yield model
    model.gate.set()
    triton.wait_until(lambda: not triton.running)


@contextlib.contextmanager
def full(gateway: RunningGateway, triton: TritonStandIn, **headers: str) -> Iterator[None]:
    """Hold as many requests in flight as the gateway allows."""
    with contextlib.ExitStack() as stack:
        for _ in range(LIMITS.in_flight):
            stack.enter_context(gateway.sent("POST", PATH, BODY, headers))
        triton.wait_until(lambda: len(triton.running) == LIMITS.in_flight)
        yield
    # Triton may have answered before the gateway knows.
    gateway.wait_until(lambda: metric(gateway, "gateway_in_flight") == 0)


def connect(gateway: RunningGateway) -> socket.socket:
    return socket.create_connection(("127.0.0.1", gateway.port), 40)


def exchange(connection: socket.socket, request: bytes) -> bytes:
    connection.sendall(request)
    return connection.recv(65536)


def raw(gateway: RunningGateway, request: bytes) -> bytes:
    """Send bytes and return all that comes back until the gateway closes the connection."""
    with connect(gateway) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def basic(password: str) -> str:
    return f"Basic {base64.b64encode(f'any:{password}'.encode()).decode()}"


def head(**headers: Any) -> bytes:
    lines = {"host": "localhost", "content_type": "application/json"} | headers
    fields = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
    return f"POST {PATH} HTTP/1.1\r\n{fields}\r\n".encode()


def post_of(body: Any) -> bytes:
    content = json.dumps(body).encode()
    return head(content_length=len(content)) + content


def metric(gateway: RunningGateway, name: str, **labels: str) -> float:
    return gateway.app.counters.registry.get_sample_value(name, labels) or 0.0


# --- request ids ----------------------------------------------------------------------------------------------------


def test_request_id_is_returned_or_replaced(gateway: RunningGateway) -> None:
    for id in ("abc", "A.b_c-1", "x" * 128):
        assert gateway.post(PATH, BODY, x_request_id=id).headers["x-request-id"] == id
    unusable = ["", "a b", "x" * 129, "é", "a\tb"]
    new = [gateway.get("/health", x_request_id=id).headers["x-request-id"] for id in unusable]
    assert len({*new, *unusable}) == len(new) + len(unusable)


# --- keys and hosts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [f"Bearer {KEYS[0]}", f"bearer {KEYS[1]}", f"Bearer  {KEYS[0]} ", basic(KEYS[0]), basic(KEYS[1])],
)
def test_key_opens_the_gateway(locked: RunningGateway, value: str) -> None:
    assert locked.post(PATH, BODY, authorization=value, host="models.example").status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x_api_key": KEYS[1]}, 200),
        ({"x_api_key": "wrong", "authorization": f"Bearer {KEYS[0]}"}, 200),
        ({"x_api_key": KEYS[0], "authorization": "Bearer wrong"}, 200),
        ({"x_api_key": KEYS[0], "origin": "https://app.example"}, 200),
        ({"x_api_key": "wrong", "authorization": basic(KEYS[0]), "origin": "https://evil.example"}, 403),
        ({"api_key": KEYS[0], "origin": "https://app.example"}, 200),
        ({"x_api_key": "wrong"}, 401),
        ({"api_key": "wrong"}, 401),
        ({"x_api_key": ""}, 401),
        ({"x_api_key": f"Bearer {KEYS[0]}"}, 401),
    ],
)
def test_anthropics_and_azures_clients_have_headers_of_their_own(
    locked: RunningGateway, headers: Any, status: int
) -> None:
    assert locked.post(PATH, BODY, **headers).status == status


@pytest.mark.parametrize(
    "value",
    [
        *("", "Bearer", "Bearer ", "Bearer wrong", f"Bearer {KEYS[0]}x", f"Bearer {KEYS[0]} {KEYS[1]}", KEYS[0]),
        *(f"Token {KEYS[0]}", f"Bearer {hashlib.sha256(KEYS[0].encode()).hexdigest()}", f"Basic {KEYS[0]}"),
        *(f"Basic {base64.b64encode(KEYS[0].encode()).decode()}", "Basic é", None),
    ],
)
def test_wrong_key_is_refused(locked: RunningGateway, triton: TritonStandIn, value: str | None) -> None:
    triton.received.clear()
    reply = locked.post(PATH, BODY, **({} if value is None else {"authorization": value}))
    assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    assert reply.headers["www-authenticate"] == "Bearer"
    assert not triton.received


def test_only_health_is_open_without_a_key(locked: RunningGateway) -> None:
    assert [locked.get(path).status for path in ("/health", "/v1/nothing")] == [200, 401]


@pytest.mark.parametrize(
    ("status", "hosts"),
    [
        (200, "localhost localhost:8080 127.0.0.1:8080 192.0.2.1 [::1]:8080 gateway:8080 a.localhost"),
        (403, "evil.example EVIL.example:8080 localhost.evil.example 127.0.0.1.nip.io evil.example:80:80"),
        (403, "[evil.example] evil.example@localhost."),
    ],
)
def test_only_local_hosts_are_accepted_without_keys(gateway: RunningGateway, status: int, hosts: str) -> None:
    for host in hosts.split():
        reply = gateway.post(PATH, BODY, host=host)
        assert (host, reply.status) == (host, status)
        assert status == 200 or reply.error["code"] == "host_not_allowed"


def test_pages_of_other_sites_need_the_key_in_a_header(gateway: RunningGateway, locked: RunningGateway) -> None:
    for origin, status in ((gateway.url, 200), ("https://evil.example", 403), ("null", 403), ("http://[", 403)):
        reply = gateway.post(PATH, BODY, origin=origin)
        assert (origin, reply.status) == (origin, status)
        assert status == 200 or reply.error["code"] == "origin_not_allowed"
    assert locked.post(PATH, BODY, authorization=basic(KEYS[0]), origin="https://evil.example").status == 403
    assert locked.post(PATH, BODY, authorization=f"Bearer {KEYS[0]}", origin="https://app.example").status == 200


ORIGIN = "https://app.example"
ASKS = {"access_control_request_method": "POST", "access_control_request_headers": "authorization, content-type"}


@pytest.mark.parametrize("keys", [(), KEYS[:1]])
def test_page_of_a_listed_origin_may_send_requests(
    config: Config, triton: TritonStandIn, keys: tuple[str, ...]
) -> None:
    digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)
    sent = {"origin": ORIGIN} | ({"authorization": f"Bearer {keys[0]}"} if keys else {})
    with running_gateway(replace(config, keys=digests, origins=frozenset({ORIGIN.encode()}))) as gateway:
        asked = gateway.request("OPTIONS", PATH, headers={"origin": ORIGIN, **ASKS})
        allowed = {name: value for name, value in asked.headers.items() if name.startswith("access-control-allow")}
        assert (asked.status, allowed) == (
            204,
            {
                "access-control-allow-origin": ORIGIN,
                "access-control-allow-methods": "GET, POST",
                "access-control-allow-headers": "authorization, content-type",
            },
        )
        for body, status in ((BODY, 200), ({}, 400)):
            reply = gateway.post(PATH, body, **sent)
            assert (reply.status, reply.headers["access-control-allow-origin"]) == (status, ORIGIN)
            assert "x-request-id" in reply.headers["access-control-expose-headers"]
        if keys:
            refused = gateway.post(PATH, BODY, origin=ORIGIN)
            assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)
        # Another site is refused as without the setting.
        for reply in (
            gateway.request("OPTIONS", PATH, headers={"origin": "https://evil.example", **ASKS}),
            gateway.post(PATH, BODY, **sent | {"origin": f"{ORIGIN}.evil.example", "authorization": ""}),
        ):
            assert reply.status in (401, 403, 405)
            assert not any(name.startswith("access-control") for name in reply.headers)


def test_page_of_a_listed_origin_can_read_a_refusal(config: Config, triton: TritonStandIn, held: Model) -> None:
    with running_gateway(replace(config, origins=frozenset({ORIGIN.encode()}))) as gateway, full(gateway, triton):
        reply = gateway.post(PATH, BODY, origin=ORIGIN)
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (429, ORIGIN)


# --- metrics --------------------------------------------------------------------------------------------------------


def test_metrics_need_no_key_on_this_machine(gateway: RunningGateway, locked: RunningGateway) -> None:
    for host in ("localhost", "localhost:8080", "127.0.0.1:8080", "[::1]:8080", "a.localhost"):
        reply = locked.get("/metrics", host=host)
        assert (host, reply.status) == (host, 200)
        assert reply.headers["content-type"].startswith("text/plain; version=")
        assert b"\ngateway_in_flight 0.0\n" in reply.body
    reply = locked.get("/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert reply.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    # Without keys, the gateway's port is on loopback; in a container, clients come from Docker's bridge.
    assert gateway.get("/metrics", host="gateway:8080").status == 200
    assert gateway.get("/metrics", host="evil.example").status == 403


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("host", ["models.example", "192.0.2.1", "gateway:8080", "localhost.evil.example"]),
        *((f"x_{name}", ["127.0.0.1"]) for name in ("forwarded_for", "forwarded_proto", "real_ip")),
        ("forwarded", ["for=127.0.0.1"]),
        ("via", ["1.1 proxy"]),
    ],
)
def test_metrics_behind_a_proxy_need_a_key(locked: RunningGateway, name: str, values: list[str]) -> None:
    for value in values:
        reply = locked.get("/metrics", **{name: value})
        assert (value, reply.status, reply.error["code"]) == (value, 401, "invalid_api_key")
        assert locked.get("/metrics", **{name: value, "authorization": f"Bearer {KEYS[0]}"}).status == 200


@pytest.mark.parametrize("address", ["172.18.0.1", "192.0.2.1", "10.0.2.100", None])
def test_metrics_from_another_address_need_a_key(config: Config, address: str | None) -> None:
    """Docker's bridge is the address of clients of the host; with rootless Docker, of all clients."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def ask() -> None:
        scope = {"type": "http", "method": "GET", "path": "/metrics", "http_version": "1.1"}
        scope |= {"headers": [(b"host", b"localhost:8080")], "client": (address, 50000) if address else None}
        await app.build(replace(config, keys=(bytes(32),)))(scope, ask, send)

    asyncio.run(ask())
    assert sent[0]["status"] == 401


# --- methods, paths and types ---------------------------------------------------------------------------------------


def test_unknown_path_is_not_found(gateway: RunningGateway) -> None:
    for path in ("/nothing", "/v1", "/v1/embeddings/", "/v1//embeddings", "/%00", f"/{'x' * 5000}"):
        reply = gateway.get(path)
        assert (path, reply.status, reply.error["code"]) == (path, 404, "not_found")
        assert len(reply.body) < 500
    for path in ("/chat/completions", "/v1/chat/completions/", "/v1/v1/chat/completions"):
        message = f"There is nothing at {path}. Did you mean /v1/chat/completions?"
        assert gateway.post(path, BODY).error["message"] == message


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", PATH, "POST"),
        ("HEAD", PATH, "POST"),
        ("OPTIONS", PATH, "POST"),
        ("PUT", PATH, "POST"),
        ("DELETE", "/v1/models/embedding", "GET, HEAD"),
        ("PUT", "/try/a%20b", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
    ],
)
def test_other_method_is_refused(gateway: RunningGateway, method: str, path: str, allowed: str) -> None:
    reply = gateway.request(method, path)
    assert (reply.status, reply.headers["allow"]) == (405, allowed)
    if method != "HEAD":
        assert reply.error["type"] == "invalid_request_error"
        assert reply.error["message"] == f"{unquote(path)} answers {allowed}, not {method}."


@pytest.mark.parametrize(
    ("type", "encoding", "status"),
    [
        *((type, "", 200) for type in ("application/json; charset=utf-8", "Application/JSON;charset=x", "")),
        *(("application/json", encoding, 200) for encoding in ("identity", "Identity")),
        *((type, "", 415) for type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")),
        *(("application/json", encoding, 415) for encoding in ("gzip", "GZIP", "br", "gzip, identity", "x" * 1000)),
    ],
)
def test_only_plain_json_is_accepted(gateway: RunningGateway, type: str, encoding: str, status: int) -> None:
    reply = gateway.post(PATH, BODY, content_type=type, content_encoding=encoding)
    assert reply.status == status
    if status == 415 and encoding:
        assert reply.headers["accept-encoding"] == "identity"
        assert reply.error["message"].endswith("are refused: do not compress them.") and len(reply.body) < 300


# --- limits ---------------------------------------------------------------------------------------------------------


def test_request_beyond_the_limit_gets_429_before_its_body(
    gateway: RunningGateway, triton: TritonStandIn, held: Model
) -> None:
    before = metric(gateway, "gateway_requests_total", route=PATH, code="429")
    with full(gateway, triton):
        assert metric(gateway, "gateway_in_flight") == LIMITS.in_flight
        with connect(gateway) as connection:
            answer = exchange(connection, head(content_length=100, x_request_id="my-id")).decode()
        assert answer.startswith("HTTP/1.1 429 Too Many Requests\r\n")
        assert re.search("\r\nretry-after: [123]\r\n", answer) and "\r\nx-request-id: my-id\r\n" in answer
        assert json.loads(answer.partition("\r\n\r\n")[2])["error"]["code"] == "rate_limit_exceeded"
        assert len(triton.received) == LIMITS.in_flight
        assert gateway.get("/health").status == gateway.get("/v1/models").status == 200
    assert metric(gateway, "gateway_requests_total", route=PATH, code="429") == before + 1


def test_refused_connection_serves_the_next_request(
    gateway: RunningGateway, triton: TritonStandIn, held: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "BRAKE_S", 0.01)
    with full(gateway, triton), connect(gateway) as connection:
        for _ in range(3):
            assert exchange(connection, post_of(BODY)).startswith(b"HTTP/1.1 429 ")
        held.gate.set()
        gateway.wait_until(lambda: metric(gateway, "gateway_in_flight") == 0)
        assert exchange(connection, post_of(BODY)).startswith(b"HTTP/1.1 200 ")


def test_refused_clients_do_not_return_together(gateway: RunningGateway, triton: TritonStandIn, held: Model) -> None:
    with full(gateway, triton):
        answers = [gateway.post(PATH, BODY).headers for _ in range(8)]
    pauses = [int(headers["retry-after-ms"]) for headers in answers]
    assert len(set(pauses)) == 8 and max(pauses) - min(pauses) > 1500
    assert {headers["retry-after"] for headers in answers} == {"1", "2", "3"}
    assert all(0 <= 1000 * int(headers["retry-after"]) - ms < 1000 for headers, ms in zip(answers, pauses, strict=True))
    assert min(pauses) > 1000 * server.BRAKE_S


def test_connection_that_ignores_retry_after_is_slowed_down(
    gateway: RunningGateway, triton: TritonStandIn, held: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "BRAKE_S", 3600)
    with full(gateway, triton), connect(gateway) as connection:
        assert exchange(connection, post_of(BODY)).startswith(b"HTTP/1.1 429 ")
        connection.sendall(post_of(BODY))
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(65536)


def test_pipelined_requests_are_answered_in_order(gateway: RunningGateway, triton: TritonStandIn, held: Model) -> None:
    get = b"GET %b HTTP/1.1\r\nhost: localhost\r\n%b\r\n"
    requests = [get % (b"/health", b""), post_of(BODY), get % (b"/nothing", b""), get % (b"/health", CLOSE)]
    with full(gateway, triton):
        assert re.findall(rb"HTTP/1.1 (\d+)", raw(gateway, b"".join(requests))) == [b"200", b"429", b"404", b"200"]


def test_wrong_key_is_refused_before_the_limit(locked: RunningGateway, triton: TritonStandIn, held: Model) -> None:
    key = {"authorization": f"Bearer {KEYS[0]}"}
    with full(locked, triton, **key):
        assert locked.post(PATH, BODY).status == 401
        assert locked.post(PATH, BODY, **key).status == 429


def test_slots_are_free_again_after_every_kind_of_end(gateway: RunningGateway) -> None:
    for _ in range(3):
        assert gateway.post(PATH, b"{").status == 400
        assert gateway.post(PATH, {"model": "nothing", "input": "a"}).status == 404
        assert gateway.post(PATH, BODY).status == 200
    gateway.wait_until(lambda: metric(gateway, "gateway_in_flight") == 0)


def test_body_above_the_limit_is_refused_before_it_is_read(gateway: RunningGateway) -> None:
    chunks = (b"1f4\r\n" + b" " * 500 + b"\r\n") * 5
    for request in head(content_length=10**12), head(transfer_encoding="chunked") + chunks:
        with connect(gateway) as connection:
            assert exchange(connection, request).startswith(b"HTTP/1.1 413 ")
    body = json.dumps(BODY).encode()
    assert gateway.post(PATH, body.ljust(LIMITS.body)).status == 200
    assert gateway.post(PATH, body.ljust(LIMITS.body + 1)).status == 413


def test_chunked_body_is_accepted(gateway: RunningGateway) -> None:
    reply = gateway.request("POST", PATH, iter([json.dumps(BODY).encode()[:9], json.dumps(BODY).encode()[9:]]), JSON)
    assert reply.status == 200


def test_framing_of_many_small_chunks_is_no_large_head(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_HEAD", 1000)
    body = json.dumps(BODY).encode().ljust(LIMITS.body)
    chunks = b"".join([b"1\r\n%c\r\n" % byte for byte in body]) + b"0\r\n\r\n"
    with connect(gateway) as connection:
        connection.sendall(head(transfer_encoding="chunked"))
        for start in range(0, len(chunks), 600):
            connection.sendall(chunks[start : start + 600])
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")


def test_client_that_waits_for_continue_gets_it(gateway: RunningGateway) -> None:
    body = json.dumps(BODY).encode()
    with connect(gateway) as connection:
        waiting = head(expect="100-continue", content_length=len(body))
        assert exchange(connection, waiting) == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert exchange(connection, body).startswith(b"HTTP/1.1 200 ")
    refusal = raw(gateway, head(expect="100-continue", content_length=10**12))
    assert refusal.startswith(b"HTTP/1.1 413 ") and b"connection: close" in refusal


# --- time -----------------------------------------------------------------------------------------------------------


def test_slow_body_gets_408(hasty: RunningGateway) -> None:
    assert raw(hasty, head(content_length=100) + b"{").startswith(b"HTTP/1.1 408 ")
    hasty.wait_until(lambda: metric(hasty, "gateway_in_flight") == 0)


@pytest.mark.parametrize(("size", "ended_by"), [(0, "time"), (60 * request_state.MIN_RATE, "")])
def test_body_that_grows_has_more_time(size: int, ended_by: str) -> None:
    async def read() -> str:
        state = RequestState(b"", AsyncMock(), 0)
        state.body_grew(size)
        with contextlib.suppress(asyncio.CancelledError):
            for _ in range(5):
                await asyncio.sleep(0)
        state.end()
        return state.ended_by

    assert asyncio.run(read()) == ended_by


def test_connection_without_a_head_is_closed(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_S", 0.1)
    for part in (b"", b"POST /v1", b"\r\n"):
        # On a busy machine, the gateway closes it before the part is sent.
        with connect(gateway) as connection, contextlib.suppress(ConnectionError):
            assert exchange(connection, part) == b""


def test_rest_of_a_head_on_a_used_connection_has_its_time(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(gateway) as connection:
        get = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
        assert exchange(connection, get).startswith(b"HTTP/1.1 200 ")
        monkeypatch.setattr(server, "HEAD_S", 0.1)
        assert exchange(connection, get[:30]) == b""


# --- clients that leave ---------------------------------------------------------------------------------------------


def test_client_that_leaves_with_half_a_body_frees_its_slot(gateway: RunningGateway, triton: TritonStandIn) -> None:
    triton.received.clear()
    with connect(gateway) as connection:
        connection.sendall(head(content_length=100) + b"{")
        gateway.wait_until(lambda: metric(gateway, "gateway_in_flight") == 1)
    gateway.wait_until(lambda: metric(gateway, "gateway_in_flight") == 0)
    assert not triton.received


def test_client_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    width = 4_000_000
    model = Model("wide", {"input_text": ("STRING", [1])}, {"output__0": ("FP32", [width])}, lambda _: [zeros])
    zeros = [Tensor("output__0", "FP32", [1, width], bytes(4 * width))]
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.2)
    with gateway_before(model) as (gateway, _), connect(gateway) as connection:
        connection.sendall(post_of({"model": "wide", "input": "a", "encoding_format": "base64"}))
        assert connection.recv(12) == b"HTTP/1.1 200"
        gateway.wait_until(lambda: not gateway.server.server_state.connections)


# --- malformed HTTP -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        head(content_length="many"),
        head(content_length="1").replace(b"\r\n\r\n", b"\r\ncontent-length: 2\r\n\r\n"),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        head(content_length="1", transfer_encoding="chunked"),
    ],
    ids=range(9),
)
def test_malformed_request_gets_400_in_openais_form(gateway: RunningGateway, request_bytes: bytes) -> None:
    answer = raw(gateway, request_bytes)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [
        (b"1.1", b"", b"400"),
        (b"1.1", b"host: localhost\r\nhost: localhost\r\n", b"400"),
        (b"1.0", b"host: localhost\r\nHost: 127.0.0.1\r\n", b"400"),
        (b"1.1", b"host: localhost\r\n", b"200"),
        (b"1.0", b"", b"200"),
    ],
)
def test_request_names_one_host(
    gateway: RunningGateway, locked: RunningGateway, version: bytes, hosts: bytes, status: bytes
) -> None:
    key = b"authorization: Bearer %b\r\n" % KEYS[0].encode()
    for running, path in ((gateway, b"/health"), (gateway, b"/v1/models"), (locked, b"/v1/models")):
        answer = raw(running, b"GET %b HTTP/%b\r\n%b%b%b\r\n" % (path, version, hosts, key, CLOSE))
        assert answer.startswith(b"HTTP/1.1 %b " % status)
        assert status == b"200" or b"send exactly one" in answer


@pytest.mark.parametrize("endless", [b"GET /" + b"x" * 66_000, head()[:-2] + b"a: b\r\n" * 11_000])
def test_endless_head_is_refused(gateway: RunningGateway, endless: bytes) -> None:
    assert raw(gateway, endless).startswith(b"HTTP/1.1 431 ")


def test_endless_trailers_end_the_connection(gateway: RunningGateway) -> None:
    with connect(gateway) as connection, pytest.raises(ConnectionError):
        connection.sendall(head(transfer_encoding="chunked") + b"0\r\n")
        while True:
            connection.sendall(b"a: b\r\n" * 1000)


@pytest.mark.parametrize("is_split", [False, True])
def test_offer_of_another_protocol_is_ignored(gateway: RunningGateway, is_split: bool) -> None:
    """Java's HTTP client offers HTTP/2 in its first request."""
    body = json.dumps(BODY).encode()
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2_settings": "AAMAAABkAAQAAP__"}
    with connect(gateway) as connection:
        connection.sendall(head(content_length=len(body), **offer))
        if is_split:
            gateway.wait_until(lambda: metric(gateway, "gateway_in_flight") == 1)
        assert exchange(connection, body).startswith(b"HTTP/1.1 200 ")
        assert exchange(connection, post_of(BODY)).startswith(b"HTTP/1.1 200 ")


# --- failures, logs and metrics -------------------------------------------------------------------------------------


async def broken(request: Request) -> Response:
    raise KeyError("a secret text")


def test_failure_is_logged_without_its_text(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app, "ROUTES", [Route("/v1/broken", broken, methods=["POST"])])
    with caplog.at_level(logging.ERROR), running_gateway(config) as gateway:
        reply = gateway.post("/v1/broken", {}, x_request_id="my-id")
    assert (reply.status, reply.error["type"]) == (500, "server_error")
    assert reply.headers["x-request-id"] == "my-id"
    (record,) = caplog.records
    assert "my-id: /v1/broken was answered with 500 (KeyError in " in record.getMessage()
    assert "secret" not in caplog.text


def test_requests_of_clients_leave_no_log(gateway: RunningGateway, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        gateway.post(PATH, BODY)
        gateway.post(PATH, {"model": "nothing", "input": "a secret text"})
        raw(gateway, b"nonsense\r\n\r\n")
    assert not caplog.records


def test_requests_are_counted_by_route_and_code(gateway: RunningGateway) -> None:
    def count(route: str, code: str) -> float:
        return metric(gateway, "gateway_requests_total", route=route, code=code)

    names = [(PATH, "200"), (PATH, "400"), ("other", "404"), ("/v1/models/{model:path}", "404")]
    before = [count(*name) for name in names]
    seconds = metric(gateway, "gateway_request_seconds_count", route=PATH)
    tokens = metric(gateway, "gateway_tokens_total", kind="prompt")
    gateway.post(PATH, BODY)
    gateway.post(PATH, b"{")
    gateway.get("/a/path/of/the/client")
    gateway.get("/v1/models/nothing")
    gateway.get("/health")  # so that the last request is counted
    assert [count(*name) for name in names] == [number + 1 for number in before]
    assert metric(gateway, "gateway_request_seconds_count", route=PATH) == seconds + 2
    assert metric(gateway, "gateway_tokens_total", kind="prompt") == tokens + 4


# --- the end --------------------------------------------------------------------------------------------------------


def test_request_in_flight_is_finished_when_the_gateway_ends(
    config: Config, triton: TritonStandIn, held: Model
) -> None:
    with running_gateway(config) as gateway, gateway.sent("POST", PATH, BODY) as response:
        triton.wait_until(lambda: bool(triton.running))
        gateway.server.should_exit = True
        gateway.wait_until(gateway.refuses_connections)
        held.gate.set()
        assert response().status == 200


def test_idle_connection_does_not_delay_the_end(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "GRACE_S", 3600)
    with running_gateway(config) as gateway, connect(gateway):
        gateway.server.should_exit = True
        gateway.wait_until(lambda: not gateway.thread.is_alive())


def test_idle_connection_gets_one_more_answer_when_the_gateway_ends(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answer a request that the client may have sent before it can know of the end."""
    monkeypatch.setattr(server, "FAREWELL_S", 3600)
    with running_gateway(config) as gateway, connect(gateway) as connection:
        assert b"connection: close" not in exchange(connection, post_of(BODY))
        gateway.server.should_exit = True
        gateway.wait_until(gateway.refuses_connections)
        connection.sendall(post_of(BODY))
        response = b"".join(iter(lambda: connection.recv(65536), b""))
        assert response.startswith(b"HTTP/1.1 200 ")
        assert b"\r\nconnection: close\r\n" in response
