"""Requests that continue prompts, under our names, those of NVIDIA's tutorial and those of vLLM's backend."""

from __future__ import annotations

import importlib
import json
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from serving.triton.types import BadRequest
from tests.support.python_backend import InferenceRequest
from triton_transformers.engines import TEXT_ENGINES
from triton_transformers.model_config import read_config
from triton_transformers.protocol import TOKENIZED
from triton_transformers.settings import ROOT

OUTPUTS = ["text", "text_output"]
# Triton passes these names for a request that names no outputs.
DETAILS = ["finish_reason", "num_input_tokens", "num_output_tokens", "num_cached_tokens", "logprobs", "stop_reason"]
ALL_OUTPUTS = [*OUTPUTS, *DETAILS]


@pytest.fixture(scope="module")
def prompts(pb_utils) -> ModuleType:
    return importlib.import_module("serving.text.prompts")


@pytest.fixture(scope="module")
def read(prompts):
    """Return a function that reads a request whose model has the names of falcon7b."""

    def read(outputs: list[str] = ALL_OUTPUTS, parameters: dict | None = None, **inputs: object):
        request = InferenceRequest(outputs, parameters, **inputs)
        return prompts.read_request(request, prompts.parameters(request), "prompt", "text")

    return read


def sampling(**parameters: object) -> list[bytes]:
    return [json.dumps(parameters).encode()]


# --- names and shapes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "output"), [("prompt", "text"), ("text_input", "text_output")])
@pytest.mark.parametrize("shape", [(2,), (1,), (2, 1), (1, 1)])
def test_texts_get_the_name_that_fits_and_the_shape_of_the_prompts(prompts, read, name, output, shape):
    texts = ["I am", "Grüße"][: shape[0]]
    request = read(**{name: np.array([text.encode() for text in texts], object).reshape(shape)})
    assert request.prompts == texts
    response = request.response([prompts.Piece(text + ".", "stop", 2, 1) for text in texts])
    expected = np.array([f"{text}.".encode() for text in texts], object).reshape(shape).tolist()
    assert response.outputs == {output: expected}


@pytest.mark.parametrize(
    ("outputs", "name", "expected"),
    [
        (["text"], "text_input", ["text"]),
        (["text_output"], "prompt", ["text_output"]),
        (["text"], "prompt", ["text"]),  # also of a model whose config has only our names
        # Triton asks for all outputs of a model. Configs of earlier releases have fewer.
        (OUTPUTS, "text_input", ["text_output"]),
        (ALL_OUTPUTS[:5], "prompt", ["text"]),
        (ALL_OUTPUTS, "prompt", ["text"]),
        (["finish_reason", "text"], "text_input", ["text", "finish_reason"]),
        (["num_output_tokens", "num_input_tokens"], "prompt", ["num_input_tokens", "num_output_tokens"]),
    ],
)
def test_output_that_is_asked_for_wins(read, outputs, name, expected):
    assert read(outputs, **{name: [b"I am"]}).outputs == expected


def test_client_that_cannot_name_outputs_asks_for_them_as_vllms_does(read):
    request = read(parameters={"return_finish_reason": True, "return_num_input_tokens": "false"}, prompt=[b"I am"])
    assert request.outputs == ["text", "finish_reason"]


def test_outputs_beside_the_text_have_vllms_types(prompts, read):
    request = read(ALL_OUTPUTS[2:], prompt=[b"I am", b"It"])
    pieces = [prompts.Piece("a", "stop", 2, 5, 1, '[{"id": 1}]', "."), prompts.Piece("b", "length", 1, 3, 0)]
    tensors = {name: request.output(name, pieces).as_numpy() for name in request.outputs}
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        "finish_reason": [b"stop", b"length"],
        "num_input_tokens": [2, 1],
        "num_output_tokens": [5, 3],
        "num_cached_tokens": [1, 0],
        "logprobs": [b'[{"id": 1}]', b"[]"],
        "stop_reason": [b".", b""],
    }
    assert {tensor.dtype for name, tensor in tensors.items() if name.startswith("num_")} == {np.dtype(np.uint32)}


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({}, "input 'prompt' is missing: send it, or name it 'text_input'"),
        ({"prompt": [b"a"], "text_input": [b"a"]}, "inputs 'prompt' and 'text_input' exclude each other: send one"),
        ({"prompt": [b"a"], "messages": [b"a"]}, "inputs 'prompt' and 'messages' exclude each other: send one"),
        ({"text_input": np.array([], object)}, "input 'text_input' holds no prompt"),
        ({"text_input": [b"not \xff"]}, r"input 'text_input': text 0 is not valid UTF-8 \(byte 4\)"),
    ],
)
def test_wrong_prompts_are_refused(read, inputs, reason):
    with pytest.raises(BadRequest, match=reason):
        read(**inputs)


