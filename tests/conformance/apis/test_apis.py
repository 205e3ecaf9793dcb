"""Each API under each fault: refusals, failures of Triton, clients that leave, silence, in the form of the API."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.app import ROUTES
from gateway.edge.routes import ApiRoute
from gateway.edge.streams import EventStream
from tests.conformance.apis.rows import CASES, GIVEN, WRONG
from tests.conformance.apis.run import (
    ABSENT,
    KEYED,
    PIECE,
    Case,
    Exactly,
    Given,
    Wrong,
    difference,
    read_answer,
    read_error,
    read_last,
    read_request,
    without_ids,
)
from tests.conformance.apis.streams import ASKS, join
from tests.conformance.apis.world import World
from tests.support.gateway import Reply, RunningGateway
from tests.support.triton_stand_in import WAIT_S
from triton_transformers.errors import CONTEXT_LENGTH

STREAMS = [case for case in CASES if case.stream]
SECRET = "RuntimeError: a secret of the server"


def each(cases: list[Case]) -> Any:
    """Return a mark that runs a test for each case."""
    return pytest.mark.parametrize("case", cases, ids=[case.id for case in cases])


def at(case: Case, row: Given | Wrong) -> Case:
    """Return the case at the address of the row's system."""
    return dataclasses.replace(case, system=row.system or case.system)


def send(gateway: RunningGateway, case: Case, url: str = "", **fields: Any) -> Reply:
    return gateway.request("POST", url or case.url, *case.sent(**fields))


@contextlib.contextmanager
def opened(gateway: RunningGateway, case: Case) -> Iterator[http.client.HTTPResponse]:
    """Send the case as a stream, and read its first piece. At the end of the block the client leaves."""
    body, headers = case.sent(stream=True)
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=WAIT_S)
    with contextlib.closing(connection):
        connection.request("POST", case.url, body, headers)
        response = connection.getresponse()
        line = response.readline()
        while PIECE not in line:
            assert line, "the stream ended before its first piece"
            line = response.readline()
        yield response


def test_each_route_has_a_case() -> None:
    paths = {route.path for route in ROUTES if isinstance(route, ApiRoute) and "POST" in (route.methods or ())}
    assert paths == {case.path for case in CASES}


@each(CASES)
def test_refusal_has_the_form_of_the_api_and_reaches_no_model(world: World, case: Case) -> None:
    """Send the case without its key, with another type, too large, by another method, and with a field too many."""
    body, headers = case.sent()
    gateway = world.gateway
    replies = {
        401: gateway.request("POST", case.url, body, {"content-type": headers["content-type"]}),
        413: send(gateway, case, filler="x" * 60_000),
        415: gateway.request("POST", case.url, b"{}", {"content-type": "text/plain"} | KEYED),
        405: gateway.request("PUT", case.url, b"{}", KEYED),
        400: send(gateway, case, colour="red"),
        429: send(world.full, case),
    }
    assert [reply.status for reply in replies.values()] == [*replies]
    errors = {status: read_error(case.form, status, reply.json) for status, reply in replies.items()}
    assert replies[401].headers["www-authenticate"] == "Bearer"
    assert errors[401]["message"].startswith("Incorrect or missing API key")
    assert "'colour'" in errors[400]["message"]
    assert float(replies[429].headers["retry-after-ms"]) >= 600
    if case.many:
        reply = send(gateway, case, **{case.many: ["a"] * 13})
        error = read_error(case.form, 400, reply.json)
        assert (reply.status, f"'{case.many}' has 13 elements" in error["message"]) == (400, True)
    assert not world.triton.received
    assert send(gateway, case).status == 200


@each([case for case in CASES if case.system or "model" in case.body])
def test_unknown_model_is_not_found(world: World, case: Case) -> None:
    fields = {} if case.system else {"model": "nobody"}
    reply = send(world.gateway, case, case.path.replace("{model}", "nobody"), **fields)
    assert reply.status == 404
    assert "'nobody' does not exist" in read_error(case.form, 404, reply.json)["message"]
    assert not world.triton.received


@pytest.mark.parametrize(("case", "given"), GIVEN, ids=[f"{case.id}-{' '.join(given.fields)}" for case, given in GIVEN])
def test_request_reaches_triton_and_its_answer_the_client(world: World, case: Case, given: Given) -> None:
    """Send a row whole, and, if the API streams, as a stream, whose joined pieces must be the whole answer."""
    case = at(case, given)
    gateway = world.gateway_of(case, given.fields)
    is_neutral = given.triton == {} and given.answer is None and "model" not in given.fields
    answer = case.answer if is_neutral else given.answer
    whole: Any = {}
    for asks in ({}, ASKS.get(case.stream, {"stream": True}))[: 2 if case.stream and given.streams else 1]:
        world.triton.received.clear()
        reply = send(gateway, case, **given.fields, **asks)
        assert reply.status == 200, reply.body
        got = join(case.stream, reply.body) if asks else read_answer(reply)
        assert answer is None or not difference(answer, got), difference(answer, got)
        whole = whole or got
        assert not (changed := difference(without_ids(whole), without_ids(got))), changed
        if given.triton is not None:
            (request,) = world.triton.received
            wrong = difference(expected_request(case, given), read_request(request, bool(asks)))
            assert not wrong, wrong


