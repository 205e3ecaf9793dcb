"""Anthropic's messages."""

from __future__ import annotations

from typing import Any

from tests.conformance.apis.models import IMAGE, URL
from tests.conformance.apis.openai_text import CITY, NO_THOUGHT, TOOLS, called
from tests.conformance.apis.run import ALWAYS, Begins, Case, Exactly, Given, Wrong, neutral
from tests.support.triton_stand_in import COUNTED

CHAT = {"model": "counter", "messages": [{"role": "user", "content": "a"}]}
USER = {"role": "user", "content": "a"}
OWN_TOOLS = [
    {"name": "weather", "description": "Look up.", "input_schema": CITY, "cache_control": {"type": "ephemeral"}},
    {"type": "custom", "name": "time", "input_schema": {"type": "object"}},
]
AGENT = {"model": "agent", "tools": OWN_TOOLS, "max_tokens": 99}
TO_TRITON = {"messages": [USER], "max_new_tokens": [9], **ALWAYS}
BRIEF = {"role": "system", "content": "Be brief."}
FORMAT = {"type": "json_schema", "schema": CITY}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


USAGE = {"input_tokens": 0, "cache_read_input_tokens": 1, "cache_creation_input_tokens": 0, "output_tokens": 6}
ANSWER = Exactly(
    {
        "id": Begins("msg_"),
        "type": "message",
        "role": "assistant",
        "model": "counter",
        "content": [text("".join(COUNTED))],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": USAGE,
    }
)
CASES = [
    Case(
        *("messages", "/v1/messages", CHAT | {"max_tokens": 9}, "anthropic", "anthropic"),
        prompt="messages",
        triton=TO_TRITON,
        answer=ANSWER,
    ),
    Case(
        *("count-tokens", "/v1/messages/count_tokens", CHAT, "anthropic"),
        triton={"messages": [USER], "outputs": ["tokenized"]},
        answer={"input_tokens": len('[{"role":"user","content":"a"}]') + 2},
    ),
]
GIVEN = {
    "messages": [
        Given(
            {"max_tokens": 2, "system": "Be brief."},
            {"max_new_tokens": [2], "messages": [BRIEF, USER]},
            ANSWER
            | {"content": [text(" ein zwei")], "stop_reason": "max_tokens"}
            | {"usage": USAGE | {"input_tokens": 1, "output_tokens": 2}},
        ),
        Given({"stop_sequences": ["x"]}, {"stop": ["x"]}, {"stop_reason": "stop_sequence", "stop_sequence": "x"}),
        Given(
            {
                "system": [text("Be"), text("brief.") | {"cache_control": {"type": "ephemeral"}}],
                "messages": [
                    USER,
                    {"role": "user", "content": [text("b"), text("c")]},
                    {"role": "assistant", "content": ""},
                    {"role": "system", "content": "Now in French."},
                    USER,
                ],
            },
            {
                "messages": [
                    {"role": "system", "content": "Be\nbrief."},
                    {"role": "user", "content": "a\nb\nc"},
                    {"role": "assistant", "content": ""},
                    {"role": "system", "content": "Now in French."},
                    USER,
                ]
            },
        ),
        Given(
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "Hm.", "signature": ""},
                            text("b"),
                            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
                            {"type": "tool_use", "id": "t2", "name": "time", "input": {}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"},
                            {"type": "tool_result", "tool_use_id": "t2", "is_error": True, "content": [text("?")]},
                            text("So?"),
                        ],
                    },
                ]
            },
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": "b",
                        "reasoning_content": "Hm.",
                        "tool_calls": [called("weather", {"city": "Oslo"}, id="t1"), called("time", {}, id="t2")],
                    },
                    {"role": "tool", "name": "weather", "tool_call_id": "t1", "content": "sunny"},
                    {"role": "tool", "name": "time", "tool_call_id": "t2", "content": "Error:\n?"},
                    {"role": "user", "content": "So?"},
                ]
            },
        ),
        Given(
            {"temperature": 0.5, "top_p": 0.25, "top_k": 5, "stop_sequences": ["x", "y"], "max_tokens": 2},
            {"temperature": [0.5], "top_p": [0.25], "top_k": 5, "stop": ["x", "y"], "max_new_tokens": [2]},
        ),
        Given(
            {
                "model": "sees",
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "image",
                                "source": {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]},
                            },
                            text("b"),
                        ],
                    }
                ],
            },
            {"messages": [{"role": "user", "content": [{"type": "image"}, text("b")]}], "images": [IMAGE]},
            streams=False,
        ),
        Given({"output_config": {"format": FORMAT}}, {"structured_outputs": {"json": CITY}}),
        Given({"thinking": {"type": "disabled"}}, NO_THOUGHT),
        Given(
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"chat_template_kwargs": {"enable_thinking": True}},
        ),
        Given(
            {"output_config": {"effort": "high"}},
            {"chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "high"}},
        ),
        Given(
            AGENT,
            {"tools": TOOLS, "max_new_tokens": [99]},
            {
                "content": [
                    Exactly({"type": "thinking", "thinking": "Let me see.", "signature": ""}),
                    text("I ask."),
                    {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}},
                    {"type": "tool_use", "name": "time", "input": {}},
                ],
                "stop_reason": "tool_use",
            },
        ),
        Given(
            AGENT | {"tool_choice": {"type": "tool", "name": "time"}},
            {"tools": TOOLS, "max_new_tokens": [99], "structured_outputs": bool},
        ),
        Given(  # the arguments end too early
            AGENT | {"max_tokens": 8},
            answer={"stop_reason": "max_tokens", "content": lambda blocks: blocks[-1].get("input", {}) == {}},
        ),
        Given({"model": "silent"}, answer={"content": [text("")]}),
        *neutral(
            {"metadata": {"user_id": "u"}, "service_tier": "standard_only", "cache_control": {"type": "ephemeral"}},
            {"tools": [], "thinking": {"type": "adaptive"}, "stop_sequences": [], "container": None, "thread": None},
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        ),
    ],
    "count-tokens": [
        Given(
            {"model": "agent", "tools": OWN_TOOLS, "system": "Be brief."}, {"messages": [BRIEF, USER], "tools": TOOLS}
        )
    ],
}

