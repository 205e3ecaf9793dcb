"""Anthropic's messages."""

from tests.conformance.apis.run import Case

CHAT = {"model": "counter", "messages": [{"role": "user", "content": "a"}]}
CASES = [
    Case("messages", "/v1/messages", CHAT | {"max_tokens": 9}, "anthropic", "anthropic", prompt="messages"),
    Case("count-tokens", "/v1/messages/count_tokens", CHAT, "anthropic"),
]
