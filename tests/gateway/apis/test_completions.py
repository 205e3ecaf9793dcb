"""POST /v1/completions and /v1/chat/completions, with a stand-in for Triton."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import json
import threading
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any

import grpc
import pytest

from gateway.apis import completions
from gateway.edge import outages
from gateway.edge.config import Limits
from gateway.edge.streams import EventStream
from gateway.text.generation import Chunk, TokenLogprob
from gateway.text.tool_calls import Delta
from tests.support.gateway import RunningGateway, gateway_before
from tests.support.triton_stand_in import (
    COUNTED,
    GENERATION_INPUTS,
    WAIT_S,
    Failure,
    Model,
    TritonStandIn,
    embedding,
    generator,
    refusal,
)
from triton_transformers.errors import NO_CHAT_TEMPLATE, UNKNOWN_ADAPTER
from triton_transformers.tensors import Tensor

JSON = {"content-type": "application/json"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WHOLE = "".join(COUNTED)
LIMITS = Limits(texts=8)
COUNTS = ["num_input_tokens", "num_output_tokens", "num_cached_tokens"]
SAMPLER_INPUTS = GENERATION_INPUTS | {"sampling_parameters": ("STRING", [1])}
USER = [{"role": "user", "content": "a"}]


def failing(name: str, failure: Failure, after: int = 0) -> Model:
    """Return a model that streams some pieces and fails."""
    model = generator(name, streams=True)
    answer = model.answer

    def fail(inputs: dict[str, Tensor]) -> Iterable[list[Tensor]]:
        yield from list(answer(inputs))[:after]
        raise failure

    model.answer = fail
    return model


def caller(name: str, streams: bool) -> Model:
    """Return a model of the family hermes, which thinks and calls a tool."""
    pieces = ["<think>", "hm", "</think>", *(CALL[i : i + 7] for i in range(0, len(CALL), 7))]
    model = generator(name, SAMPLER_INPUTS, streams, pieces)
    model.parameters |= {"tool_parser": "hermes", "reasoning": "think"}
    return model


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[RunningGateway, TritonStandIn]]:
    models = [
        embedding(),
        generator(),
        generator("counter_stream", streams=True),
        dataclasses.replace(generator("front"), parameters={"engine_model": "counter_stream"}),
        dataclasses.replace(generator("orphan"), parameters={"engine_model": "missing"}),
        dataclasses.replace(generator("sampler", SAMPLER_INPUTS), parameters={"adapters": "legal tone"}),
        dataclasses.replace(
            failing("late", refusal(400, "the adapter 'tone' was removed", "lora_name", code=UNKNOWN_ADAPTER)),
            parameters={"adapters": "tone"},
        ),
        generator("sampler_stream", SAMPLER_INPUTS, streams=True),
        dataclasses.replace(generator("thinker", SAMPLER_INPUTS), parameters={"reasoning": "think"}),
        dataclasses.replace(
            generator("tuned", SAMPLER_INPUTS),
            parameters={"sampling": '{"temperature": 0.5, "top_p": 0.75, "top_k": 20}'},
        ),
        caller("caller", streams=False),
        caller("caller_stream", streams=True),
        caller("streaming_caller", streams=True),
        generator("greedy", {name: GENERATION_INPUTS[name] for name in ("text_input", "max_new_tokens")}),
        generator("streamer", {"text_input": GENERATION_INPUTS["text_input"]}, streams=True),
        failing("picky", refusal(400, "this engine does not have 'top_k'", "top_k")),
        failing("plain", refusal(400, "the model takes prompts", code=NO_CHAT_TEMPLATE)),
        failing(
            "lost_stream",
            Failure(grpc.StatusCode.INTERNAL, "Stub process 'input ' is not healthy, a secret of the server"),
        ),
    ]
    with gateway_before(*models, limits=LIMITS) as served:
        yield served


@pytest.fixture(scope="module")
def gateway(served: tuple[RunningGateway, TritonStandIn]) -> RunningGateway:
    return served[0]


@pytest.fixture(scope="module")
def triton(served: tuple[RunningGateway, TritonStandIn]) -> TritonStandIn:
    return served[1]


@pytest.fixture
def received(triton: TritonStandIn) -> list[Any]:
    """Return the requests that reach the stand-in from now on."""
    triton.received.clear()
    return triton.received


def complete(gateway: RunningGateway, prompt: Any = "count", model: str = "counter", **fields: Any) -> Any:
    return answer(gateway, COMPLETIONS, model=model, prompt=prompt, **fields)


def talk(gateway: RunningGateway, **fields: Any) -> Any:
    return answer(gateway, CHAT, model="counter", messages=USER, **fields)


def answer(gateway: RunningGateway, path: str, **body: Any) -> Any:
    reply = gateway.post(path, body)
    assert reply.status == 200, reply.body
    return reply.json


@contextlib.contextmanager
def open_stream(gateway: RunningGateway, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=WAIT_S)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps({"model": "counter", "stream": True} | body), JSON)
        yield connection.getresponse()


def next_event(response: http.client.HTTPResponse) -> Any:
    """Return the next event, "[DONE]" at the end, and None after it."""
    if not (line := response.readline()):
        return None
    data = line.decode().removeprefix("data: ").removesuffix("\n")
    assert response.readline() == b"\n"
    return data if data == "[DONE]" else json.loads(data)


def stream(gateway: RunningGateway, path: str, **body: Any) -> list[Any]:
    with open_stream(gateway, path, body) as response:
        assert response.status == 200, response.read()
        return list(iter(lambda: next_event(response), None))


def values(received: list[Any]) -> dict[str, Any]:
    """Return the inputs of the only request that the stand-in received."""
    (request,) = received
    return {
        name: tensor.texts() if tensor.datatype == "BYTES" else tensor.array().tolist()
        for name, tensor in request.inputs.items()
    }


# --- whole answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_chat", [False, True])
def test_answer_has_openais_form(gateway: RunningGateway, is_chat: bool) -> None:
    answer = talk(gateway, max_tokens=2) if is_chat else complete(gateway, "one", max_tokens=2)
    assert answer.pop("id").startswith("chatcmpl-" if is_chat else "cmpl-")
    assert time.time() - 60 < answer.pop("created") <= time.time()
    message = {"role": "assistant", "content": " ein zwei", "refusal": None}
    content = {"message": message} if is_chat else {"text": " ein zwei"}
    prompt_tokens = answer["usage"]["prompt_tokens"] if is_chat else 1
    details = {"prompt_tokens_details": {"cached_tokens": 1}}
    assert answer == {
        "object": "chat.completion" if is_chat else "text_completion",
        "model": "counter",
        "choices": [{"index": 0, **content, "finish_reason": "length", "logprobs": None}],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": 2, "total_tokens": prompt_tokens + 2} | details,
    }
    assert complete(gateway)["choices"][0] == {"text": WHOLE, "index": 0, "finish_reason": "stop", "logprobs": None}


def test_completions_defaults_are_openais(gateway: RunningGateway, received: list[Any]) -> None:
    complete(gateway)
    assert values(received) == {
        "text_input": ["count"],
        "max_new_tokens": [16],
        "temperature": [1.0],
        "exclude_input_in_output": [True],
    }
    assert received[0].outputs == ["text_output", "finish_reason", *COUNTS]


@pytest.mark.parametrize(
    ("fields", "temperature", "top_k"), [({}, 0.5, '{"top_k":20}'), ({"temperature": 2, "top_k": 3}, 2, '{"top_k":3}')]
)
def test_checkpoint_sets_the_defaults_of_sampling(gateway, received, fields, temperature, top_k) -> None:
    complete(gateway, model="tuned", **fields)
    inputs = values(received)
    assert (inputs["temperature"], inputs["top_p"]) == ([temperature], [0.75])
    assert inputs["sampling_parameters"] == [top_k]


def test_response_names_the_sampling_of_the_checkpoint(gateway: RunningGateway) -> None:
    response = gateway.post("/v1/responses", {"model": "tuned", "input": "text", "top_p": 1}).json
    assert (response["temperature"], response["top_p"]) == (0.5, 1)


def test_options_reach_the_model(gateway: RunningGateway, received: list[Any]) -> None:
    complete(gateway, max_tokens=3, temperature=0, top_p=0.5, seed=-1, stop="x", echo=True)
    assert values(received) == {
        "text_input": ["count"],
        "max_new_tokens": [3],
        "temperature": [0.0],
        "top_p": [0.5],
        "seed": [2**63 - 1],
        "stop": ["x"],
        "exclude_input_in_output": [False],
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
OFF, EFFORT = {"type": "disabled"}, {"effort": "low"}
NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}
THINK = {"chat_template_kwargs": {"a": 1, "enable_thinking": True, "reasoning_effort": "low"}}


def test_requests_of_a_front_go_to_its_engine(gateway, received) -> None:
    assert complete(gateway, ["a", "b"], model="front", max_tokens=2)["model"] == "front"
    stream(gateway, COMPLETIONS, prompt="a", model="front")
    assert [request.model for request in received] == ["counter_stream"] * 2
    reply = gateway.post(COMPLETIONS, {"model": "orphan", "prompt": "a"})
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize(
    ("path", "fields", "sent"),
    [
        (COMPLETIONS, SAMPLING, SAMPLING),
        (CHAT, SAMPLING, SAMPLING),
        (COMPLETIONS, {"top_p": 0.5}, None),
        (COMPLETIONS, {"top_k": -1, "min_p": 0.5}, {"top_k": -1, "min_p": 0.5}),
        (CHAT, {"chat_template_kwargs": {"a": 1}}, {"chat_template_kwargs": {"a": 1}}),
        (CHAT, {"chat_template_kwargs": {"a": 1}, "reasoning_effort": "low"}, THINK),
        (CHAT, {"reasoning_effort": "none", "chat_template_kwargs": {}}, NO_THOUGHT),
        (CHAT, {"thinking": OFF, "reasoning": EFFORT, "verbosity": "high"}, None),
        (CHAT, {"thinking": OFF, "model": "thinker"}, NO_THOUGHT),
        (CHAT, {"thinking": {"type": "adaptive"}, "model": "thinker"}, None),
        (CHAT, {"reasoning": EFFORT, "chat_template_kwargs": {"a": 1}, "model": "thinker"}, THINK),
    ],
)
def test_sampling_parameters_reach_the_model(gateway, received, path, fields, sent) -> None:
    source = {"prompt": "a"} if path == COMPLETIONS else {"messages": USER}
    answer(gateway, path, **{"model": "sampler"} | source | fields)
    parameters = values(received).get("sampling_parameters")
    assert (parameters and json.loads(parameters[0])) == sent
    answer(gateway, path, model="counter", **source, **NEUTRAL)


def test_adapters_are_models_of_their_own(gateway: RunningGateway, received: list[Any]) -> None:
    listed = {model["id"]: model for model in gateway.get("/v1/models").json["data"]}
    assert {name: model["parent"] for name, model in listed.items() if name.startswith("sampler:")} == {
        "sampler:legal": "sampler",
        "sampler:tone": "sampler",
    }
    assert gateway.get("/v1/models/sampler:tone").json == listed["sampler:tone"]
    assert complete(gateway, "a", "sampler:tone", top_k=3)["model"] == "sampler:tone"
    answer(gateway, CHAT, model="sampler:legal", messages=USER)
    stream(gateway, COMPLETIONS, model="sampler:tone", prompt="a")
    sent = [json.loads(request.inputs["sampling_parameters"].texts()[0]) for request in received]
    assert sent == [{"lora_name": "tone", "top_k": 3}, {"lora_name": "legal"}, {"lora_name": "tone"}]
    # The last one was removed after the gateway had read the list.
    for name in ("sampler:", "sampler:nothing", "counter:tone", "nothing:tone", "late:tone"):
        reply = gateway.post(COMPLETIONS, {"model": name, "prompt": "a"})
        assert (name, reply.status, reply.error["code"]) == (name, 404, "model_not_found")
        assert f"The model '{name}' does not exist" in reply.error["message"]


def test_chat_sends_messages_and_no_default_length(gateway: RunningGateway, received: list[Any]) -> None:
    parts = [{"type": "text", "text": "two"}, {"type": "text", "text": "lines"}]
    roles = ["developer", "system", "user", "assistant"]
    messages = [{"role": role, "content": role} for role in roles] + [{"role": "user", "content": parts}]
    assert gateway.post(CHAT, {"model": "counter", "messages": messages}).status == 200
    inputs = values(received)
    sent = [(message["role"], message["content"]) for message in json.loads(inputs.pop("messages")[0])]
    assert sent == [
        ("system", "developer"),
        ("system", "system"),
        ("user", "user"),
        ("assistant", "assistant"),
        ("user", "two\nlines"),
    ]
    assert inputs == {"temperature": [1.0], "exclude_input_in_output": [True]}
    # This name wins.
    assert talk(gateway, max_tokens=5, max_completion_tokens=1)["usage"]["completion_tokens"] == 1


def tokens(answer: Any) -> tuple[int, int, int]:
    """Return the numbers of tokens of the prompts and of the answers, and how many of the first were cached."""
    usage = answer["usage"]
    assert usage.keys() == {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"}
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("streams", [False, True])
def test_choices_share_their_prompt_and_have_seeds_of_their_own(gateway, received, streams) -> None:
    fields = {"prompt": ["a", "b c"], "n": 2, "best_of": 2, "seed": 2**63 - 1, "echo": True, "max_tokens": 1}
    if streams:
        *events, last, _ = stream(gateway, COMPLETIONS, **fields, stream_options={"include_usage": True})
        texts = [""] * 4
        for event in events:
            (choice,) = event["choices"]
            texts[choice["index"]] += choice["text"]
    else:
        last = complete(gateway, **fields)
        assert [choice["index"] for choice in last["choices"]] == [0, 1, 2, 3]
        texts = [choice["text"] for choice in last["choices"]]
    assert texts == ["a ein", "a ein", "b c ein", "b c ein"]
    assert tokens(last) == (3, 4, 2)
    seeds = sorted(request.inputs["seed"].array().item() for request in received)
    assert seeds == ([0, 0, 2**63 - 1, 2**63 - 1] if streams else [0, 2**63 - 1])


def test_each_event_has_the_usage_so_far(gateway) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last, _ = stream(gateway, COMPLETIONS, prompt="a", max_tokens=2, stream_options=options)
    assert [tokens(event)[1] for event in events] == [1, 2, 2]
    assert tokens(last) == (1, 2, 1)


CHAT_TOKEN = {"token": " ein", "bytes": [32, 101, 105, 110], "logprob": -0.5}
ALTERNATIVE = {"token": "x", "bytes": [120], "logprob": -9999.0}


@pytest.mark.parametrize("streams", [False, True])
def test_logprobs_have_openais_forms(gateway, received, streams) -> None:
    def logprobs(path: str, **fields: Any) -> list[Any]:
        fields |= {"model": "sampler", "max_tokens": 2}
        if not streams:
            return [answer(gateway, path, **fields)["choices"][0]["logprobs"]]
        events = stream(gateway, path, **fields)[:-1]
        return [choice["logprobs"] for event in events for choice in event["choices"] if choice["logprobs"]]

    whole = {
        "tokens": [" ein", " zwei"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{" ein": -0.5, "x": -9999.0}, {" zwei": -0.5, "x": -9999.0}],
        "text_offset": [0, 4],
    }
    pieces = logprobs(COMPLETIONS, prompt="a", logprobs=1)
    assert {name: [value for piece in pieces for value in piece[name]] for name in whole} == whole
    first, *_ = logprobs(CHAT, messages=USER, logprobs=True, top_logprobs=1)
    assert first["content"][0] == CHAT_TOKEN | {"top_logprobs": [ALTERNATIVE]}
    assert first["refusal"] is None
    logprobs(CHAT, messages=USER, logprobs=True)
    sent = [json.loads(request.inputs["sampling_parameters"].texts()[0])["logprobs"] for request in received]
    assert sent == [1, 1, 0]


SCORED = [
    TokenLogprob(3, "<s>", None),
    TokenLogprob(4, " a", -0.25, top=[TokenLogprob(9, "b", -0.1), TokenLogprob(4, " a", -0.25)]),
    TokenLogprob(5, " ein", -0.5, top=[TokenLogprob(5, " ein", -0.5)]),
]
PROMPT_LOGPROBS = [
    None,
    {
        "4": {"logprob": -0.25, "rank": 2, "decoded_token": " a"},
        "9": {"logprob": -0.1, "rank": 1, "decoded_token": "b"},
    },
]


@pytest.mark.parametrize(
    ("fields", "sent", "tokens", "own"),
    [
        ({"echo": True, "logprobs": 1}, {"logprobs": 1, "prompt_logprobs": 1}, ["<s>", " a", " ein"], None),
        ({"logprobs": 2, "prompt_logprobs": 0}, {"logprobs": 2, "prompt_logprobs": 0}, [" ein"], PROMPT_LOGPROBS),
        ({"prompt_logprobs": 2}, {"prompt_logprobs": 2}, [], PROMPT_LOGPROBS),
        ({"echo": True, "prompt_logprobs": 2}, {"prompt_logprobs": 2}, [], PROMPT_LOGPROBS),
    ],
)
@pytest.mark.parametrize("pieces", [1, 3])
def test_tokens_of_prompts_have_logprobs(gateway, received, fields, sent, tokens, own, pieces) -> None:
    """Send the fields, then read an answer with logprobs of two tokens of the prompt, whole and in pieces."""
    complete(gateway, model="sampler", max_tokens=0, **fields)
    assert json.loads(received[-1].inputs["sampling_parameters"].texts()[0]) == sent
    assert received[-1].inputs["max_new_tokens"].array().item() == 0
    reported = SCORED if "logprobs" in fields else SCORED[:2]
    body = completions.CompletionsBody(model="m", prompt="a", **fields)
    form = completions.CompletionsForm(body)
    chunk = Chunk(0, [Delta(content="a ein")], None, 2, 1, None, reported, None)
    parts = [reported] if pieces == 1 else [[], reported[:2], reported[2:]]
    chunks = [chunk._replace(logprobs=part) for part in parts]
    found = [form.logprobs(chunk) for chunk in chunks]
    lists = [one["logprobs"] for one in found if "logprobs" in one]
    assert [token for one in lists for token in one["tokens"]] == tokens
    if "<s>" in tokens:
        assert [value for one in lists for value in one["token_logprobs"]] == [None, -0.25, -0.5]
        assert [value for one in lists for value in one["top_logprobs"]][:2] == [None, {"b": -0.1, " a": -0.25}]
        assert [value for one in lists for value in one["text_offset"]] == [0, 3, 5]
    assert [one.get("prompt_logprobs") for one in found] == ([own] if pieces == 1 else [None, own, None])


def test_part_of_a_character_has_the_bytes_that_the_engine_knows() -> None:
    assert completions.chat_token(TokenLogprob(7, "\ufffd", -0.5))["bytes"] is None
    assert completions.chat_token(TokenLogprob(7, "\ufffd", -0.5, [240, 159]))["bytes"] == [240, 159]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("wanted", "sent"),
    [
        ({"type": "json_object"}, {"json_object": True}),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}, {"json": SCHEMA}),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}, {"json": SCHEMA}),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": False}}, {"json": SCHEMA}),
    ],
)
def test_response_format_becomes_a_structure(gateway, received, wanted, sent) -> None:
    answer(gateway, CHAT, model="sampler", messages=USER, response_format=wanted)
    answer(gateway, COMPLETIONS, model="sampler", prompt="a", response_format=wanted)
    for request in received:
        assert json.loads(request.inputs["sampling_parameters"].texts()[0]) == {"structured_outputs": sent}


TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "add"}}])
def test_call_of_a_tool_has_openais_form(gateway, received, choice) -> None:
    asked = {"model": "caller", "messages": USER, "tools": [TOOL], "tool_choice": choice}
    answered = answer(gateway, CHAT, **asked | {"model": "streaming_caller"})
    assert answered["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
    (streamed,) = answered["choices"]
    (whole,) = answer(gateway, CHAT, **asked)["choices"]
    (call,) = whole["message"].pop("tool_calls")
    assert whole["message"] == {"role": "assistant", "content": None, "refusal": None, "reasoning_content": "hm"}
    assert whole["finish_reason"] == "tool_calls"
    assert call.pop("id") and streamed["message"].pop("tool_calls")[0].pop("id")
    assert streamed == whole
    assert call == {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}

    deltas = [event["choices"][0] for event in stream(gateway, CHAT, **asked)[:-1]]
    assert deltas[-1]["finish_reason"] == "tool_calls"
    assert "".join(delta["delta"].get("reasoning_content", "") for delta in deltas) == "hm"
    first, *others = [call for delta in deltas for call in delta["delta"].get("tool_calls", [])]
    assert (first["index"], first["type"], first["function"]["name"]) == (0, "function", "add")
    assert all(other.keys() == {"index", "function"} and not other["index"] for other in others)
    assert json.loads("".join(piece["function"]["arguments"] for piece in (first, *others))) == {"a": 1}

    sent = json.loads(received[0].inputs["sampling_parameters"].texts()[0])
    assert sent["tools"] == [TOOL]
    assert ("structured_outputs" in sent) == (choice != "auto")


@pytest.mark.parametrize("reasoning", ["reasoning_content", "reasoning"])
def test_result_of_a_tool_reaches_the_model(gateway, received, reasoning) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    asked = {"role": "assistant", "content": None, reasoning: "hm", "tool_calls": [call], "refusal": None}
    result = {"role": "tool", "tool_call_id": "1", "content": "2"}
    answer(gateway, CHAT, model="caller", messages=[*USER, asked, result], tools=[TOOL])
    _, sent, sent_result = json.loads(received[0].inputs["messages"].texts()[0])
    assert sent["tool_calls"] == [call | {"function": {"name": "add", "arguments": {"a": 1}}}]
    assert sent["reasoning_content"] == "hm"
    assert sent_result == result | {"name": "add"}


def test_several_prompts_get_a_choice_each(gateway: RunningGateway, received: list[Any]) -> None:
    answer = complete(gateway, ["a", "b c", "d"], echo=True, max_tokens=1)
    assert [choice["text"] for choice in answer["choices"]] == ["a ein", "b c ein", "d ein"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert tokens(answer) == (4, 3, 3)
    assert len(received) == 1
    # A model that streams answers whole, too.
    answer = complete(gateway, ["a", "b"], model="counter_stream", max_tokens=2)
    assert [choice["text"] for choice in answer["choices"]] == [" ein zwei"] * 2


def test_greedy_model_gets_only_its_options(gateway: RunningGateway, received: list[Any]) -> None:
    complete(gateway, model="greedy", temperature=0, top_p=1)
    assert values(received) == {"text_input": ["count"], "max_new_tokens": [16]}


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_chat", [False, True])
def test_stream_has_openais_form(gateway: RunningGateway, is_chat: bool) -> None:
    path, source = (CHAT, {"messages": USER}) if is_chat else (COMPLETIONS, {"prompt": "one"})
    *events, done = stream(gateway, path, max_tokens=3, **source)
    assert done == "[DONE]"
    texts = [" ein", " zwei", " drei", ""]
    contents = [{"text": text} for text in texts]
    if is_chat:
        begin = {"delta": {"role": "assistant", "content": ""}}
        contents = [begin, *({"delta": {"content": text} if text else {}} for text in texts)]
    assert [event["choices"] for event in events] == [
        [{"index": 0, **content, "finish_reason": "length" if content is contents[-1] else None, "logprobs": None}]
        for content in contents
    ]
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    assert {(event["object"], event["model"]) for event in events} == {(kind, "counter")}
    assert len({(event["id"], event["created"]) for event in events}) == 1
    assert "usage" not in events[0]


def test_several_prompts_stream_side_by_side(gateway: RunningGateway) -> None:
    options = {"include_usage": True}
    *events, last, _ = stream(gateway, COMPLETIONS, prompt=["a", "b c"], echo=True, stream_options=options)
    texts = ["", ""]
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == ["a" + WHOLE, "b c" + WHOLE]
    assert {event["usage"] for event in events} == {None}
    assert last["choices"] == []
    assert tokens(last) == (3, 12, 2)


def on_demand(model: Model) -> threading.Semaphore:
    """Let the model generate its next piece only when the semaphore is released."""
    answer, permits = model.answer, threading.Semaphore(0)

    def wait(inputs: dict[str, Tensor]) -> Iterable[list[Tensor]]:
        for response in answer(inputs):
            permits.acquire(timeout=WAIT_S)
            yield response

    model.answer = wait
    return permits


def test_event_leaves_before_the_next_piece_exists() -> None:
    model = generator("counter_stream", streams=True)
    permits = on_demand(model)
    permits.release()
    with (
        gateway_before(generator(), model) as (gateway, _),
        open_stream(gateway, COMPLETIONS, {"prompt": "a"}) as response,
    ):
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "content-encoding" not in response.headers
        for text in COUNTED:
            assert next_event(response)["choices"][0]["text"] == text
            permits.release()


@pytest.mark.parametrize(
    ("model", "fields", "requests"),
    [
        ("counter", {"prompt": "a"}, 1),
        ("counter_stream", {"prompt": "a", "stream": True}, 1),
        ("counter_stream", {"prompt": ["a", "b"], "stream": True}, 2),
        ("counter_stream", {"prompt": ["a", "b"], "n": 3, "stream": True}, 6),
        ("counter", {"prompt": ["a", "b"], "n": 3}, 3),
    ],
)
def test_client_that_leaves_cancels_its_requests(gateway, triton, model, fields, requests) -> None:
    triton.cancelled.clear()
    triton.models[model].gate.clear()
    try:
        with gateway.sent("POST", COMPLETIONS, {"model": "counter"} | fields):
            triton.wait_until(lambda: triton.running.count(model) == requests)
        triton.wait_until(lambda: triton.cancelled.count(model) == requests)
    finally:
        triton.models[model].gate.set()


def test_stream_whose_head_cannot_be_sent_is_closed() -> None:
    closed = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"first"
        finally:
            closed.append(True)

    async def fail(message: Any) -> None:
        raise ConnectionError

    async def respond() -> None:
        stream = events()
        response = EventStream(await anext(stream), stream, WAIT_S, b"", lambda error: b"")
        with pytest.raises(ConnectionError):
            await response({}, None, fail)
        assert closed

    asyncio.run(respond())


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_stream_whose_process_is_lost_has_its_own_status(gateway, monkeypatch) -> None:
    monkeypatch.setattr(outages, "LIMIT_S", 0)
    reply = gateway.post(COMPLETIONS, {"model": "lost_stream", "prompt": "a", "stream": True})
    assert reply.status == 503
    assert "secret" not in reply.error["message"]


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
FORMAT_TWICE = {"prompt": "a", "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
WRONG_FORMS = {
    "structured_outputs": {"regex": "a", "grammar": "b"},
    "structured_outputs.json": {"json": "{"},
    "structured_outputs.choice": {"choice": []},
    "structured_outputs.structural_tag": {"structural_tag": {"triggers": []}},
}
WRONG = {
    "n": 9,
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


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 9}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        (COMPLETIONS, {"prompt": "a", "model": "nobody"}, "model"),
        (COMPLETIONS, {"prompt": "a", "model": "embedding"}, "model"),
        (COMPLETIONS, {"prompt": "a", "model": "greedy", "stream": True}, "stream"),
        (COMPLETIONS, {"prompt": "a", "model": "streamer"}, "stream"),
        (COMPLETIONS, {"prompt": "a", "model": "greedy", "temperature": 0.5}, "temperature"),
        (CHAT, {"messages": USER, "model": "greedy"}, "model"),
        (COMPLETIONS, {"prompt": "a", "model": "picky", "stream": True}, "top_k"),
        (COMPLETIONS, {"prompt": "a", "min_p": 2}, "min_p"),
        (COMPLETIONS, {"prompt": "a", "n": 2, "best_of": 3}, "best_of"),
        (COMPLETIONS, {"prompt": ["a"] * 5, "n": 2}, "n"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 1, "echo": True, "prompt_logprobs": 2}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "max_tokens"),
        (CHAT, {"messages": USER, "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": USER, "prompt_logprobs": 1}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "a", "response_format": {"type": "json_object"}}, "response_format"),
        (COMPLETIONS, {"prompt": "a", "response_format": {"type": "xml"}}, "response_format.type"),
        (COMPLETIONS, {"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (COMPLETIONS, FORMAT_TWICE, "structured_outputs"),
        *((COMPLETIONS, {"prompt": "a", "structured_outputs": form}, param) for param, form in WRONG_FORMS.items()),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": USER, "model": "plain"}, "messages"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": [{"role": "function", "content": "a"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools[0].function"),
        (CHAT, {"messages": USER, "functions": [{}]}, "functions"),
        (CHAT, {"messages": USER, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": [*USER, {"role": "user", "content": [IMAGE]}]}, "messages[1].content[0]"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
        *((CHAT, {"messages": USER, name: value}, name) for name, value in WRONG.items()),
        *((COMPLETIONS, {"prompt": "a", name: value}, name) for name, value in WRONG.items()),
    ],
)
def test_wrong_request_is_refused_by_param(gateway, received, path, fields, param) -> None:
    reply = gateway.post(path, {"model": "counter"} | fields)
    assert reply.status == (404 if fields.get("model") == "nobody" else 400)
    assert reply.error["param"] == param
    assert not received or received[0].model in ("plain", "picky")


def test_field_that_asks_for_nothing_is_ignored(gateway: RunningGateway) -> None:
    fields = {"n": 1, "stop": [], "presence_penalty": 0, "response_format": {"type": "text"}, "stream": False}
    fields |= {"logprobs": None, "max_tokens": None, "stream_options": None, "tools": [], "user": "somebody"}
    for path, source in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER})):
        answer(gateway, path, model="counter", **source, **fields)


def test_clients_may_send_answers_back(gateway: RunningGateway) -> None:
    own = talk(gateway)["choices"][0]["message"]
    nulls = dict.fromkeys(["audio", "annotations", "function_call", "tool_calls"])
    answer(gateway, CHAT, model="counter", messages=[*USER, own | nulls, *USER])


def test_tokens_and_first_pieces_are_counted() -> None:
    def sample(name: str, **labels: str) -> float:
        value = gateway.server.config.app.counters.registry.get_sample_value(f"gateway_{name}", labels)
        return value or 0.0

    broken = failing("broken_stream", refusal(500, "RuntimeError: it failed"), after=2)
    with gateway_before(generator(), generator("counter_stream", streams=True), broken) as (gateway, _):
        complete(gateway, "one two", max_tokens=3)
        stream(gateway, COMPLETIONS, prompt="one two", max_tokens=3)
        stream(gateway, COMPLETIONS, prompt="one two", model="broken_stream")
        gateway.get("/health")  # so that the last request is counted
        assert sample("tokens_total", kind="prompt") == 6
        assert sample("tokens_total", kind="completion") == 8
        assert sample("first_token_seconds_count", route=COMPLETIONS) == 2
        assert sample("requests_total", route=COMPLETIONS, code="200") == 2
        assert sample("requests_total", route=COMPLETIONS, code="500") == 1
