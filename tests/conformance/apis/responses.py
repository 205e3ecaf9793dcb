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
GIVEN = {
    "responses": [
        Given(
            {"max_output_tokens": 2, "metadata": {"a": "b"}, "instructions": "Be brief."},
            {"max_new_tokens": [2], "messages": [{"role": "system", "content": "Be brief."}, USER]},
            ANSWER
            | {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "metadata": {"a": "b"}}
            | {"max_output_tokens": 2, "instructions": "Be brief.", "output": [message(" ein zwei", "incomplete")]}
            | {"usage": USAGE | {"input_tokens": 2, "output_tokens": 2, "total_tokens": 4}},
        ),
        Given({"model": "tuned", "top_p": 1}, answer={"temperature": 0.5, "top_p": 1}),
        Given(
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
            {
                "input": [
                    USER,
                    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [text("reasoning_text", "Hm.")]},
                    {
                        "type": "message",
                        "role": "assistant",
                        "status": "completed",
                        "content": [text("output_text", "b")],
                    },
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
            {
                "model": "sees",
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_image", "detail": "auto", "image_url": URL},
                            text("input_text", "b"),
                        ],
                    }
                ],
            },
            {"messages": [{"role": "user", "content": [{"type": "image"}, text("text", "b")]}], "images": [IMAGE]},
            streams=False,
        ),
        Given({"temperature": 0.5, "top_p": 0.25}, {"temperature": [0.5], "top_p": [0.25]}),
        Given({"text": {"format": {"type": "json_object"}}}, {"structured_outputs": {"json_object": True}}),
        Given(
            {"text": {"format": {"type": "json_schema", "schema": CITY, "name": "a"}}},
            {"structured_outputs": {"json": CITY}},
        ),
        Given(
            {"top_logprobs": 2},
            {"logprobs": 2},
            {"output": [{"content": [{"logprobs": lambda tokens: [one["token"] for one in tokens] == COUNTED}]}]},
        ),
        Given({"include": ["message.output_text.logprobs"]}, {"logprobs": 0}),
        Given(
            {"reasoning": {"effort": "low", "summary": "auto"}},
            {"chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "low"}},
        ),
        Given(
            AGENT,
            {"tools": TOOLS},
            {
                "tools": FUNCTIONS,
                "output": [
                    REASONING | {"status": "completed"},
                    message("I ask."),
                    {
                        "type": "function_call",
                        "name": "weather",
                        "arguments": '{"city": "Oslo"}',
                        "status": "completed",
                    },
                    {"type": "function_call", "name": "time", "arguments": "{}", "status": "completed"},
                ],
            },
        ),
        Given(
            AGENT | {"model": "agent_stream"},
            {"tools": TOOLS},
            {"usage": {"output_tokens_details": {"reasoning_tokens": 2}}},
        ),
        Given(AGENT | {"tool_choice": NAMED}, {"tools": TOOLS, "structured_outputs": bool}),
        Given(
            AGENT | {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}},
            {"tools": TOOLS[1:], "structured_outputs": bool},
        ),
        Given(  # the arguments end too early
            AGENT | {"max_output_tokens": 8},
            answer={"status": "incomplete", "output": lambda items: items[-1]["status"] == "incomplete"},
        ),
        Given({"model": "silent"}, answer={"output": [message("")]}),
        *neutral(
            {"store": False, "background": False, "truncation": "disabled", "service_tier": "auto"},
            {"instructions": None, "tools": None, "metadata": None, "previous_response_id": None},
            {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "prompt_cache_key": "k"},
            {"include": ["reasoning.encrypted_content"], "text": {"verbosity": "low"}, "user": "u"},
        ),
    ]
}

WRONG = {
    "responses": [
        Wrong({"store": True}, "store"),
        Wrong({"background": True}, "background"),
        Wrong({"truncation": "auto"}, "truncation"),
        Wrong({"previous_response_id": "resp_1"}, "previous_response_id"),
        Wrong({"conversation": "conv_1"}, "conversation"),
        Wrong({"prompt": {"id": "p"}}, "prompt"),
        Wrong({"max_output_tokens": 0}, "max_output_tokens"),
        Wrong({"temperature": 3}, "temperature"),
        Wrong({"top_logprobs": 21}, "top_logprobs"),
        Wrong({"text": {"verbosity": "loud"}}, "text.verbosity"),
        Wrong({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        Wrong({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        Wrong({"reasoning": {"effort": "huge"}}, "reasoning.effort", "use 'none' or 'minimal' or 'low' or"),
        Wrong({"reasoning": {"mode": "pro"}}, "reasoning"),
        Wrong(
            {"tools": [{"type": "web_search"}]},
            "tools[0].type",
            "Invalid value for 'tools[0].type': invalid enum value 'web_search', use 'function'.",
        ),
        Wrong({"model": "messages[9]"}, "model", "'messages[9]' does not exist", 404),
        Wrong({"tool_choice": {"type": "function", "name": "messages[9]"}}, "tool_choice"),
        Wrong({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        Wrong({"tools": FUNCTIONS, "model": "agent", "tool_choice": "any"}, "tool_choice"),
        Wrong({"tools": FUNCTIONS}, "tools"),
        Wrong({"tool_choice": "required"}, "tool_choice"),
        Wrong({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": ["a"]}}, "tool_choice.tools[0]"),
        Wrong({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
        Wrong({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        Wrong({"input": []}, "input"),
        Wrong({"input": 5}, "input"),
        Wrong({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        Wrong({"input": [{"role": "user"}]}, "input[0].content"),
        Wrong({"input": [USER, {"type": "item_reference", "id": "msg_1"}]}, "input[1].type"),
        Wrong({"input": [USER, {"type": "function_call", "name": "a", "arguments": ""}]}, "input[1].call_id"),
        Wrong({"input": [USER, {"type": "function_call_output", "call_id": "c", "output": ""}]}, "input[1].call_id"),
        Wrong(
            {"input": [USER, {"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "input[1].content[0].type",
        ),
        Wrong(
            {"input": [USER, {"role": "user", "content": [{"type": "input_image", "image_url": "http://a/b.png"}]}]},
            "input[1].content[0].image_url",
        ),
    ]
}
