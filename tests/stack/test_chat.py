"""`chat`, the trained model of the catalogue: random weights cannot show that an answer has sense."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from dotenv import unset_key

from tests.support.stacks import TestStack

pytestmark = pytest.mark.slow

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
def added(stack: TestStack) -> str:
    """Serve the chat as a person does, and return what that prints."""
    stack.serve()
    done = stack.make("add", SYSTEM="chat")
    assert done.returncode == 0, done.stdout + done.stderr
    unset_key(stack.environment["TRITON_SETTINGS_FILE"], "SYSTEMS")  # for other modules
    stack.environment["SYSTEMS"] = "embedding chat"
    return done.stdout


@pytest.fixture(scope="module")
def served(stack: TestStack, added: str) -> TestStack:
    return stack


def ask(served: TestStack, content: str, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    fields = {"model": "chat", "messages": messages, "temperature": 0, "max_tokens": 60} | options
    return served.post("/v1/chat/completions", **fields)["choices"][0]["message"]


@pytest.mark.parametrize("model", ["chat", "chat_stream"])
def test_configuration_has_the_input_for_chats(served, model):
    assert "messages" in [tensor["name"] for tensor in served.triton.config(model)["input"]]


def test_add_ends_with_a_chat_that_can_be_pasted(served, added, tmp_path):
    *_, about, command = added.strip().split("\n\n")
    engine, key, place = about.splitlines()
    assert engine.startswith("chat runs on openvino-genai int")
    assert (key, place) == ("Set API_KEY to one of the keys first.", f"Try it on the page, {served.gateway}, or paste:")
    done = served.paste(command, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_chat_knows_the_capital_of_france(served):
    assert "Paris" in ask(served, "What is the capital of France?")["content"]


def test_chat_writes_what_a_schema_asks_for(served):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    message = ask(served, "Describe as JSON: Anna is 31 years old and lives in Paris.", response_format=form)
    assert json.loads(message["content"]) == {"name": "Anna", "age": 31, "city": "Paris"}


def test_chat_calls_a_tool(served):
    tools = [{"type": "function", "function": WEATHER}]
    (call,) = ask(served, "How is the weather in Paris?", tools=tools, tool_choice="required")["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}


def test_chat_answers_alone_as_among_others(served):
    countries = ["France", "Italy", "Japan", "Egypt", "Norway", "Peru"]
    questions = [f"Write two sentences about {country} and its capital." for country in countries]
    alone = [ask(served, question)["content"] for question in questions]
    with ThreadPoolExecutor(len(questions)) as pool:
        together = [message["content"] for message in pool.map(lambda question: ask(served, question), questions)]
    assert together == alone
    assert len(set(alone)) == len(alone)


def test_prefix_cache_saves_time_and_keeps_the_text(served):
    """OpenVINO GenAI does not count the hits of its cache, so their time shows them."""
    notes = " ".join(f"Note {number}: room {7 * number} is on floor {number % 9}." for number in range(60))

    def timed(question: str) -> tuple[str, float]:
        start = time.monotonic()
        return ask(served, f"{notes} {question}", max_tokens=8)["content"], time.monotonic() - start

    question = "What is the capital of France?"
    first, seconds = timed(question)
    again = [timed(question) for _ in range(3)]
    assert {text for text, _ in again} == {first}
    assert min(cached_seconds for _, cached_seconds in again) < seconds / 2
    # These only begin alike.
    assert min(timed(f"Which floor is room {room} on?")[1] for room in (14, 21, 28)) < seconds / 2
