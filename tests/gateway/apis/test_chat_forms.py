"""POST /v1/responses, /v1/messages and Cohere's chats, with a stand-in for Triton."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.edge.config import Limits
from tests.support.gateway import RunningGateway, gateway_before
from tests.support.triton_stand_in import GENERATION_INPUTS, Model, TritonStandIn, generator

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
COHERE, COHERE_V1 = "/v2/chat", "/v1/chat"
INPUTS = GENERATION_INPUTS | {"sampling_parameters": ("STRING", [1])}
WORDS = [" ein", " zwei", " drei"]
CALLS = [
    *("<think>", "Let me", " see.", "</think>", "\n\n", "I ask.", "\n<tool_call>\n"),
    *('{"name": "weather", "arguments": {"city": ', '"Oslo"}}', "\n</tool_call>"),
    '\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
]
USER = {"role": "user", "content": "a"}
PIXEL = "data:image/png;base64,iVBORw0KGgo="
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTIONS = [
    {"type": "function", "function": {"name": "weather", "description": "Look up.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}},
]
RESPONSES_TOOLS = [{"type": "function", **tool["function"]} for tool in FUNCTIONS]
MESSAGES_TOOLS = [
    {"name": "weather", "description": "Look up.", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}},
    {"type": "custom", "name": "time", "input_schema": {"type": "object"}},
]
JSON_SCHEMA = {"type": "json_schema", "schema": SCHEMA}


def models(name: str, pieces: list[str], **parameters: str) -> list[Model]:
    made = [
        generator(name, INPUTS | {"images": ("STRING", [-1])}, pieces=pieces),
        generator(f"{name}_stream", INPUTS, streams=True, pieces=pieces),
    ]
    for model in made:
        model.parameters = parameters
    return made


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[RunningGateway, TritonStandIn]]:
    made = [
        *models("plain", WORDS),
        *models("agent", CALLS, tool_parser="hermes", reasoning="think"),
    ]
    with gateway_before(*made, limits=Limits(texts=8)) as served:
        yield served


@pytest.fixture
def gateway(served: tuple[RunningGateway, TritonStandIn]) -> RunningGateway:
    return served[0]


@pytest.fixture
def received(served: tuple[RunningGateway, TritonStandIn]) -> list[Any]:
    """Return the requests that reach the stand-in from now on."""
    served[1].received.clear()
    return served[1].received


def ask(gateway: RunningGateway, path: str, **fields: Any) -> Any:
    reply = gateway.post(path, body(path, **fields))
    assert reply.status == 200, reply.body
    return reply.json


def body(path: str, **fields: Any) -> dict[str, Any]:
    least = {"model": "plain", "input": "a"} if path == RESPONSES else {"model": "plain", "messages": [USER]}
    return least | ({"max_tokens": 99} if path == MESSAGES else {}) | fields


def events(gateway: RunningGateway, path: str, **fields: Any) -> list[Any]:
    """Return the data of a stream's events, each of which has its type as its name."""
    reply = gateway.post(path, body(path, stream=True, **fields))
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"].startswith("text/event-stream")
    read = []
    for event in reply.body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        read.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {read[-1]['type']}"
    return read


