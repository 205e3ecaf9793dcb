"""The fields of a request that concern tools: what is refused, and what the model gets."""

import json

import msgspec
import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from gateway.edge.errors import ApiError
from gateway.text.tool_calls import FAMILIES
from gateway.text.tool_fields import AllowedTools, NamedTool, Tool, ToolUse
from gateway.triton.served import System
from triton_transformers.settings import TOOL_PARSERS

TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Forecast", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
ANSWERED = [
    {"role": "user", "content": "And there?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]


def system(family="hermes", reasoning=""):
    config = ModelConfig(name="mychat")
    for name, value in (("tool_parser", family), ("reasoning", reasoning)):
        if value:
            config.parameters[name].string_value = value
    return System("mychat", {"mychat": config})


def use(*options, tools=TOOLS, served=None, **more):
    return ToolUse(served or system(), msgspec.convert(tools, list[Tool]), *options, **more)


def with_parameters(schema):
    return [{"type": "function", "function": {"name": "now", "parameters": schema}}]


def named(name):
    return msgspec.convert({"type": "function", "function": {"name": name}}, NamedTool)


def allowed(name, mode="auto"):
    tools = [{"type": "function", "function": {"name": name}}]
    return msgspec.convert({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}, AllowedTools)


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"choice": named("then")}, "tool_choice", "'then', which is not in 'tools'"),
        ({"choice": allowed("then")}, "tool_choice", "'then', which is not in 'tools'"),
        ({"choice": "required", "tools": []}, "tool_choice", "needs 'tools'"),
        ({"tools": with_parameters({"type": "things"})}, "tools", "of the type 'object', not \"things"),
        ({"tools": with_parameters({"type": ["string", "null"], "a": []})}, "tools", "the tool 'now' must be"),
        ({"served": system("")}, "tools", "has no form of tool calls"),
        ({"served": system("unknown")}, "tools", "has no form of tool calls"),
    ],
)  # fmt: skip
def test_wrong_fields_are_refused(options, param, words):
    with pytest.raises(ApiError, match=words) as error:
        use(**options)
    assert (error.value.status, error.value.param) == (400, param)


def test_setting_overrides_what_the_template_asks_for():
    mine = system("hermes").config
    assert use(served=System("mychat", {"mychat": mine}, tool_parser="llama3")).family == "llama3"
    with pytest.raises(ApiError, match="has no form of tool calls"):
        use(served=System("mychat", {"mychat": mine}, tool_parser="none"))
    assert {*TOOL_PARSERS} == {*FAMILIES} - {""}


@pytest.mark.parametrize("name", ["", "two words", "x" * 65])
def test_wrong_names_are_refused(name):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"name": name}, Tool)


def test_grammar_has_no_reasoning_that_is_switched_off():
    thinking = use("required", served=system("hermes", "think")).options()["structured_outputs"]
    off = use("required", served=system("hermes", "think"), template_kwargs={"enable_thinking": False})
    assert thinking["structural_tag"]["format"]["type"] == "or"
    assert off.options()["structured_outputs"]["structural_tag"]["format"]["type"] == "tag"


def test_options_of_the_model():
    assert use().options() == {"tools": TOOLS}
    assert use("none").options() == {}
    assert use(tools=[]).options() == {}
    assert use(tools=[], served=system("harmony", "harmony")).options() == {"skip_special_tokens": False}
    assert use(served=system("llama3")).options() == {"tools": TOOLS, "skip_special_tokens": False}
    assert use(tools=[], served=system("llama3")).options() == {}
    assert use("required").options().keys() == {"tools", "structured_outputs"}
    assert use(allowed("now")).options() == {"tools": TOOLS[1:]}
    assert use(allowed("now", "required")).options() == use("required", tools=TOOLS[1:]).options()
    assert use(served=system(""), choice=named("now")).options().keys() == {"structured_outputs"}


def test_switched_off_reasoning_is_not_awaited():
    opened = system("", "think_opened")
    assert use(tools=[], served=opened).parser().feed("Hm.", True)[0].reasoning == "Hm."
    off = use(tools=[], served=opened, template_kwargs={"enable_thinking": False})
    assert off.parser().feed("Hm.", True)[0].content == "Hm."


def test_messages_of_calls_and_results():
    _, calls, result = use().messages(ANSWERED)
    assert calls["content"] == ""
    assert calls["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
    assert result == {"role": "tool", "name": "weather", "tool_call_id": "call_1", "content": "sunny"}
    for arguments in ('{"city', '{"city": "\\ud83d"}', "[1]"):
        broken = CALL | {"function": {"name": "weather", "arguments": arguments}}
        (kept,) = use().messages([{"role": "assistant", "content": None, "tool_calls": [broken]}])
        assert kept["tool_calls"][0]["function"]["arguments"] == arguments


def test_mistral_gets_ids_of_nine_characters():
    _, calls, result = use(served=system("mistral")).messages(ANSWERED)
    assert calls["tool_calls"][0]["id"] == result["tool_call_id"]
    assert len(result["tool_call_id"]) == 9


def test_result_of_an_unknown_call_is_refused():
    with pytest.raises(ApiError) as error:
        use().messages(ANSWERED[2:])
    assert error.value.param == "messages[0].tool_call_id"


def test_model_without_tools_in_its_template_reads_them_in_the_last_message():
    forced = use("required", served=system(""))
    (message,) = forced.messages([{"role": "user", "content": "Which?"}])
    assert json.loads(message["content"].splitlines()[-1]) == [tool["function"] for tool in TOOLS]