@pytest.mark.parametrize("model", ["falcon7b", "mistral7b", "persimmon8b", "gpt2_generate"])
def test_committed_configs_have_the_names_that_are_read(prompts, model):
    config = read_config(ROOT / "model_repository" / model / "config.pbtxt")
    inputs, outputs = ({tensor.name for tensor in tensors} for tensors in (config.inputs, config.outputs))
    details = {"finish_reason", "num_input_tokens", "num_output_tokens"}
    own = {"out", *details} if "TEXT" in inputs else {"text", TOKENIZED, *prompts.DETAILS}
    assert outputs == {prompts.TEXT_OUTPUT, *own}
    assert {prompts.TEXT_INPUT} <= inputs
    others = {"prompt", "TEXT", prompts.TEXT_INPUT, prompts.MESSAGES, prompts.IMAGES, prompts.SAMPLING_PARAMETERS}
    assert inputs - others <= prompts.RULES.keys()
    assert prompts.MESSAGES not in inputs  # the backend adds it if the model has a chat template
    assert all(tensor.optional for tensor in config.inputs)


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "parameters", "expected"),
    [
        ({"max_new_tokens": [3], "stop": [b"a", b"b"]}, {}, {"max_new_tokens": 3, "stop": ("a", "b")}),
        ({"temperature": np.array([[0.5], [0.5]])}, {}, {"temperature": 0.5}),  # with a batch dimension
        (
            {},
            {"max_tokens": 3, "temperature": 0, "stop": "a"},
            {"max_new_tokens": 3, "temperature": 0.0, "stop": ("a",)},
        ),
        # vLLM's client sends each option twice, as strings.
        (
            {"sampling_parameters": sampling(max_tokens="100", top_p="0.95"), "stream": [False]},
            {"max_tokens": "100", "top_p": "0.95"},
            {"max_new_tokens": 100, "top_p": 0.95, "stream": False},
        ),
        (
            {"sampling_parameters": sampling(stop=["a", "b"], seed=2**62 + 1)},
            {},
            {"stop": ("a", "b"), "seed": 2**62 + 1},
        ),
        ({}, {"top_k": -1, "min_p": 0.1, "ignore_eos": True}, {"top_k": 0, "min_p": 0.1, "ignore_eos": True}),
        (
            {"sampling_parameters": sampling(logit_bias={"5": -100, "6": 1.5}, stop_token_ids=[3], logprobs=0)},
            {"logit_bias": '{"5": -100, "6": 1.5}', "stop_token_ids": "[3]"},
            {"logit_bias": {5: -100.0, 6: 1.5}, "stop_token_ids": (3,), "logprobs": 0},
        ),
        (
            {"sampling_parameters": sampling(structured_outputs={"choice": ["a"]}, tools=[{}], lora_name="tone")},
            {},
            {"structured_outputs": {"choice": ["a"]}, "tools": [{}], "lora_name": "tone"},
        ),
    ],
)
def test_options_have_one_meaning_wherever_they_are(read, inputs, parameters, expected):
    assert read(parameters=parameters, prompt=[b"I am"], **inputs).options == expected


