"""OpenAI's responses."""

from __future__ import annotations

from typing import Any

from tests.conformance.apis.models import IMAGE, URL
from tests.conformance.apis.openai_text import CITY, NOW, TOOLS, called
from tests.conformance.apis.run import ALWAYS, Begins, Case, Exactly, Given, Wrong, neutral
from tests.support.triton_stand_in import COUNTED

BODY = {"model": "counter", "input": "a"}
USER = {"role": "user", "content": "a"}
TO_TRITON = {"messages": [USER], **ALWAYS}
FUNCTIONS = [{"type": "function", **tool["function"]} for tool in TOOLS]
NAMED = {"type": "function", "name": "time"}
AGENT = {"model": "agent", "tools": FUNCTIONS}
REASONING = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Let me see."}]}
USAGE = {
    "input_tokens": 1,
    "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
    "output_tokens": 6,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 7,
}


def text(kind: str, value: str) -> dict[str, Any]:
    return {"type": kind, "text": value}


def message(value: str, status: str = "completed") -> Any:
    part = Exactly({"type": "output_text", "text": value, "annotations": [], "logprobs": []})
    head = {"type": "message", "id": Begins("msg_"), "role": "assistant", "status": status}
    return Exactly(head | {"content": [part]})


ANSWER = Exactly(
    {
        "id": Begins("resp_"),
        "created_at": NOW,
        "object": "response",
        "model": "counter",
        "status": "completed",
        "incomplete_details": None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "max_output_tokens": None,
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
        "output": [message("".join(COUNTED))],
        "usage": USAGE,
    }
)
CASES = [Case("responses", "/v1/responses", BODY, stream="responses", prompt="input", triton=TO_TRITON, answer=ANSWER)]
GIVEN = [
    Given(
        "responses",
        {"max_output_tokens": 2, "metadata": {"a": "b"}, "instructions": "Be brief."},
        {"max_new_tokens": [2], "messages": [{"role": "system", "content": "Be brief."}, USER]},
        ANSWER
        | {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "metadata": {"a": "b"}}
        | {"max_output_tokens": 2, "instructions": "Be brief.", "output": [message(" ein zwei", "incomplete")]}
        | {"usage": USAGE | {"input_tokens": 2, "output_tokens": 2, "total_tokens": 4}},
    ),
    Given("responses", {"model": "tuned", "top_p": 1}, answer={"temperature": 0.5, "top_p": 1}),
    Given(
        "responses",
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
        {
            "messages": [
                {"role": "system", "content": "Be brief.\nIn English."},
                {"role": "user", "content": "a\nb\nc"},
                {"role": "assistant", "content": "d\nNo."},
                USER,
            ]
        },
    ),
    Given(
        "responses",
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
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": "b",
                    "reasoning_content": "Hm.",
                    "tool_calls": [called("weather", {"city": "Oslo"}, id="c1"), called("time", {}, id="c2")],
                },
                {"role": "tool", "name": "weather", "tool_call_id": "c1", "content": "sunny"},
                {"role": "tool", "name": "time", "tool_call_id": "c2", "content": "noon"},
            ]
        },
    ),
    Given(
        "responses",
        {
            "model": "sees",
            "input": [
                {
                    "role": "user",
                    "content": [{"type": "input_image", "detail": "auto", "image_url": URL}, text("input_text", "b")],
                }
            ],
        },
        {"messages": [{"role": "user", "content": [{"type": "image"}, text("text", "b")]}], "images": [IMAGE]},
        streams=False,
    ),
    Given("responses", {"temperature": 0.5, "top_p": 0.25}, {"temperature": [0.5], "top_p": [0.25]}),
    Given("responses", {"text": {"format": {"type": "json_object"}}}, {"structured_outputs": {"json_object": True}}),
    Given(
        "responses",
        {"text": {"format": {"type": "json_schema", "schema": CITY, "name": "a"}}},
        {"structured_outputs": {"json": CITY}},
    ),
    Given(
        "responses",
        {"top_logprobs": 2},
        {"logprobs": 2},
        {"output": [{"content": [{"logprobs": lambda tokens: [one["token"] for one in tokens] == COUNTED}]}]},
    ),
    Given("responses", {"include": ["message.output_text.logprobs"]}, {"logprobs": 0}),
    Given(
        "responses",
        {"reasoning": {"effort": "low", "summary": "auto"}},
        {"chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "low"}},
    ),
    Given(
        "responses",
        AGENT,
        {"tools": TOOLS},
        {
            "tools": FUNCTIONS,
            "output": [
                REASONING | {"status": "completed"},
                message("I ask."),
                {"type": "function_call", "name": "weather", "arguments": '{"city": "Oslo"}', "status": "completed"},
                {"type": "function_call", "name": "time", "arguments": "{}", "status": "completed"},
            ],
        },
    ),
    Given(
        "responses",
        AGENT | {"model": "agent_stream"},
        {"tools": TOOLS},
        {"usage": {"output_tokens_details": {"reasoning_tokens": 2}}},
    ),
    Given("responses", AGENT | {"tool_choice": NAMED}, {"tools": TOOLS, "structured_outputs": bool}),
    Given(
        "responses",
        AGENT | {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}},
        {"tools": TOOLS[1:], "structured_outputs": bool},
    ),
    Given(  # the arguments end too early
        "responses",
        AGENT | {"max_output_tokens": 8},
        answer={"status": "incomplete", "output": lambda items: items[-1]["status"] == "incomplete"},
    ),
    Given("responses", {"model": "silent"}, answer={"output": [message("")]}),
    *neutral(
        "responses",
        {"store": False, "background": False, "truncation": "disabled", "service_tier": "auto"},
        {"instructions": None, "tools": None, "metadata": None, "previous_response_id": None},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "prompt_cache_key": "k"},
        {"include": ["reasoning.encrypted_content"], "text": {"verbosity": "low"}, "user": "u"},
    ),
]
WRONG = [
    Wrong("responses", {"store": True}, "store"),
    Wrong("responses", {"background": True}, "background"),
    Wrong("responses", {"truncation": "auto"}, "truncation"),
    Wrong("responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
    Wrong("responses", {"conversation": "conv_1"}, "conversation"),
    Wrong("responses", {"prompt": {"id": "p"}}, "prompt"),
    Wrong("responses", {"max_output_tokens": 0}, "max_output_tokens"),
    Wrong("responses", {"temperature": 3}, "temperature"),
    Wrong("responses", {"top_logprobs": 21}, "top_logprobs"),
    Wrong("responses", {"text": {"verbosity": "loud"}}, "text.verbosity"),
    Wrong("responses", {"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    Wrong("responses", {"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    Wrong("responses", {"reasoning": {"effort": "huge"}}, "reasoning.effort", "use 'none' or 'minimal' or 'low' or"),
    Wrong("responses", {"reasoning": {"mode": "pro"}}, "reasoning"),
    Wrong(
        "responses",
        {"tools": [{"type": "web_search"}]},
        "tools[0].type",
        "Invalid value for 'tools[0].type': invalid enum value 'web_search', use 'function'.",
    ),
    Wrong("responses", {"model": "messages[9]"}, "model", "'messages[9]' does not exist", 404),
    Wrong("responses", {"tool_choice": {"type": "function", "name": "messages[9]"}}, "tool_choice"),
    Wrong("responses", {"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    Wrong("responses", {"tools": FUNCTIONS, "model": "agent", "tool_choice": "any"}, "tool_choice"),
    Wrong("responses", {"tools": FUNCTIONS}, "tools"),
    Wrong("responses", {"tool_choice": "required"}, "tool_choice"),
    Wrong(
        "responses", {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": ["a"]}}, "tool_choice.tools[0]"
    ),
    Wrong("responses", {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
    Wrong("responses", {"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
    Wrong("responses", {"input": []}, "input"),
    Wrong("responses", {"input": 5}, "input"),
    Wrong("responses", {"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
    Wrong("responses", {"input": [{"role": "user"}]}, "input[0].content"),
    Wrong("responses", {"input": [USER, {"type": "item_reference", "id": "msg_1"}]}, "input[1].type"),
    Wrong("responses", {"input": [USER, {"type": "function_call", "name": "a", "arguments": ""}]}, "input[1].call_id"),
    Wrong(
        "responses",
        {"input": [USER, {"type": "function_call_output", "call_id": "c", "output": ""}]},
        "input[1].call_id",
    ),
    Wrong(
        "responses",
        {"input": [USER, {"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
        "input[1].content[0].type",
    ),
    Wrong(
        "responses",
        {"input": [USER, {"role": "user", "content": [{"type": "input_image", "image_url": "http://a/b.png"}]}]},
        "input[1].content[0].image_url",
    ),
]
