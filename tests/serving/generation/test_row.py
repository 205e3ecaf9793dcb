"""Options that change or report the probabilities of tokens mean the same on each engine, alone and in one batch.

The reference is a greedy loop over the model in transformers, with the processors of transformers.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.support import python_backend
from tests.support.checkpoints import language
from tests.support.python_backend import InferenceRequest, InferenceResponse
from tests.support.served import assemble
from triton_transformers.settings import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")

STAND_IN = ROOT / "tests/support/vllm_stand_in"
# The backend sets them for the whole process.
ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_LOGGING_LEVEL",
    "VLLM_NO_USAGE_STATS",
)
BACKENDS = {
    "python": ("batched", "BatchedGeneration"),
    "openvino-fp32": ("openvino.engine", "GenAIGeneration"),
    "vllm": ("vllm", "VllmGeneration"),
}
PROMPTS = ["I am going, I am going", "It", "Which battery fits the small torch? The second one"]
TOKENS = 14
# Each makes options of the tokens that follow the first prompt without options; the sixth of them ends texts.
OPTIONS: list[Callable[[list[int]], dict[str, Any]]] = [
    lambda _: {},
    lambda _: {"repetition_penalty": 1.3},
    lambda _: {"repetition_penalty": 0.7},
    lambda _: {"presence_penalty": 2},
    lambda _: {"presence_penalty": -2},
    lambda _: {"frequency_penalty": 1.5},
    lambda _: {"frequency_penalty": -1.5},
    lambda _: {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    lambda _: {"ignore_eos": True},
    lambda _: {"min_tokens": 9},
    lambda new: {"stop_token_ids": new[3:5]},
    lambda new: {"stop_token_ids": [new[0]], "min_tokens": 3},
    lambda new: {"stop_token_ids": new[8:], "min_tokens": 6, "ignore_eos": True},
    # These choose the most probable token too.
    lambda _: {"temperature": 1.5, "top_k": 1, "seed": 3},
    lambda _: {"temperature": 1.5, "min_p": 1, "seed": 3, "frequency_penalty": 1.5},
    lambda _: {"logprobs": 5},
    lambda _: {"logprobs": 20, "repetition_penalty": 1.5},
]
BIASES: list[Callable[[list[int]], dict[str, Any]]] = [
    lambda new: {"logit_bias": {new[0]: -100, new[1]: 5.5, new[2]: -1}},
    lambda new: {"logit_bias": {new[0]: -100}, "repetition_penalty": 1.5, "presence_penalty": 0.5, "logprobs": 3},
    lambda _: {"logit_bias": {SPECIAL: 6}, "skip_special_tokens": False},
]
SPECIAL = 0  # the token <s>


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """Save a Llama that ends texts at a token that it generates."""
    folder = language.save_llama(tmp_path_factory.mktemp("weights"))
    new = Reference(folder).tokens(PROMPTS[0], {"ignore_eos": True})
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [1, new[5]]}))
    return folder


@pytest.fixture(scope="module")
def reference(weights) -> Reference:
    return Reference(weights)


class Reference:
    """The model in transformers."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        ends = self.model.generation_config.eos_token_id
        self.ends = ends if isinstance(ends, list) else [ends]
        self.logprobs: list[torch.Tensor] = []  # of all tokens, at each step

    @torch.inference_mode()
    def tokens(self, prompt: str, options: dict[str, Any]) -> list[int]:
        """Return the new tokens, with the one that ends the text."""
        ids = self.tokenizer(prompt).input_ids
        stops = options.get("stop_token_ids", [])
        processors = transformers.LogitsProcessorList()
        if count := options.get("min_tokens"):
            minimum = transformers.MinNewTokensLengthLogitsProcessor(len(ids), count, [*self.ends, *stops], "cpu")
            processors.append(minimum)
        if bias := options.get("logit_bias"):
            values = {(token,): float(value) for token, value in bias.items()}
            processors.append(transformers.SequenceBiasLogitsProcessor(values))
        processors.append(transformers.RepetitionPenaltyLogitsProcessor(float(options.get("repetition_penalty", 1))))
        ends = {*stops, *([] if options.get("ignore_eos") else self.ends)}
        new: list[int] = []
        self.logprobs = []
        while len(new) < TOKENS and not ends & {*new[-1:]}:
            tokens = torch.tensor([ids + new])
            logits = self.model(tokens).logits[:, -1]
            self.logprobs.append(logits[0].log_softmax(-1))
            scores = processors(tokens, logits.clone())[0]
            for token in {*new}:
                scores[token] -= options.get("presence_penalty", 0)
                scores[token] -= options.get("frequency_penalty", 0) * new.count(token)
            new.append(int(scores.argmax()))
        return new

    def answer(self, prompt: str, options: dict[str, Any]) -> dict[str, Any]:
        new = self.tokens(prompt, options)
        stopped = new[-1] in {*options.get("stop_token_ids", []), *([] if options.get("ignore_eos") else self.ends)}
        shown = new[: len(new) - stopped]
        count = options.get("logprobs", 0)
        return {
            "text": prompt + self.decode(shown, options.get("skip_special_tokens", True)),
            "finish_reason": "stop" if stopped else "length",
            "num_output_tokens": len(new),
            "logprobs": [
                self.entry(token, own) | {"top": [self.entry(id, own) for id in own.topk(count).indices.tolist()]}
                for token, own in zip(shown, self.logprobs, strict=False)
            ],
        }

    @torch.inference_mode()
    def prompt_logprobs(self, prompt: str, count: int) -> list[dict[str, Any]]:
        ids = self.tokenizer(prompt).input_ids
        scores = self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        tops = [own.topk(count).indices.tolist() for own in scores]
        rows = zip(ids[1:], scores, tops, strict=True)
        first = {"id": ids[0], "token": self.tokenizer.decode([ids[0]]), "logprob": None, "top": []}
        return [
            first,
            *(self.entry(token, own) | {"top": [self.entry(id, own) for id in top]} for token, own, top in rows),
        ]

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(
            tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def entry(self, token: int, logprobs: torch.Tensor) -> dict[str, Any]:
        logprob = pytest.approx(logprobs[token].item(), abs=1e-3)
        entry = {"id": token, "token": self.tokenizer.decode([token]), "logprob": logprob}
        if "\ufffd" in entry["token"]:  # a part of a character
            byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
            entry["bytes"] = [byte_of[char] for char in self.tokenizer.convert_ids_to_tokens(token)]
        return entry


@pytest.fixture(scope="module", params=BACKENDS)
def model(request, stored, pb_utils, weights, tmp_path_factory) -> Iterator[Any]:
    """Serve the model with an engine; the vLLM is a stand-in."""
    folder = tmp_path_factory.mktemp("assembled")
    assemble(weights, folder, request.param)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "vllm":
            patch.syspath_prepend(STAND_IN)
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "mem_get_info", lambda _: (80e9, 80e9))
            for name in ENVIRONMENT:
                patch.setenv(name, "")  # so that monkeypatch removes it afterwards
                patch.delenv(name)
        yield from served(request.param, folder / "m", kind="GPU" if request.param == "vllm" else "CPU")
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def served(form: str, folder: Path, kind: str) -> Iterator[Any]:
    module, name = BACKENDS[form]
    backend = getattr(importlib.import_module(f"serving.generation.{module}"), name)()
    config = {"model_transaction_policy": {"decoupled": True}}
    config |= python_backend.parameters(cache_gigabytes=1, max_new_tokens=TOKENS)
    backend.initialize(python_backend.instance_args(folder, config, model_instance_kind=kind))
    yield backend
    backend.finalize()


