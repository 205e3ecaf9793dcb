"""Anthropic's messages."""

from tests.conformance.apis.run import Case, Wrong

CHAT = {"model": "counter", "messages": [{"role": "user", "content": "a"}]}
CASES = [
    Case("messages", "/v1/messages", CHAT | {"max_tokens": 9}, "anthropic", "anthropic", prompt="messages"),
    Case("count-tokens", "/v1/messages/count_tokens", CHAT, "anthropic"),
]

USER = {"role": "user", "content": "a"}
SCHEMA = {"type": "object"}
TOOLS = [{"name": "weather", "input_schema": SCHEMA}]
ORPHAN = {"type": "tool_result", "tool_use_id": "t9", "content": "?"}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}
WRONG = [
    Wrong("messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
    Wrong("messages", {"max_tokens": 0}, "max_tokens"),
    Wrong("messages", {"max_tokens": None}, "max_tokens"),
    Wrong("messages", {"temperature": 1.5}, "temperature"),
    Wrong("messages", {"top_k": -5}, "top_k"),
    Wrong("messages", {"messages": []}, "messages"),
    Wrong("messages", {"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    Wrong("messages", {"messages": [USER, {"role": "assistant", "content": "The"}]}, "messages[1].role"),
    Wrong("messages", {"messages": [{"role": "user", "content": [DOCUMENT]}]}, "messages[0].content[0].type"),
    Wrong(
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, ORPHAN]}]},
        "messages[0].content[1].tool_use_id",
    ),
    Wrong("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    Wrong("messages", {"tools": [{"input_schema": SCHEMA}]}, "tools[0].name"),
    Wrong("messages", {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    # A tool with the name of a field of chats keeps it.
    Wrong("messages", {"tools": [{"name": "stop", "input_schema": {"type": "array"}}]}, "stop"),
    Wrong("messages", {"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display"),
    Wrong("messages", {"output_config": {"effort": "huge"}}, "output_config.effort"),
    Wrong("messages", {"container": "c"}, "container"),
    Wrong("messages", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    Wrong("messages", {"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    Wrong("messages", {"speed": "fast"}, "speed"),
    Wrong("count-tokens", {"max_tokens": 5}, "max_tokens"),
    Wrong("count-tokens", {"messages": []}, "messages"),
]