@pytest.mark.parametrize(
    ("inputs", "parameters", "reason"),
    [
        ({}, {"top_l": 3}, "unknown parameter 'top_l': the options are max_new_tokens, temperature, top_p"),
        ({}, {"top_k": -2}, "parameter 'top_k' must be a whole number of at least 1; 0 or"),
        ({"sampling_parameters": sampling(tools="[" * 100_000)}, {}, "'tools' must be a list of objects"),
        ({}, {"min_p": 1.1}, "parameter 'min_p' must be from 0 to 1"),
        ({}, {"presence_penalty": 2.1}, "parameter 'presence_penalty' must be from -2 to 2"),
        ({}, {"repetition_penalty": 0}, "parameter 'repetition_penalty' must be from 0.01 to 100"),
        ({"sampling_parameters": sampling(logit_bias={"a": 1})}, {}, "'logit_bias' must be an object of at most 300"),
        ({"sampling_parameters": sampling(logit_bias={"5": 101})}, {}, "with numbers from -100 to 100"),
        ({"sampling_parameters": sampling(logprobs=21)}, {}, "'logprobs' must be a whole number from 0 to 20"),
        ({"sampling_parameters": sampling(logprobs=True)}, {}, "'logprobs' must be a whole number from 0 to 20"),
        ({"sampling_parameters": sampling(min_tokens=-1)}, {}, "'min_tokens' must be a whole number of at least 0"),
        ({"sampling_parameters": sampling(stop_token_ids=[-1])}, {}, "'stop_token_ids' must be a list of at most 128"),
        (
            {"sampling_parameters": sampling(structured_outputs={})},
            {},
            "'structured_outputs' must be an object",
        ),
        ({}, {"prompts": "I am"}, "unknown parameter 'prompts'"),
        ({"sampling_parameters": sampling(n=2)}, {}, "unknown sampling parameter 'n'"),
        (
            {"max_new_tokens": [3]},
            {"max_tokens": 4},
            "option 'max_new_tokens' is set twice, with different values",
        ),
        ({"max_new_tokens": [-1]}, {}, "input 'max_new_tokens' must be a whole number of at least 0"),
        ({}, {"max_tokens": 1.5}, "parameter 'max_tokens' must be a whole number"),
        ({}, {"max_tokens": "many"}, "parameter 'max_tokens' must be a whole number"),
        ({}, {"temperature": "nan"}, "parameter 'temperature' must be 0"),
        ({}, {"top_p": 0}, "parameter 'top_p' must be more than 0"),
        ({}, {"seed": 2**63}, "parameter 'seed' must be a whole number from 0"),
        ({}, {"stream": "maybe"}, "parameter 'stream' must be true or false"),
        ({"stop": [b"x"] * 17}, {}, "input 'stop' must be at most 16"),
        ({"sampling_parameters": sampling(stop=[1])}, {}, "sampling parameter 'stop' must be at most 16"),
        ({"sampling_parameters": sampling(stop=["a", ["b"]])}, {}, "sampling parameter 'stop' must be at most 16"),
        ({"sampling_parameters": sampling(stop={"a": 1})}, {}, "sampling parameter 'stop' must be at most 16"),
        ({"sampling_parameters": [b"[" * 100_000]}, {}, "input 'sampling_parameters' must be one JSON object"),
        ({"sampling_parameters": [b"[1]"]}, {}, "input 'sampling_parameters' must be one JSON object"),
        ({"sampling_parameters": [b"{"]}, {}, "input 'sampling_parameters' must be one JSON object"),
        ({"sampling_parameters": sampling(max_tokens=float("inf"))}, {}, "must be a whole number"),
        ({"temperature": np.array([[0.5], [0.7]])}, {}, "input 'temperature' must have the same value for all prompts"),
    ],
)
def test_wrong_option_is_refused(read, inputs, parameters, reason):
    with pytest.raises(BadRequest, match=reason):
        read(parameters=parameters, prompt=[b"I am"], **inputs)


def test_message_with_half_a_character_can_be_sent(prompts, read):
    with pytest.raises(BadRequest) as caught:
        read(prompt=[b"I am"], sampling_parameters=[rb'{"\ud83e": 1}'])
    code, message = prompts.responses.error_response(caught.value).error
    assert code == "INVALID_ARG"
    assert message.encode().startswith(rb"unknown sampling parameter '\ud83e'")


def test_docs_name_the_engines_that_have_an_option():
    section = (ROOT / "docs/generation.md").read_text().split("| option | engines |\n|---|---|\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in section.splitlines()]
    documented = {option.replace("`", ""): {*engines.split(", ")} - {"none"} for option, engines in rows}
    names = {
        name: {engine.title.partition(" (")[0] for engine in TEXT_ENGINES if name not in engine.lacks}
        for name in frozenset[str]().union(*(engine.lacks for engine in TEXT_ENGINES))
    }
    assert documented == names


def test_parameters_that_are_no_text_are_refused(prompts):
    request = SimpleNamespace(parameters=lambda: b"\xed\xa0\x80".decode())  # as Triton's bindings do
    with pytest.raises(BadRequest, match="must be valid UTF-8"):
        prompts.parameters(request)
