"""Chats with tools, by models with random weights."""

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


@pytest.mark.parametrize("model", ["hermes", "mistral"])
def test_model_reads_tools_calls_and_results(served, sources, model):
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefgh1", "content": "sunny"},
    ]
    answer = chat(served, model, messages=messages, tools=TOOLS, max_tokens=5)
    tokenizer = AutoTokenizer.from_pretrained(sources[model])
    template_call = call | {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages[1] = {"role": "assistant", "content": None, "tool_calls": [template_call]}
    options = {"tools": TOOLS, "add_generation_prompt": True, "enable_thinking": False, "return_dict": False}
    assert answer["usage"]["prompt_tokens"] == len(tokenizer.apply_chat_template(messages, **options))


def test_answer_without_a_call_is_content(served):
    (choice,) = chat(served, "hermes", tools=TOOLS, max_tokens=5)["choices"]
    assert choice["message"]["content"] and "tool_calls" not in choice["message"]


def test_model_without_tools_in_its_template_refuses_to_choose(served):
    with pytest.raises(urllib.error.HTTPError) as refused:
        chat(served, "plain", tools=TOOLS)
    error = json.load(refused.value)["error"]
    assert (refused.value.code, error["param"]) == (400, "tools")