def sent(received: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the messages and the other inputs of the only request that the stand-in received."""
    (request,) = received
    inputs = {
        name: tensor.texts() if tensor.datatype == "BYTES" else tensor.array().tolist()
        for name, tensor in request.inputs.items()
        if name != "images"
    }
    sampling = json.loads(inputs.pop("sampling_parameters", ["{}"])[0])
    return json.loads(inputs.pop("messages")[0]), inputs | sampling


# --- requests ---------------------------------------------------------------------------------------------------------


def called(id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def text(kind: str, value: str) -> dict[str, Any]:
    return {"type": kind, "text": value}


CHATS: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "a text": (RESPONSES, {"input": "a"}, [USER]),
    "roles": (
        RESPONSES,
        {
            "instructions": "Be brief.",
            "input": [
                {"role": "developer", "content": "In English."},
                {"type": "message", "role": "user", "content": [text("input_text", "a"), text("input_text", "b")]},
                {"role": "user", "content": "c"},
                {"role": "assistant", "content": [text("output_text", "d"), {"type": "refusal", "refusal": "No."}]},
                USER,
            ],
        },
        [
            {"role": "system", "content": "Be brief.\nIn English."},
            {"role": "user", "content": "a\nb\nc"},
            {"role": "assistant", "content": "d\nNo."},
            USER,
        ],
    ),
    "items of an answer": (
        RESPONSES,
        {
            "input": [
                USER,
                {"type": "reasoning", "id": "rs_1", "summary": [], "content": [text("reasoning_text", "Hm.")]},
                {"type": "message", "role": "assistant", "status": "completed", "content": [text("output_text", "b")]},
                {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
                {"type": "function_call", "call_id": "c2", "name": "time", "arguments": ""},
                {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
                {"type": "function_call_output", "call_id": "c2", "output": [text("input_text", "noon")]},
            ]
        },
        [
            USER,
            {
                "role": "assistant",
                "content": "b",
                "reasoning_content": "Hm.",
                "tool_calls": [called("c1", "weather", {"city": "Oslo"}), called("c2", "time", {})],
            },
            {"role": "tool", "name": "weather", "tool_call_id": "c1", "content": "sunny"},
            {"role": "tool", "name": "time", "tool_call_id": "c2", "content": "noon"},
        ],
    ),
    "a system": (MESSAGES, {"system": "Be brief."}, [{"role": "system", "content": "Be brief."}, USER]),
    "blocks": (
        MESSAGES,
        {
            "system": [text("text", "Be"), text("text", "brief.") | {"cache_control": {"type": "ephemeral"}}],
            "messages": [
                USER,
                {"role": "user", "content": [text("text", "b"), text("text", "c")]},
                {"role": "assistant", "content": ""},
                {"role": "system", "content": "Now in French."},
                USER,
            ],
        },
        [
            {"role": "system", "content": "Be\nbrief."},
            {"role": "user", "content": "a\nb\nc"},
            {"role": "assistant", "content": ""},
            {"role": "system", "content": "Now in French."},
            USER,
        ],
    ),
    "results": (
        MESSAGES,
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": ""},
                        text("text", "b"),
                        {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
                        {"type": "tool_use", "id": "t2", "name": "time", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"},
                        {"type": "tool_result", "tool_use_id": "t2", "is_error": True, "content": [text("text", "?")]},
                        text("text", "So?"),
                    ],
                },
            ]
        },
        [
            USER,
            {
                "role": "assistant",
                "content": "b",
                "reasoning_content": "Hm.",
                "tool_calls": [called("t1", "weather", {"city": "Oslo"}), called("t2", "time", {})],
            },
            {"role": "tool", "name": "weather", "tool_call_id": "t1", "content": "sunny"},
            {"role": "tool", "name": "time", "tool_call_id": "t2", "content": "Error:\n?"},
            {"role": "user", "content": "So?"},
        ],
    ),
}


@pytest.mark.parametrize(("path", "fields", "messages"), CHATS.values(), ids=CHATS)
def test_request_becomes_a_chat(gateway, received, path, fields, messages) -> None:
    ask(gateway, path, **fields)
    assert sent(received)[0] == messages


@pytest.mark.parametrize(
    ("path", "content"),
    [
        (RESPONSES, [{"type": "input_image", "detail": "auto", "image_url": PIXEL}, text("input_text", "b")]),
        (
            MESSAGES,
            [
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
                text("text", "b"),
            ],
        ),
    ],
)
def test_images_reach_the_model(gateway, received, path, content) -> None:
    chat = [{"role": "user", "content": content}]
    ask(gateway, path, **{"input" if path == RESPONSES else "messages": chat})
    assert sent(received)[0] == [{"role": "user", "content": [{"type": "image"}, text("text", "b")]}]
    assert "images" in received[0].inputs


NAMED = {"type": "function", "name": "time"}
SAMPLING = {"temperature": 0.5, "top_p": 0.25}
REACHES = {"temperature": [0.5], "top_p": [0.25]}
# The fields of every request.
ALWAYS = {
    RESPONSES: {"temperature": [1.0], "exclude_input_in_output": [True]},
    MESSAGES: {"temperature": [1.0], "max_new_tokens": [99], "exclude_input_in_output": [True]},
}


@pytest.mark.parametrize(
    ("path", "fields", "options"),
    [
        (RESPONSES, SAMPLING | {"max_output_tokens": 2}, REACHES | {"max_new_tokens": [2]}),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}}, {"structured_outputs": {"json_object": True}}),
        (RESPONSES, {"text": {"format": JSON_SCHEMA | {"name": "a"}}}, {"structured_outputs": {"json": SCHEMA}}),
        (RESPONSES, {"top_logprobs": 2}, {"logprobs": 2}),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, {"logprobs": 0}),
        (
            RESPONSES,
            {"reasoning": {"effort": "low", "summary": "auto"}},
            {"chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "low"}},
        ),
        (
            MESSAGES,
            SAMPLING | {"top_k": 5, "stop_sequences": ["x", "y"], "max_tokens": 2},
            REACHES | {"top_k": 5, "stop": ["x", "y"], "max_new_tokens": [2]},
        ),
        (MESSAGES, {"output_config": {"format": JSON_SCHEMA}}, {"structured_outputs": {"json": SCHEMA}}),
        (MESSAGES, {"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        (
            MESSAGES,
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"chat_template_kwargs": {"enable_thinking": True}},
        ),
        (
            MESSAGES,
            {"output_config": {"effort": "high"}},
            {"chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "high"}},
        ),
    ],
)
def test_options_reach_the_model(gateway, received, path, fields, options) -> None:
    ask(gateway, path, **fields)
    assert sent(received)[1] == ALWAYS[path] | options


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (RESPONSES, {"tools": RESPONSES_TOOLS, "tool_choice": NAMED}),
        (MESSAGES, {"tools": MESSAGES_TOOLS, "tool_choice": {"type": "tool", "name": "time"}}),
    ],
)
def test_tools_reach_the_template(gateway, received, path, fields) -> None:
    chat = {"model": "agent", "messages": [USER], "tools": FUNCTIONS}
    choice = {"type": "function", "function": {"name": "time"}}
    assert gateway.post("/v1/chat/completions", chat | {"tool_choice": choice}).status == 200
    _, expected = sent(received)
    received.clear()
    ask(gateway, path, model="agent", **fields)
    _, inputs = sent(received)
    if path == RESPONSES:
        received.clear()
        only = {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}
        ask(gateway, path, model="agent", **fields | {"tool_choice": only})
        assert sent(received)[1]["tools"] == FUNCTIONS[1:]
    names = ("tools", "structured_outputs", "skip_special_tokens")
    assert [inputs.get(name) for name in names] == [expected.get(name) for name in names]
    assert inputs["tools"] == FUNCTIONS


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (RESPONSES, {"store": False, "background": False, "truncation": "disabled", "service_tier": "auto"}),
        (RESPONSES, {"include": ["reasoning.encrypted_content"], "text": {"verbosity": "low"}, "user": "u"}),
        (RESPONSES, {"instructions": None, "tools": None, "metadata": None, "previous_response_id": None}),
        (RESPONSES, {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "prompt_cache_key": "k"}),
        (
            MESSAGES,
            {"metadata": {"user_id": "u"}, "service_tier": "standard_only", "cache_control": {"type": "ephemeral"}},
        ),
        (MESSAGES, {"tools": [], "thinking": {"type": "adaptive"}, "stop_sequences": [], "container": None}),
        (MESSAGES, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
    ],
)
def test_field_that_asks_for_nothing_is_ignored(gateway, received, path, fields) -> None:
    ask(gateway, path, **fields)
    assert sent(received) == ([USER], ALWAYS[path])


# --- answers ----------------------------------------------------------------------------------------------------------


def test_response_has_openais_form(gateway) -> None:
    response = ask(gateway, RESPONSES, max_output_tokens=2, metadata={"a": "b"}, instructions="Be brief.")
    assert response.pop("id").startswith("resp_")
    assert response.pop("created_at") > 1_700_000_000
    (item,) = response.pop("output")
    assert item.pop("id").startswith("msg_")
    part = {"type": "output_text", "text": " ein zwei", "annotations": [], "logprobs": []}
    assert item == {"type": "message", "role": "assistant", "status": "incomplete", "content": [part]}
    assert response == {
        "object": "response",
        "model": "plain",
        "status": "incomplete",
        "incomplete_details": {"reason": "max_output_tokens"},
        "error": None,
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "max_output_tokens": 2,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_logprobs": 0,
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": None, "summary": None, "generate_summary": None},
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "background": False,
        "store": False,
        "truncation": "disabled",
        "usage": {
            "input_tokens": 2,
            "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
            "output_tokens": 2,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 4,
        },
    }


def test_message_has_anthropics_form(gateway) -> None:
    message = ask(gateway, MESSAGES, max_tokens=2, system="Be brief.")
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "plain",
        "content": [{"type": "text", "text": " ein zwei"}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 1,
            "cache_read_input_tokens": 1,
            "cache_creation_input_tokens": 0,
            "output_tokens": 2,
        },
    }
    ended = ask(gateway, MESSAGES)
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("end_turn", None)
    stopped = ask(gateway, MESSAGES, stop_sequences=["x"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "x")


def test_response_has_an_item_for_reasoning_text_and_each_call(gateway) -> None:
    response = ask(gateway, RESPONSES, model="agent", tools=RESPONSES_TOOLS)
    assert response["tools"] == RESPONSES_TOOLS
    reasoning, message, *calls = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert message["content"][0]["text"] == "I ask."
    assert [(call["type"], call["name"], call["arguments"]) for call in calls] == [
        ("function_call", "weather", '{"city": "Oslo"}'),
        ("function_call", "time", "{}"),
    ]
    assert len({call["call_id"] for call in calls}) == 2
    assert {item["status"] for item in response["output"]} == {"completed"}


def test_message_has_a_block_for_thinking_text_and_each_call(gateway) -> None:
    message = ask(gateway, MESSAGES, model="agent", tools=MESSAGES_TOOLS)
    ids = [block.pop("id") for block in message["content"] if "id" in block]
    assert len(set(ids)) == 2
    assert message["content"] == [
        {"type": "thinking", "thinking": "Let me see.", "signature": ""},
        {"type": "text", "text": "I ask."},
        {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}},
        {"type": "tool_use", "name": "time", "input": {}},
    ]
    assert message["stop_reason"] == "tool_use"


def test_arguments_that_end_too_early_are_empty(gateway) -> None:
    message = ask(gateway, MESSAGES, model="agent", tools=MESSAGES_TOOLS, max_tokens=8)
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][-1].get("input", {}) == {}
    response = ask(gateway, RESPONSES, model="agent", tools=RESPONSES_TOOLS, max_output_tokens=8)
    assert [item["status"] for item in response["output"]][-1] == response["status"] == "incomplete"


def test_events_of_a_response_add_up_to_it(gateway) -> None:
    fields = {"model": "agent", "tools": RESPONSES_TOOLS}
    stream = events(gateway, RESPONSES, **fields)
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    created, started, *others, completed = stream
    assert created["response"] == started["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    response = completed["response"]
    assert created["response"].keys() == response.keys()
    for index, item in enumerate(response["output"]):
        own = [event for event in others if event["output_index"] == index]
        assert others.index(own[-1]) - others.index(own[0]) == len(own) - 1
        assert own[0]["item"] | {"status": "completed", "content": 0, "arguments": 0} == item | {
            "content": 0,
            "arguments": 0,
        }
        assert own[-1]["item"] == item
        assert {event.get("item_id", item["id"]) for event in own} == {item["id"]}
        whole = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(event.get("delta", "") for event in own) == whole
        done = next(event for event in own if event["type"].endswith(("text.done", "arguments.done")))
        assert done.get("text", done.get("arguments")) == whole
    kinds = [event["type"].removeprefix("response.") for event in stream]
    part = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds == [
        *("created", "in_progress"),
        *(*part[0], "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done", *part[1]),
        *(*part[0], "output_text.delta", "output_text.done", *part[1]),
        *(*call[:2], *call[1:], *call, "completed"),
    ]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 2
    assert response["usage"]["output_tokens"] == len(CALLS)
    whole = ask(gateway, RESPONSES, **fields)
    assert [item["type"] for item in whole["output"]] == [item["type"] for item in response["output"]]


def test_events_of_a_message_add_up_to_it(gateway) -> None:
    first, *others, delta, last = events(gateway, MESSAGES, model="agent", tools=MESSAGES_TOOLS)
    assert (first["type"], delta["type"], last) == ("message_start", "message_delta", {"type": "message_stop"})
    message = first["message"]
    assert message["content"] == []
    for event in others:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"] | {"partial_json": ""})
        elif event["type"] == "content_block_delta":
            ((name, piece),) = [item for item in event["delta"].items() if item[0] != "type"]
            message["content"][event["index"]][name] += piece
        else:
            assert event == {"type": "content_block_stop", "index": len(message["content"]) - 1}
    for block in message["content"]:
        arguments = block.pop("partial_json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments)
    message |= delta["delta"] | {"usage": delta["usage"]}
    whole = ask(gateway, MESSAGES, model="agent", tools=MESSAGES_TOOLS)
    for one in (message, whole):
        del one["id"]
        for block in one["content"]:
            block.pop("id", None)
    assert message == whole


def test_logprobs_go_with_their_text(gateway) -> None:
    stream = events(gateway, RESPONSES, top_logprobs=1)
    tokens = [
        [token["token"] for token in event["logprobs"]] for event in stream if event["type"].endswith("text.delta")
    ]
    assert tokens == [[word] for word in WORDS]
    (part,) = stream[-1]["response"]["output"][0]["content"]
    assert [token["token"] for token in part["logprobs"]] == WORDS
    assert part["logprobs"][0].keys() == {"token", "bytes", "logprob", "top_logprobs"}


def test_empty_answer_has_an_empty_text(served) -> None:
    with gateway_before(*models("silent", [""])) as (gateway, _):
        assert ask(gateway, MESSAGES, model="silent")["content"] == [{"type": "text", "text": ""}]
        (item,) = ask(gateway, RESPONSES, model="silent")["output"]
        assert item["content"][0]["text"] == ""
        kinds = [event["type"] for event in events(gateway, MESSAGES, model="silent")]
        assert kinds[:3] == ["message_start", "content_block_start", "content_block_stop"]


def test_count_tokens_counts_the_prompt(gateway, received) -> None:
    counted = ask(gateway, COUNT)
    assert counted == {"input_tokens": len(json.dumps([USER], separators=(",", ":"))) + 2}
    assert [request.outputs for request in received] == [["tokenized"]]
    received.clear()
    ask(gateway, COUNT, model="agent", tools=MESSAGES_TOOLS, system="Be brief.")
    assert sent(received)[1]["tools"] == FUNCTIONS


# --- errors -----------------------------------------------------------------------------------------------------------


def test_tool_runner_of_anthropics_sdk_learns_to_send_the_whole_conversation(gateway, received) -> None:
    reply = gateway.post(MESSAGES, body(MESSAGES, thread={"type": "new"}))
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert (reply.status, reply.json["error"]["details"]) == (400, details)
    assert not received
    ask(gateway, MESSAGES, thread=None)


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_name_that_looks_like_a_field_is_refused(gateway, path) -> None:
    reply = gateway.post(path, body(path, model="messages[9]"))
    assert reply.status == 404
    assert "'messages[9]' does not exist" in reply.json["error"]["message"]
    choice = {"type": "function" if path == RESPONSES else "tool", "name": "messages[9]"}
    assert gateway.post(path, body(path, tool_choice=choice)).status == 400


def test_wrong_effort_is_refused_with_the_right_ones(gateway) -> None:
    error = gateway.post(RESPONSES, body(RESPONSES, reasoning={"effort": "huge"})).error
    assert error["message"].endswith("use 'none' or 'minimal' or 'low' or 'medium' or 'high' or 'xhigh'.")


def test_damaged_bodies_are_refused(gateway) -> None:
    half = json.dumps({"model": "plain", "input": [{"role": "user", "content": "\ud83d"}]}).encode()
    assert gateway.post(RESPONSES, half).error["param"] == "input[0].content"
    deep = b'{"type": "tool_use", "id": "t", "name": "a", "input": {"a": ' + b"[" * 5000 + b"]" * 5000 + b"}}"
    for content in (
        deep,
        b'{"type": "tool_result", "tool_use_id": "t", "content": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ):
        data = b'{"model": "plain", "max_tokens": 5, "messages": [{"role": "assistant", "content": [%b]}]}' % content
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
def test_body_that_can_just_be_read_fails_with_its_own_fault(gateway, received, path, tool, streams) -> None:
    """The gateway writes the tools again, one level deeper than it read them."""
    text = b'"input": "a"' if path == RESPONSES else b'"max_tokens": 5, "messages": [{"role": "user", "content": "a"}]'
    statuses = set()
    for depth in range(940, 1000):
        tools = tool % (b"[" * depth + b"]" * depth)
        data = b'{"model": "agent", "stream": %b, %b, "tools": [%b]}' % (streams.encode(), text, tools)
        statuses.add(gateway.post(path, data).status)
    assert statuses == {200, 400}


# --- Cohere -----------------------------------------------------------------------------------------------------------

DOCUMENT_PART = {"type": "document", "document": {"data": {"sky": "clear"}}}
THOUGHT = {"type": "thinking", "thinking": "Hm."}
CALL = {"name": "weather", "parameters": {"city": "Oslo"}}
V1_TOOLS = [
    {"name": "weather", "parameter_definitions": {"city": {"type": "str", "description": "A city", "required": True}}}
]
OPTIONS = {"k": 5, "p": 0.25, "temperature": 0.5, "stop_sequences": ["x"], "max_tokens": 2, "safety_mode": "STRICT"}
OPTIONS |= {"response_format": {"type": "json_object", "schema": SCHEMA}, "documents": []}


@pytest.mark.parametrize(("path", "asked"), [(COHERE, {"messages": [USER]}), (COHERE_V1, {"message": "a"})])
def test_options_of_cohere_reach_the_model(gateway, received, path, asked) -> None:
    assert gateway.post(path, {"model": "plain"} | asked | OPTIONS).status == 200
    options = {"top_k": 5, "stop": ["x"], "max_new_tokens": [2], "structured_outputs": {"json": SCHEMA}}
    assert sent(received) == ([USER], REACHES | options | {"exclude_input_in_output": [True]})


def test_cohere_v2_chats_with_tools(gateway, received) -> None:
    asked = {"model": "agent", "tools": FUNCTIONS}
    whole = gateway.post(COHERE, asked | {"messages": [USER]}).json
    first, second = whole["message"]["tool_calls"]
    assert whole["message"]["content"] == [{"type": "thinking", "thinking": "Let me see."}, text("text", "I ask.")]
    assert first == called(first["id"], "weather", '{"city": "Oslo"}') and second["function"]["name"] == "time"
    counts = {"input_tokens": 1, "output_tokens": len(CALLS)}
    assert (whole["finish_reason"], whole["usage"]) == ("TOOL_CALL", {"billed_units": counts, "tokens": counts})

    received.clear()
    result = {"role": "tool", "tool_call_id": first["id"], "content": [DOCUMENT_PART]}
    plan = {"role": "assistant", "tool_plan": "I ask.", "tool_calls": [first]}
    thought = {"role": "assistant", "content": [THOUGHT, text("text", "Clear.")], "citations": None}
    assert gateway.post(COHERE, asked | {"messages": [USER, plan, result, thought, USER]}).status == 200
    _, asking, answered, said, _ = sent(received)[0]
    assert (asking["content"], answered["content"]) == ("I ask.", '{"sky": "clear"}')
    assert (said["content"], said["reasoning_content"]) == ("Clear.", "Hm.")


def test_cohere_v2_streams_what_it_answers(gateway) -> None:
    start, *steps, end = events(gateway, COHERE, model="agent", tools=FUNCTIONS)
    assert (start["type"], end["type"], end["delta"]["finish_reason"]) == ("message-start", "message-end", "TOOL_CALL")
    parts = [(step["type"], step["index"]) for step in steps if not step["type"].endswith("delta")]
    assert parts == [
        *((f"content-{name}", index) for index in (0, 1) for name in ("start", "end")),
        *((f"tool-call-{name}", index) for index in (0, 1) for name in ("start", "end")),
    ]
    deltas = [step["delta"]["message"] for step in steps if step["type"].endswith("delta")]
    assert "".join(one["content"].get("thinking", "") for one in deltas if "content" in one) == "Let me see."
    calls = [one["tool_calls"]["function"]["arguments"] for one in deltas if "tool_calls" in one]
    assert "".join(calls) == '{"city": "Oslo"}{}'


def test_cohere_v1_chats_and_streams_with_tools(gateway, received) -> None:
    asked = {"model": "agent", "message": "a", "preamble": "Be brief.", "tools": V1_TOOLS}
    whole = gateway.post(COHERE_V1, asked).json
    assert (whole["text"], whole["finish_reason"]) == ("I ask.", "COMPLETE")
    assert whole["tool_calls"] == [CALL, {"name": "time", "parameters": {}}]
    assert [turn["role"] for turn in whole["chat_history"]] == ["USER", "CHATBOT"]
    messages, options = sent(received)
    assert messages == [{"role": "system", "content": "Be brief."}, USER]
    parameters = options["tools"][0]["function"]["parameters"]
    assert parameters["properties"]["city"] == {"type": "string", "description": "A city"}

    reply = gateway.post(COHERE_V1, asked | {"stream": True})
    lines = [json.loads(line) for line in reply.body.splitlines()]
    kinds = ["stream-start", "text-generation", "tool-calls-generation", "stream-end"]
    assert [line["event_type"] for line in lines] == kinds
    assert reply.headers["content-type"] == "application/stream+json"
    ids = {"response_id": "", "generation_id": ""}
    assert lines[-1]["response"] | ids == whole | ids


@pytest.mark.parametrize("is_in_history", [True, False])
def test_result_of_a_tool_of_cohere_v1_has_its_call(gateway, received, is_in_history) -> None:
    history = [{"role": "USER", "message": "a"}, {"role": "CHATBOT", "message": "", "tool_calls": [CALL]}]
    asked = {"message": "", "chat_history": history} if is_in_history else {"message": "a"}
    asked |= {"model": "agent", "tools": V1_TOOLS, "tool_results": [{"call": CALL, "outputs": [{"sky": "clear"}]}]}
    assert gateway.post(COHERE_V1, asked).status == 200
    user, calling, result = sent(received)[0]
    (call,) = calling["tool_calls"]
    assert (user, call["function"]) == (USER, {"name": "weather", "arguments": {"city": "Oslo"}})
    assert (result["tool_call_id"], result["content"]) == (call["id"], '[{"sky": "clear"}]')


def test_each_result_of_cohere_v1_follows_its_own_call(gateway, received) -> None:
    """Also if the same call was made in an earlier turn. The answer's history has the results for the next step."""
    asked = {"model": "agent", "tools": V1_TOOLS, "tool_results": [{"call": CALL, "outputs": [{"sky": "clear"}]}]}
    history = gateway.post(COHERE_V1, asked | {"message": "a"}).json["chat_history"]
    assert [turn["role"] for turn in history] == ["USER", "TOOL", "CHATBOT"]
    received.clear()
    history[2].pop("tool_calls", None)
    assert gateway.post(COHERE_V1, asked | {"message": "b", "chat_history": history}).status == 200
    roles = [message["role"] for message in sent(received)[0]]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant", "tool"]
