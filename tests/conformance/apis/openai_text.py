"""OpenAI's completions and chats, also at the addresses of Hugging Face's Inference API."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.conformance.apis.models import GIF, IMAGE, PART
from tests.conformance.apis.run import ABSENT, ALWAYS, Begins, Case, Exactly, Given, Wrong, neutral, wrong
from tests.support.triton_stand_in import COUNTED, ids_of

USER = [{"role": "user", "content": "a"}]
PROMPT = {"model": "counter", "prompt": "a"}
CHAT = {"model": "counter", "messages": USER}
OPENAI = {"form": "openai", "stream": "openai"}
AT = "/models/{model}"
NOW = pytest.approx(time.time(), abs=3600)
WHOLE = "".join(COUNTED)
TO_PROMPT = {"text_input": ["a"], "max_new_tokens": [16], **ALWAYS}
TO_CHAT = {"messages": USER, **ALWAYS}
DETAILS = {"prompt_tokens_details": {"cached_tokens": 1}}
ONE = {"index": 0, "finish_reason": "stop", "logprobs": None}


def completion(prompt: int, new: int, choices: list[Any], prefix: str = "cmpl", kind: str = "text_completion") -> Any:
    usage = Exactly({"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new, **DETAILS})
    head = {"id": Begins(f"{prefix}-"), "object": kind, "created": NOW, "model": "counter"}
    return Exactly(head | {"choices": choices, "usage": usage})


CASES = [
    Case(
        *("completions", "/v1/completions", PROMPT),
        **OPENAI,
        many="prompt",
        prompt="prompt",
        triton=TO_PROMPT,
        answer=completion(1, 6, [Exactly({**ONE, "text": WHOLE})]),
    ),
    Case("completions-several", "/v1/completions", PROMPT | {"prompt": ["a", "b"], "n": 2}, **OPENAI),
    Case(
        *("chat", "/v1/chat/completions", CHAT),
        **OPENAI,
        prompt="messages",
        triton=TO_CHAT,
        answer=completion(
            1,
            6,
            [Exactly({**ONE, "message": Exactly({"role": "assistant", "content": WHOLE, "refusal": None})})],
            *("chatcmpl", "chat.completion"),
        ),
    ),
    Case(
        *("hub-completions", f"{AT}/v1/completions", {"prompt": "a"}),
        **OPENAI,
        system="counter",
        prompt="prompt",
        triton=TO_PROMPT,
    ),
    Case(
        *("hub-chat", f"{AT}/v1/chat/completions", {"messages": USER}),
        **OPENAI,
        system="counter",
        prompt="messages",
        triton=TO_CHAT,
        answer={"model": "counter"},
    ),
    Case("hub-chat-short", f"{AT}/chat/completions", {"messages": USER}, **OPENAI, system="counter"),
]
NO_SAMPLER = {"model": "writer"}  # has no input for options of sampling
SAMPLING = {
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": -2,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.2,
    "logit_bias": {"5": -100},
    "ignore_eos": True,
    "min_tokens": 2,
    "stop_token_ids": [3, 4],
    "skip_special_tokens": False,
    "structured_outputs": {"regex": "a|b"},
}
NEUTRAL = {
    "top_k": -1,
    "min_p": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "ignore_eos": False,
    "min_tokens": 0,
    "stop_token_ids": [],
    "skip_special_tokens": True,
    "typical_p": 1.0,
    "bad_words": [],
    "return_token_ids": False,
}
OFF, EFFORT = {"type": "disabled"}, {"effort": "low"}
NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}
THINK = {"chat_template_kwargs": {"a": 1, "enable_thinking": True, "reasoning_effort": "low"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMATS = [
    ({"type": "json_object"}, {"json_object": True}),
    *(
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, **strict}}, {"json": SCHEMA})
        for strict in ({}, {"strict": True}, {"strict": False})
    ),
]
ROLES = [*({"role": role, "content": role} for role in ("developer", "system", "user", "assistant"))]
PARTS = {"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "lines"}]}
# The tools of the model that is called agent, in each API.
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Look up.", "parameters": CITY}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}},
]
NAMED = {"type": "function", "function": {"name": "time"}}
AGENT = {"model": "agent", "tools": TOOLS}


def called(name: str, arguments: Any, **id: str) -> dict[str, Any]:
    return {**id, "type": "function", "function": {"name": name, "arguments": arguments}}


CALLED = {
    "role": "assistant",
    "content": "I ask.",
    "refusal": None,
    "reasoning_content": "Let me see.",
    "tool_calls": [called("weather", '{"city": "Oslo"}'), called("time", "{}")],
}
OWN = {"role": "assistant", "content": "b", "refusal": None, "audio": None, "annotations": None, "function_call": None}
ASKED = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [called("time", '{"a": 1}', id="1")]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "2"}
SENT = [called("time", {"a": 1}, id="1")]
LOGPROBS = {
    "tokens": [" ein", " zwei"],
    "token_logprobs": [-0.5, -0.5],
    "top_logprobs": [{" ein": -0.5, "x": -9999.0}, {" zwei": -0.5, "x": -9999.0}],
    "text_offset": [0, 4],
}
TOKEN = {"token": " ein", "bytes": [32, 101, 105, 110], "logprob": -0.5}
OTHER_TOKEN = {"token": "x", "bytes": [120], "logprob": -9999.0}
TWO = {"max_new_tokens": [2]}
TEXT = {"type": "text", "text": "What is this?"}
SEES = {"model": "sees"}


def with_images(second: Any, first: Any = PART) -> list[Any]:
    """Return messages with two images."""
    return [{"role": "user", "content": [first, TEXT]}, {"role": "user", "content": [TEXT, second]}]


def texts(*texts: str) -> Any:
    return {"choices": [{"index": index, "text": text} for index, text in enumerate(texts)]}


COUNTS = [f"num_{kind}_tokens" for kind in ("input", "output", "cached")]
BOTH = [
    Given(SAMPLING, SAMPLING),
    *(Given({"response_format": asked}, {"structured_outputs": sent}) for asked, sent in FORMATS),
    *neutral(
        NEUTRAL | NO_SAMPLER,
        NO_SAMPLER | {"presence_penalty": 0, "response_format": {"type": "text"}},
        {"n": 1, "stop": [], "user": "somebody"},
        {"logprobs": None, "max_tokens": None, "tools": []},
    ),
]
GIVEN = {
    "completions": [
        *BOTH,
        Given({}, {"outputs": ["text_output", "finish_reason", *COUNTS]}),
        Given(
            {"max_tokens": 3, "temperature": 0, "top_p": 0.5, "seed": -1, "stop": "x", "echo": True},
            {"max_new_tokens": [3], "temperature": [0.0], "top_p": [0.5], "seed": [2**63 - 1], "stop": ["x"]}
            | {"exclude_input_in_output": [False]},
            {"choices": [{"text": "a ein zwei drei", "finish_reason": "length"}]},
        ),
        Given({"model": "tuned"}, {"temperature": [0.5], "top_p": [0.75], "top_k": 20}),
        Given({"model": "tuned", "temperature": 2, "top_k": 3}, {"temperature": [2], "top_p": [0.75], "top_k": 3}),
        Given({"top_p": 0.5}, {"top_p": [0.5]}),
        Given({"top_k": -1, "min_p": 0.5}, {"top_k": -1, "min_p": 0.5}),
        Given({"model": "front"}, {"model": "counter_stream"}, {"model": "front"}),
        Given({"model": "adapted:tone", "top_k": 3}, {"lora_name": "tone", "top_k": 3}, {"model": "adapted:tone"}),
        Given({"model": "counter_stream", "max_tokens": 2}, TWO, texts(" ein zwei")),
        Given({"prompt": ["a", "b c", "d"], "echo": True, "max_tokens": 1}, None, texts("a ein", "b c ein", "d ein")),
        Given(
            {"prompt": ["a", "b c"], "n": 2, "best_of": 2, "echo": True, "max_tokens": 1},
            None,
            texts("a ein", "a ein", "b c ein", "b c ein")
            | {"usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}},
        ),
        Given({"prompt": ids_of("one"), "max_tokens": 2}, TWO | {"text_input": [ids_of("one")]}),
        Given({"prompt": [ids_of("one"), ids_of("b")], "echo": True}, None, texts(f"one{WHOLE}", f"b{WHOLE}")),
        Given({"model": "greedy", "temperature": 0, "top_p": 1}, dict.fromkeys(ALWAYS, ABSENT), streams=False),
        Given({"logprobs": 1, "max_tokens": 2}, TWO | {"logprobs": 1}, {"choices": [{"logprobs": LOGPROBS}]}),
    ],
    "chat": [
        *BOTH,
        Given({"model": "adapted:legal"}, {"lora_name": "legal"}, {"model": "adapted:legal"}),
        Given(
            {"logprobs": True, "top_logprobs": 1, "max_tokens": 1},
            {"logprobs": 1, "max_new_tokens": [1]},
            {"choices": [{"logprobs": {"content": [TOKEN | {"top_logprobs": [OTHER_TOKEN]}], "refusal": None}}]},
        ),
        Given({"logprobs": True}, {"logprobs": 0}),
        Given(
            {"max_tokens": 5, "max_completion_tokens": 1}, {"max_new_tokens": [1]}, {"usage": {"completion_tokens": 1}}
        ),
        Given(
            {"messages": [*ROLES, PARTS]},
            {
                "messages": [
                    {"role": "system", "content": "developer"},
                    *ROLES[1:],
                    {"role": "user", "content": "two\nlines"},
                ]
            },
        ),
        Given({"messages": [*USER, OWN, *USER]}, {"messages": [*USER, {"role": "assistant", "content": "b"}, *USER]}),
        Given({"chat_template_kwargs": {"a": 1}}, {"chat_template_kwargs": {"a": 1}}),
        Given({"chat_template_kwargs": {"a": 1}, "reasoning_effort": "low"}, THINK),
        Given({"reasoning_effort": "none", "chat_template_kwargs": {}}, NO_THOUGHT),
        Given({"thinking": OFF, "model": "thinker"}, NO_THOUGHT),
        Given({"thinking": {"type": "adaptive"}, "model": "thinker"}, {}),
        Given({"reasoning": EFFORT, "chat_template_kwargs": {"a": 1}, "model": "thinker"}, THINK),
        *(
            Given(
                AGENT | {"tool_choice": choice},
                {"tools": TOOLS, "structured_outputs": structure},
                {"choices": [{"message": CALLED, "finish_reason": "tool_calls"}]},
            )
            for choice, structure in (("auto", ABSENT), ("required", bool), (NAMED, bool))
        ),
        Given(
            AGENT | {"model": "agent_stream"},
            {"tools": TOOLS},
            {"usage": {"completion_tokens_details": {"reasoning_tokens": 2}}},
        ),
        *(
            Given(
                AGENT | {"messages": [*USER, ASKED | {reasoning: "hm"}, RESULT]},
                {
                    "tools": TOOLS,
                    "messages": [
                        *USER,
                        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": SENT},
                        RESULT | {"name": "time"},
                    ],
                },
            )
            for reasoning in ("reasoning_content", "reasoning")
        ),
        Given(
            SEES | {"messages": with_images(PART)},
            {"messages": with_images({"type": "image"}, {"type": "image"}), "images": [IMAGE] * 2},
            streams=False,
        ),
        *neutral({"thinking": OFF, "reasoning": EFFORT, "verbosity": "high"}),
    ],
    "hub-completions": [
        Given(
            {"model": "http://elsewhere", "max_tokens": 2, "do_sample": False, "return_full_text": True},
            TWO | {"temperature": [0], "exclude_input_in_output": [False]},
            texts("a ein zwei"),
        )
    ],
    "hub-chat": [
        Given({"model": "dummy", "max_tokens": 1, "response_format": None}, {"max_new_tokens": [1]}),
        Given({"response_format": {"type": "json", "value": SCHEMA}}, {"structured_outputs": {"json": SCHEMA}}),
    ],
}


PLACE = "messages[1].content[1]"
WRONG_FORMS = {
    "structured_outputs": {"regex": "a", "grammar": "b"},
    "structured_outputs.json": {"json": "{"},
    "structured_outputs.choice": {"choice": []},
    "structured_outputs.structural_tag": {"structural_tag": {"triggers": []}},
}
WRONG_VALUES = {
    "n": 13,
    "logprobs": True,
    "response_format": {"type": "json_object"},
    "temperature": 2.1,
    "top_p": 0,
    "stop": ["a"] * 17,
    "seed": "one",
    **SAMPLING,
    "logit_bias": {"-1": 1},
    "stop_token_ids": [1] * 300,
    "chat_template_kwargs": {"a": 1},
    "guided_json": {},
    "typical_p": 0.95,
    "bad_words": ["a"],
    "return_token_ids": True,
}
WITHOUT_SAMPLER = [Wrong(NO_SAMPLER | {name: value}, name) for name, value in WRONG_VALUES.items()]
WRONG = {
    "completions": [
        *WITHOUT_SAMPLER,
        *wrong("prompt", {"prompt": []}),
        *wrong("stream_options", {"stream_options": {"include_usage": True}}),
        *wrong("model", {"model": "embedding"}),
        *wrong("stream", {"model": "greedy", "stream": True}, {"model": "streamer"}),
        *wrong("temperature", {"model": "greedy", "temperature": 0.5}),
        *(Wrong({"model": "picky", **more}, "top_k", by_model=True) for more in ({}, {"stream": True})),
        *wrong("min_p", {"min_p": 2}),
        *wrong("best_of", {"n": 2, "best_of": 3}),
        *wrong("n", {"prompt": ["a"] * 5, "n": 3}),
        *wrong("logprobs", {"logprobs": 21}),
        *wrong("prompt_logprobs", {"logprobs": 1, "echo": True, "prompt_logprobs": 2}),
        *wrong("max_tokens", {"max_tokens": -1}),
        *wrong("response_format.type", {"response_format": {"type": "xml"}}),
        *wrong("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        *wrong(
            "structured_outputs", {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
        ),
        *(Wrong({"structured_outputs": form}, param) for param, form in WRONG_FORMS.items()),
        *(
            Wrong({"model": name}, "model", f"The model '{name}' does not exist", 404, "model_not_found")
            for name in ("adapted:", "adapted:nothing", "counter:tone", "nothing:tone")
        ),
        # The adapter was removed after the gateway had read the list.
        Wrong({"model": "late:tone"}, "model", "'late:tone' does not exist", 404, "model_not_found", by_model=True),
        Wrong({"model": "orphan"}, status=503, code="model_not_ready"),
        Wrong({"model": "text-classification"}, "model", "It answers /models/text-classification."),
    ],
    "chat": [
        *WITHOUT_SAMPLER,
        Wrong({"model": "greedy"}, "messages", "no chat template"),
        *wrong("max_tokens", {"max_tokens": 0}),
        *wrong("prompt_logprobs", {"prompt_logprobs": 1}),
        *wrong("messages", {"messages": []}, {"messages": ABSENT}),
        Wrong({"model": "plain"}, "messages", by_model=True),
        *wrong("messages[0].role", {"messages": [{"role": "function", "content": "a"}]}),
        *wrong("messages[0].content", {"messages": [{"role": "user"}]}),
        *wrong("tools[0].function", {"tools": [{"type": "function"}]}),
        *wrong("functions", {"functions": [{}]}),
        *wrong("top_logprobs", {"top_logprobs": 2}),
        Wrong({"messages": with_images(PART)}, "messages[0].content[0]", "This model takes texts, not images"),
        Wrong(
            {"model": "damaged", "messages": with_images(PART)},
            PLACE,
            f"'{PLACE}' is not a whole file",
            by_model=True,
        ),
        *(
            Wrong(SEES | {"messages": with_images(part)}, place, reason)
            for part, place, reason in (
                (PART | {"image_url": {"url": "https://example.org/a.png"}}, PLACE, "fetches none"),
                (PART | {"image_url": {"url": GIF}}, PLACE, "is image/gif"),
                ({"type": "input_audio", "input_audio": {}}, f"{PLACE}.type", "input_audio"),
                ({"type": "image_url"}, f"{PLACE}.image_url", "Missing required parameter"),
            )
        ),
        Wrong(
            SEES | {"messages": [{"role": "user", "content": [PART] * 13}]},
            reason="has 13 images; at most 12",
            code="too_many_inputs",
        ),
        *wrong("messages[0].tool_calls[0].id", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}),
        Wrong({"messages": [{"role": "alien", "content": "a"}]}, reason="'alien', use 'system' or 'developer' or"),
    ],
}