SCHEMA = {"type": "object"}
ORPHAN = {"type": "tool_result", "tool_use_id": "t9", "content": "?"}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}
WRONG = {
    "messages": [
        Wrong({"tool_choice": {"type": "any"}}, "tool_choice"),
        Wrong({"max_tokens": 0}, "max_tokens"),
        Wrong({"max_tokens": None}, "max_tokens"),
        Wrong({"temperature": 1.5}, "temperature"),
        Wrong({"top_k": -5}, "top_k"),
        Wrong({"messages": []}, "messages"),
        Wrong({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        Wrong({"messages": [USER, {"role": "assistant", "content": "The"}]}, "messages[1].role"),
        Wrong({"messages": [{"role": "user", "content": [DOCUMENT]}]}, "messages[0].content[0].type"),
        Wrong(
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, ORPHAN]}]},
            "messages[0].content[1].tool_use_id",
        ),
        Wrong({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        Wrong({"tools": [{"input_schema": SCHEMA}]}, "tools[0].name"),
        Wrong({"tools": OWN_TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        # A tool with the name of a field of chats keeps it.
        Wrong({"tools": [{"name": "stop", "input_schema": {"type": "array"}}]}, "stop"),
        Wrong({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display"),
        Wrong({"output_config": {"effort": "huge"}}, "output_config.effort"),
        Wrong({"container": "c"}, "container"),
        Wrong({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        Wrong({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        Wrong({"speed": "fast"}, "speed"),
        Wrong({"model": "messages[9]"}, "", "'messages[9]' does not exist", 404),
        Wrong({"tool_choice": {"type": "tool", "name": "messages[9]"}}, "tool_choice"),
    ],
    "count-tokens": [Wrong({"max_tokens": 5}, "max_tokens"), Wrong({"messages": []}, "messages")],
}