@pytest.fixture(scope="module")
def stream(model) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that streams a text, and returns the pieces."""
    return lambda prompt, **options: pieces(send(model, prompt, **options))


def send(model: Any, prompt: str, **options: Any) -> InferenceRequest:
    outputs = ["text", "finish_reason", "num_output_tokens", "num_cached_tokens", "logprobs"]
    sampling = [json.dumps(options).encode()]
    request = InferenceRequest(outputs, {}, prompt=[prompt.encode()], sampling_parameters=sampling)
    model.execute([request])
    return request


def pieces(request: InferenceRequest) -> list[dict[str, Any]]:
    assert request.sender.finished.wait(60)
    return [content(response) for response in request.sender.responses]


def content(response: InferenceResponse) -> dict[str, Any]:
    assert response.error is None, response.error
    values = {name: values[0] for name, values in response.outputs.items()}
    values = {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}
    return values | {"logprobs": json.loads(values["logprobs"])}


def test_options_mean_the_same_on_each_engine_in_one_batch(model, reference):
    new = reference.tokens(PROMPTS[0], {"ignore_eos": True})
    table = [make(new) for make in (*OPTIONS, *(BIASES if has_biases(model) else []))]
    cases = [(prompt, {"logprobs": 0} | options) for prompt in PROMPTS for options in table]
    expected = [reference.answer(*case) for case in cases]
    assert len({answer["text"] for answer in expected}) > len(cases) / 3
    assert {answer["finish_reason"] for answer in expected} == {"stop", "length"}
    requests = [send(model, prompt, stream=False, **options) for prompt, options in cases]
    for (prompt, options), request, answer in zip(cases, requests, expected, strict=True):
        (actual,) = pieces(request)
        actual.pop("num_cached_tokens", None)
        assert actual == answer, (prompt, options)


@pytest.mark.parametrize("prompt", ["", *PROMPTS])
def test_tokens_of_a_prompt_are_scored(model, stream, reference, prompt):
    """Send the same prompt again, of which an engine may keep keys and values, and score it without a new token."""
    options = {"prompt_logprobs": 3, "logprobs": 1, "ignore_eos": True}
    answer = reference.answer(prompt, options)
    answer["logprobs"] = reference.prompt_logprobs(prompt, 3) + answer["logprobs"]
    for _ in range(2):
        (whole,) = pieces(send(model, prompt, stream=False, **options))
        assert (whole["text"], whole["logprobs"]) == (answer["text"], answer["logprobs"])
    assert [own for piece in stream(prompt, **options) for own in piece["logprobs"]] == answer["logprobs"]
    (scored,) = pieces(send(model, prompt, stream=False, prompt_logprobs=0, max_new_tokens=0))
    expected = {"text": prompt, "finish_reason": "length", "num_output_tokens": 0}
    assert scored | expected | {"logprobs": reference.prompt_logprobs(prompt, 0)} == scored


def test_end_of_a_scored_text_has_logprobs(model, reference):
    """Let clients drop the last entry, whichever token it is."""
    prompt = PROMPTS[0]
    new = reference.tokens(prompt, {})
    assert len(new) < TOKENS
    (answer,) = pieces(send(model, prompt, stream=False, prompt_logprobs=0, logprobs=0))
    assert [own["id"] for own in answer["logprobs"]] == [*reference.tokenizer(prompt).input_ids, *new]


def has_biases(model: Any) -> bool:
    return "logit_bias" not in model.text_engine.lacks


@pytest.mark.parametrize("prompt", PROMPTS)
def test_streamed_logprobs_come_with_their_text(stream, reference, prompt):
    options = {"logprobs": 2, "ignore_eos": True}
    answer = reference.answer(prompt, options)
    ids: list[int] = []
    text = ""
    logprobs = []
    for piece in stream(prompt, **options):
        logprobs += piece["logprobs"]
        ids += [own["id"] for own in piece["logprobs"]]
        text += piece["text"]
        assert text.startswith(prompt + reference.decode(ids))
    assert (text, logprobs) == (answer["text"], answer["logprobs"])


@pytest.mark.parametrize("length", [1, 2, 4])
def test_logprobs_end_where_a_stop_string_cuts_the_text(model, stream, reference, length):
    """Cut the text at different places of its tokens."""
    options = {"logprobs": 1, "ignore_eos": True}
    for prompt in PROMPTS:
        whole = reference.answer(prompt, options)
        at = len(whole["text"]) - 5
        options["stop"] = [whole["text"][at : at + length]]
        (answer,) = pieces(send(model, prompt, stream=False, **options))
        ids = [own["id"] for own in answer["logprobs"]]
        new = answer["text"].removeprefix(prompt)
        assert ids == [own["id"] for own in whole["logprobs"]][: len(ids)]
        assert reference.decode(ids).startswith(new)
        before = reference.decode(ids[:-1])
        assert len(before) < len(new) or before.endswith("\ufffd") or not new  # the rest of a character stays, too
        assert [own for piece in stream(prompt, **options) for own in piece["logprobs"]] == answer["logprobs"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"stop_token_ids": [100_000]}, "option 'stop_token_ids' has the token id 100000; this model's ids are 0 to"),
        ({"min_tokens": TOKENS + 1}, f"option 'min_tokens' is {TOKENS + 1}, and 'max_new_tokens' is {TOKENS}: it must"),
        ({"logit_bias": {"100000": 1}}, "option 'logit_bias' has the token id 100000; this model's ids are 0 to"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(model, options, reason):
    request = send(model, "It", **options)
    code, message = request.sender.responses[0].error
    assert code == "INVALID_ARG"
    if "logit_bias" in options and not has_biases(model):
        reason = (
            "option 'logit_bias': OpenVINO GenAI does not have it; vLLM, transformers (FORMAT=python) and AWS Neuron do"
        )
    assert message.startswith(reason)


def test_tokens_of_the_cache_are_counted_if_the_engine_does(model):
    prompt = "a 1 " * 20  # three blocks of the stand-in's cache, and more
    answers = [pieces(send(model, prompt, stream=False))[0].get("num_cached_tokens") for _ in range(2)]
    assert answers == {"vLLM": [0, 48], "OpenVINO GenAI": [None, None]}.get(model.text_engine.title, [0, 0])
