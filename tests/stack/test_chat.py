"""`chat`, the trained model of the catalogue: random weights cannot show that an answer has sense."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest

from tests.support.stacks import TestStack

pytestmark = pytest.mark.slow

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
WEATHER = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture(scope="module")
def client(stack, openai: ModuleType) -> Any:
    stack.assemble({"SYSTEMS": "chat"})
    served: TestStack = stack.serve("chat")
    return openai.OpenAI(base_url=f"{served.gateway}/v1", api_key=served.client_key)


def ask(client: Any, content: str, **options: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    answer = client.chat.completions.create(model="chat", messages=messages, temperature=0, max_tokens=60, **options)
    return answer.choices[0].message


def test_chat_streams_the_capital_of_france(client):
    pieces = client.chat.completions.create(model="chat", messages=CAPITAL, temperature=0, max_tokens=30, stream=True)
    texts = [piece.choices[0].delta.content for piece in pieces if piece.choices and piece.choices[0].delta.content]
    assert "Paris" in "".join(texts)
    assert len(texts) > 3


def test_chat_writes_what_a_schema_asks_for(client):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    written = ask(client, "Describe as JSON: Anna is 31 years old and lives in Paris.", response_format=form).content
    assert json.loads(written) == {"name": "Anna", "age": 31, "city": "Paris"}


def test_chat_calls_a_tool(client):
    tools = [{"type": "function", "function": WEATHER}]
    (call,) = ask(client, "How is the weather in Paris?", tools=tools, tool_choice="required").tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
