"""OpenAI's responses."""

from tests.conformance.apis.run import Case, Wrong

BODY = {"model": "counter", "input": "a"}
CASES = [Case("responses", "/v1/responses", BODY, stream="responses", prompt="input")]

USER = {"role": "user", "content": "a"}
TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
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
    Wrong("responses", {"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    Wrong("responses", {"reasoning": {"mode": "pro"}}, "reasoning"),
    Wrong("responses", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    Wrong("responses", {"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    Wrong("responses", {"tools": TOOLS, "model": "agent", "tool_choice": "any"}, "tool_choice"),
    Wrong("responses", {"tools": TOOLS}, "tools"),
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
