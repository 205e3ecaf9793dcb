"""Responses, messages and Cohere's chats: orders of events and damaged bodies. The rest is conformance/apis."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance.apis.cohere import AGENT as COHERE_AGENT
from tests.conformance.apis.cohere import OUTPUT, USER, V1_TOOLS
from tests.conformance.apis.messages import AGENT as MESSAGES_AGENT
from tests.conformance.apis.responses import AGENT
from tests.conformance.apis.run import read_request
from tests.conformance.apis.streams import read_events
from tests.conformance.apis.world import CALLS, generators
from tests.support.gateway import RunningGateway, gateway_before
from tests.support.triton_stand_in import TritonStandIn

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COHERE, COHERE_V1 = "/v2/chat", "/v1/chat"


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[RunningGateway, TritonStandIn]]:
    with gateway_before(*generators("agent", CALLS, tool_parser="hermes", reasoning="think")) as served:
        yield served


def kinds(gateway: RunningGateway, path: str, **body: Any) -> list[str]:
    reply = gateway.post(path, {"stream": True, **body})
    assert reply.status == 200, reply.body
    return [event.get("type", event.get("event_type")) for event in read_events(reply.body)]


def test_events_of_a_response_have_their_order(gateway: RunningGateway) -> None:
    part = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    names = [
        *("created", "in_progress"),
        *(*part[0], "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done", *part[1]),
        *(*part[0], "output_text.delta", "output_text.done", *part[1]),
        *(*call[:2], *call[1:], *call, "completed"),
    ]
    assert kinds(gateway, RESPONSES, input="a", **AGENT) == [f"response.{name}" for name in names]


def test_events_of_cohere_have_their_order(gateway: RunningGateway) -> None:
    of_text, of_call = ([f"{name}-{step}" for step in ("start", "delta", "end")] for name in ("content", "tool-call"))
    reasoning = [of_text[0], of_text[1], *of_text[1:]]
    steps = [*reasoning, *of_text, of_call[0], of_call[1], *of_call[1:], *of_call]
    assert kinds(gateway, COHERE, messages=[USER], **COHERE_AGENT) == ["message-start", *steps, "message-end"]
    names = ["stream-start", "text-generation", "tool-calls-generation", "stream-end"]
    assert kinds(gateway, COHERE_V1, model="agent", message="a", tools=V1_TOOLS) == names
    reply = gateway.post(COHERE_V1, {"model": "agent", "message": "a", "stream": True})
    assert reply.headers["content-type"] == "application/stream+json"


def test_calls_have_ids_of_their_own(gateway: RunningGateway) -> None:
    message = gateway.post(MESSAGES, {"messages": [USER], **MESSAGES_AGENT}).json
    assert len({block["id"] for block in message["content"] if "id" in block}) == 2
    response = gateway.post(RESPONSES, {"input": "a", **AGENT}).json
    assert len({item["call_id"] for item in response["output"] if "call_id" in item}) == 2


def test_tool_runner_of_anthropics_sdk_learns_to_send_the_whole_conversation(gateway, triton) -> None:
    reply = gateway.post(MESSAGES, {"messages": [USER], "thread": {"type": "new"}, **MESSAGES_AGENT})
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert (reply.status, reply.json["error"]["details"]) == (400, details)
    assert not triton.received


def test_damaged_bodies_are_refused(gateway) -> None:
    half = json.dumps({"model": "agent", "input": [{"role": "user", "content": "\ud83d"}]}).encode()
    assert gateway.post(RESPONSES, half).error["param"] == "input[0].content"
    deep = b'{"type": "tool_use", "id": "t", "name": "a", "input": {"a": ' + b"[" * 5000 + b"]" * 5000 + b"}}"
    for content in (
        deep,
        b'{"type": "tool_result", "tool_use_id": "t", "content": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ):
        data = b'{"model": "agent", "max_tokens": 5, "messages": [{"role": "assistant", "content": [%b]}]}' % content
        reply = gateway.post(MESSAGES, data)
        assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("streams", ["false", "true"])
@pytest.mark.parametrize(
    ("path", "tool"),
    [
        (RESPONSES, b'{"type": "function", "name": "a", "parameters": {"default": %b}}'),
        (MESSAGES, b'{"name": "a", "input_schema": {"default": %b}}'),
    ],
)
def test_body_that_can_just_be_read_fails_with_its_own_fault(gateway, path, tool, streams) -> None:
    """The gateway writes the tools again, one level deeper than it read them."""
    text = b'"input": "a"' if path == RESPONSES else b'"max_tokens": 5, "messages": [{"role": "user", "content": "a"}]'
    statuses = set()
    for depth in range(940, 1000):
        tools = tool % (b"[" * depth + b"]" * depth)
        data = b'{"model": "agent", "stream": %b, %b, "tools": [%b]}' % (streams.encode(), text, tools)
        statuses.add(gateway.post(path, data).status)
    assert statuses == {200, 400}


def test_each_result_of_cohere_v1_follows_its_own_call(gateway, triton) -> None:
    """Also if the same call was made in an earlier turn. The answer's history has the results for the next step."""
    asked = {"model": "agent", "tools": V1_TOOLS, "tool_results": [OUTPUT]}
    history = gateway.post(COHERE_V1, asked | {"message": "a"}).json["chat_history"]
    assert [turn["role"] for turn in history] == ["USER", "TOOL", "CHATBOT"]
    triton.received.clear()
    history[2].pop("tool_calls", None)
    assert gateway.post(COHERE_V1, asked | {"message": "b", "chat_history": history}).status == 200
    roles = [message["role"] for message in read_request(triton.received[0])["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant", "tool"]
