"""Calls of tools by models with random weights, which only a grammar brings to make valid ones."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.support.chat_templates import TOOLS_HERMES, TOOLS_LLAMA, TOOLS_MISTRAL
from tests.support.checkpoints import language
from tests.support.stacks import TestStack
from triton_transformers.http import opener

pytestmark = pytest.mark.slow

PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
# System -> its template, and the format in which it is served.
SYSTEMS = {
    "hermes": (TOOLS_HERMES, "openvino-fp32"),
    "llama3": (TOOLS_LLAMA, "openvino-fp32"),
    "mistral": (TOOLS_MISTRAL, "python"),
    "plain": (PLAIN, "openvino-fp32"),
}
CITIES = ["Rome", "Köln"]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": CITIES}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The forecast", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
QUESTION = {"role": "user", "content": "Which battery fits?"}
OPTIONS = {"temperature": 0, "max_tokens": 400, "chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    return {system: save(tmp_path_factory.mktemp(system), template) for system, (template, _) in SYSTEMS.items()}


def save(folder: Path, template: str) -> Path:
    language.save_llama(folder, context=2048)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def served(stack, sources) -> TestStack:
    stack.assemble(
        *(
            {"SYSTEMS": system, "SOURCE": sources[system], "TASK": "text-generation", "FORMAT": form}
            for system, (_, form) in SYSTEMS.items()
        )
    )
    return stack.serve(*SYSTEMS)


def chat(served: TestStack, model: str, **fields) -> dict:
    return served.post("/v1/chat/completions", model=model, **({"messages": [QUESTION]} | OPTIONS | fields))


def streamed(served: TestStack, model: str, **fields) -> tuple[list[dict], str]:
    """Return the calls of a stream, and the reason for its end."""
    body = {"model": model, "messages": [QUESTION], "stream": True} | OPTIONS | fields
    headers = {"Authorization": f"Bearer {served.client_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{served.gateway}/v1/chat/completions", json.dumps(body).encode(), headers)
    calls: list[dict] = []
    reason = ""
    with opener.open(request, timeout=120) as response:
        for line in response:
            if line.startswith(b"data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                reason = choice["finish_reason"] or reason
                for call in choice["delta"].get("tool_calls", []):
                    if call["index"] == len(calls):
                        calls.append(call)
                    else:
                        calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return calls, reason


def content(calls: list[dict]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def check(calls: list[dict]) -> None:
    assert len({call["id"] for call in calls}) == len(calls)
    for call in calls:
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        if name == "now":
            assert arguments == {}
        else:
            assert name == "weather" and arguments.keys() == {"city", "days"}
            assert arguments["city"] in CITIES and arguments["days"] in range(1, 10)


@pytest.mark.parametrize("model", SYSTEMS)
def test_required_tool_is_called(served, model):
    """Without parallel calls: random weights may never end the list."""
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = chat(served, model, **fields)["choices"]
    calls = choice["message"]["tool_calls"]
    check(calls)
    assert len(calls) == 1 and choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
    stream, reason = streamed(served, model, **fields)
    assert (content(stream), reason) == (content(calls), "tool_calls")


@pytest.mark.parametrize("model", SYSTEMS)
def test_named_tool_is_called_with_other_texts(served, model):
    named = {"type": "function", "function": {"name": "weather"}}
    for seed in range(4):
        fields = {"tools": TOOLS, "tool_choice": named, "temperature": 2, "seed": seed}
        (choice,) = chat(served, model, **fields)["choices"]
        check(choice["message"]["tool_calls"])
        assert [name for name, _ in content(choice["message"]["tool_calls"])] == ["weather"]


def test_model_without_tools_in_its_template_refuses_to_choose(served):
    with pytest.raises(urllib.error.HTTPError) as refused:
        chat(served, "plain", tools=TOOLS)
    error = json.load(refused.value)["error"]
    assert (refused.value.code, error["param"]) == (400, "tools")