def expected_request(case: Case, given: Given) -> Any:
    inputs = (case.triton or {}) | (given.triton or {})
    return Exactly({"outputs": bool, "model": bool} | {k: v for k, v in inputs.items() if v is not ABSENT})


@pytest.mark.parametrize(
    ("case", "wrong"), WRONG, ids=[f"{case.id}-{wrong.param or wrong.reason}" for case, wrong in WRONG]
)
def test_wrong_field_is_named(world: World, case: Case, wrong: Wrong) -> None:
    case = at(case, wrong)
    reply = send(world.gateway_of(case, wrong.fields), case, **wrong.fields)
    assert reply.status == wrong.status, reply.body
    error = read_error(case.form, wrong.status, reply.json)
    assert wrong.reason in error["message"]
    if wrong.param:
        assert error["param"] == wrong.param if case.form == "openai" else f"'{wrong.param}'" in error["message"]
    assert not wrong.code or error["code"] == wrong.code
    assert bool(world.triton.received) == wrong.by_model


@pytest.mark.parametrize("status", [400, 500, 503])
@each(CASES)
def test_failure_before_an_answer_has_its_status(world: World, case: Case, status: int) -> None:
    message = "input 'x': too strange" if status == 400 else SECRET
    for fields in ({}, {"stream": True})[: 2 if case.stream else 1]:
        with world.fails(status, message):
            reply = send(world.gateway, case, **fields)
        error = read_error(case.form, status, reply.json)
        assert (reply.status, SECRET in error["message"]) == (status, False)
        assert status != 400 or "too strange" in error["message"]
        assert status != 503 or reply.headers["retry-after"] == "1"


@each(CASES)
def test_answer_that_takes_too_long_gets_504(world: World, case: Case) -> None:
    # This connects and reads the configurations, for which a third of a second may be too short.
    world.hasty.wait_until(lambda: send(world.hasty, case).status == 200)
    received, cancelled = world.triton.received, world.triton.cancelled
    received.clear()
    with world.holds():
        reply = send(world.hasty, case)
        error = read_error(case.form, 504, reply.json)
        assert (reply.status, error.get("code", "timeout")) == (504, "timeout")
        world.triton.wait_until(lambda: len(cancelled) >= len(received))


@each(CASES)
def test_client_that_leaves_ends_its_requests(world: World, case: Case) -> None:
    body, headers = case.sent()
    with world.holds():
        with world.gateway.sent("POST", case.url, body, headers):
            world.triton.wait_until(lambda: bool(world.triton.running))
        world.gateway.wait_until(world.is_idle)
        assert world.triton.cancelled


@each(STREAMS)
def test_client_that_leaves_a_stream_ends_its_requests(world: World, case: Case) -> None:
    with world.holds(piece=1):
        with opened(world.gateway, case):
            world.triton.wait_until(lambda: bool(world.triton.running))
        world.gateway.wait_until(world.is_idle)
        assert world.triton.cancelled


@each(STREAMS)
def test_failure_within_a_stream_is_its_last_event(world: World, case: Case) -> None:
    with world.fails(500, SECRET, piece=1), opened(world.gateway, case) as response:
        assert SECRET not in read_last(case.stream, 500, response.read())


@each(STREAMS)
def test_silence_ends_a_stream_with_an_error(world: World, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time between events alone. The request's own time must not end in the same moment."""
    send_events = EventStream.send_events

    async def send_hastily(self: EventStream, send: Any) -> None:
        self.timeout = 0.2
        await send_events(self, send)

    monkeypatch.setattr(EventStream, "send_events", send_hastily)
    for piece in (1, 2):
        with world.holds(piece), opened(world.gateway, case) as response:
            assert "sent nothing for 0.2 seconds" in read_last(case.stream, 504, response.read())
            world.gateway.wait_until(world.is_idle)


@each([case for case in CASES if case.prompt])
def test_prompt_that_is_too_long_is_refused_by_its_name(world: World, case: Case) -> None:
    source = "text_input" if case.prompt == "prompt" else "messages"
    reason = f"input '{source}' has 300 tokens; in the model's context of 256 that leaves no room for new ones"
    for fields in ({}, {"stream": True}):
        with world.fails(400, f"{reason}, and 'max_new_tokens' is 16", source, "max_new_tokens", code=CONTEXT_LENGTH):
            reply = send(world.gateway, case, **fields)
        error = read_error(case.form, 400, reply.json)
        assert reply.status == 400
        assert f"'{case.prompt}' has 300 tokens" in error["message"]
        assert f"'{'max_output_tokens' if case.id == 'responses' else 'max_tokens'}' is 16" in error["message"]
        assert case.form != "openai" or (error["param"], error["code"]) == (case.prompt, "context_length_exceeded")
