"""Each engine continues texts in the same way: alone and in one batch, for clients that wait and that leave.

A difference between engines is a column of its row.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.engines.engines import ENGINES, Engine, world
from tests.conformance.engines.reference import TOKENS, Reference
from tests.serving.structure.test_worker import FORMS
from tests.support.checkpoints import language
from tests.support.python_backend import Held, InferenceRequest, InferenceResponse, ResponseSender

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["I am going, I am going", "It", "Which battery fits the small torch? The second one"]
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


@pytest.fixture(scope="module", params=ENGINES, ids=lambda engine: engine.row.name)
def engine(request, stored, pb_utils, tmp_path_factory) -> Iterator[Engine]:
    with world(request.param, tmp_path_factory.mktemp("log") / "calls.jsonl"):
        yield request.param


@pytest.fixture(scope="module")
def load(engine, weights, tmp_path_factory) -> Iterator[Callable[..., Any]]:
    """Return a function that loads the model with these parameters, each once."""
    folder = tmp_path_factory.mktemp("assembled")
    engine.make(weights, folder)
    models: dict[object, Any] = {}

    def load_once(**parameters: object) -> Any:
        key = (*parameters.items(),)
        if key not in models:
            models[key] = engine.load(folder, TOKENS, **parameters)
        return models[key]

    yield load_once
    for model in models.values():
        model.finalize()


@pytest.fixture(scope="module")
def model(load) -> Any:
    return load()


@pytest.fixture(scope="module")
def narrow(load) -> Any:
    """Return the model with one text at a time, and with two that may wait."""
    return load(max_batch=1, max_waiting=2)


@pytest.fixture(scope="module")
def stream(model) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that streams a text, and returns the pieces."""
    return lambda prompt, **options: pieces(send(model, prompt, **options))


def send(
    model: Any, prompt: str, sender: ResponseSender | None = None, id: str = "", parameters: Any = None, **options: Any
) -> InferenceRequest:
    outputs = ["text", "finish_reason", "num_output_tokens", "num_cached_tokens", "logprobs"]
    sampling = [json.dumps(options).encode()]
    request = InferenceRequest(outputs, parameters or {}, prompt=[prompt.encode()], sampling_parameters=sampling)
    request.sender, request.id = sender or request.sender, id
    model.execute([request])
    return request


def status(request: InferenceRequest) -> str:
    """Return the status of the last response, or nothing if it is no error."""
    assert request.sender.finished.wait(60)
    error = request.sender.responses[-1].error
    return error[0] if error else ""


def text(model: Any, prompt: str, **options: Any) -> str:
    (piece,) = pieces(send(model, prompt, stream=False, **options))
    return str(piece["text"])


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


@pytest.mark.parametrize(("name", "output", "begin"), [("TEXT", "out", ""), ("text_input", "text_output", PROMPTS[1])])
def test_output_that_the_config_names_has_no_prompt(load, reference, name, output, begin):
    model = load(prompt_input="TEXT", text_output="out")
    request = InferenceRequest(["out", "text_output"], {"stream": False}, **{name: [PROMPTS[1].encode()]})
    model.execute([request])
    assert request.sender.finished.wait(60)
    new = reference.answer(PROMPTS[1], {})["text"].removeprefix(PROMPTS[1])
    assert request.sender.responses[-1].outputs == {output: [(begin + new).encode()]}


@pytest.mark.parametrize("prompt", ["", *PROMPTS])
def test_tokens_of_a_prompt_are_scored(model, stream, reference, prompt):
    """Send the same prompt again, of which an engine may keep keys and values, and score it without a new token."""
    options = {"prompt_logprobs": 3, "logprobs": 1, "ignore_eos": True}
    if "prompt_logprobs" in model.text_engine.lacks:
        assert status(send(model, prompt, **options)) == "INVALID_ARG"
        return
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
    if "prompt_logprobs" in model.text_engine.lacks:
        assert status(send(model, prompt, prompt_logprobs=0)) == "INVALID_ARG"
        return
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


def test_tokens_of_the_cache_are_counted_if_the_engine_does(model, engine):
    prompt = "a 1 " * 20  # three blocks of the stand-in's cache, and more
    answers = [pieces(send(model, prompt, stream=False))[0].get("num_cached_tokens") for _ in range(2)]
    assert (*answers,) == engine.cached_tokens


@pytest.mark.parametrize("prompt", PROMPTS)
def test_seed_gives_the_same_text_alone_and_among_others(model, prompt):
    sampling = {"temperature": 1.5, "top_p": 0.9, "seed": 7}
    alone = text(model, prompt, **sampling)
    requests = [send(model, other, stream=False, **sampling | {"seed": seed}) for seed, other in enumerate(PROMPTS * 3)]
    together = [pieces(request)[0]["text"] for request in (*requests, send(model, prompt, stream=False, **sampling))]
    assert together[-1] == alone == text(model, prompt, **sampling)
    assert len({*together}) > len(PROMPTS)


def test_stop_string_ends_its_own_text_before_it(model, reference):
    whole = {prompt: reference.answer(prompt, {"ignore_eos": True})["text"] for prompt in PROMPTS}
    first, *others = PROMPTS
    stop = whole[first][len(first) + 4 :][:3]
    requests = [
        send(model, prompt, stream=False, ignore_eos=True, **({"stop": [stop]} if prompt == first else {}))
        for prompt in PROMPTS
    ]
    (ended,), *rest = map(pieces, requests)
    assert (ended["text"], ended["finish_reason"]) == (whole[first][: whole[first].index(stop, len(first))], "stop")
    assert [own["text"] for (own,) in rest] == [whole[prompt] for prompt in others]


@pytest.mark.parametrize(("prompt", "options"), [("a 1 " * 500, {}), ("a 1 " * 60, {"max_new_tokens": 200})])
def test_prompt_that_does_not_fit_is_refused(model, prompt, options):
    assert status(send(model, prompt, **options)) == "INVALID_ARG"


def test_structures_are_obeyed_beside_other_texts(model):
    plain = text(model, "It")
    sampling = {"stream": False, "max_new_tokens": 60, "temperature": 1.0, "seed": 5, "exclude_input_in_output": True}
    requests = [send(model, "I am going", structured_outputs=structure, **sampling) for structure, _ in FORMS]
    other = send(model, "It", stream=False)
    for (structure, pattern), request in zip(FORMS, requests, strict=True):
        (answer,) = pieces(request)
        assert re.fullmatch(pattern, answer["text"]), structure
        assert answer["finish_reason"] == "stop"
    assert pieces(other)[0]["text"] == plain


def test_text_ends_with_an_error_where_its_grammar_allows_no_token(model):
    dead_end = {"grammar": 'root ::= "x" never\nnever ::= never "y"'}
    failing, other = (send(model, "It", structured_outputs=own) for own in (dead_end, {"choice": ["other"]}))
    assert status(failing) == "INVALID_ARG"
    assert not status(other)


# --- clients that leave, and clients that wait ------------------------------------------------------------------------


class Leaving(ResponseSender):
    """The sender of a client that leaves after so many pieces."""

    def __init__(self, pieces: int) -> None:
        super().__init__()
        self.pieces = pieces

    def is_cancelled(self) -> bool:
        return len(self.responses) >= self.pieces


LONG = {"max_new_tokens": 200, "ignore_eos": True}


@pytest.fixture
def hold(narrow) -> Iterator[Held]:
    """Let a text hold the narrow model until `go` is set."""
    sender = Held()
    send(narrow, "It", sender, id="held", **LONG)
    assert sender.holds.wait(60)
    yield sender
    sender.go.set()
    assert sender.finished.wait(60)


@pytest.mark.parametrize("count", [0, 1])
def test_text_ends_when_its_client_leaves(model, monkeypatch, count):
    """The client leaves before the engine begins, or after a piece."""
    monkeypatch.setattr("serving.generation.continuous.CHECK_AFTER_S", 0.0)  # a check follows each step
    monkeypatch.setattr("serving.generation.batched.CANCEL_CHECK_S", 0.0)
    monkeypatch.setattr(model, "next_check", 0.0, raising=False)
    expected = text(model, "I am going")
    sender = Leaving(count)
    gone, other = send(model, "It", sender, **LONG), send(model, "I am going", stream=False)
    assert status(gone) == "CANCELLED"
    assert len(sender.responses) <= 2 * count + 1
    assert pieces(other)[0]["text"] == expected


def test_waiting_request_gets_heartbeats_until_its_last_response(narrow, hold, monkeypatch):
    monkeypatch.setattr("serving.triton.heartbeats.BEAT_S", 0)
    monkeypatch.setattr(narrow.heartbeats.closed, "wait", lambda _: time.sleep(0.01))
    request = send(narrow, "It", parameters={"heartbeats": True}, stream=False)
    responses = request.sender.responses
    deadline = time.monotonic() + 30
    while len(responses) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    hold.go.set()
    assert not status(request)
    count = len(responses)
    time.sleep(0.05)
    assert len(responses) == count
    assert not any(response.outputs or response.error for response in responses[:-1])
    assert not narrow.heartbeats.beating


def test_full_queue_answers_busy(narrow, hold):
    requests = [send(narrow, "I am", stream=False) for _ in range(4)]
    assert [request.sender.finished.is_set() for request in requests] == [False, False, True, True]
    hold.go.set()
    assert [status(request) for request in requests] == ["", "", "UNAVAILABLE", "UNAVAILABLE"]


def test_more_prompts_than_may_wait_are_wrong(narrow):
    request = InferenceRequest(["text"], {}, prompt=[b"It"] * 3)
    narrow.execute([request])
    assert status(request) == "INVALID_ARG"


def test_another_request_ends_a_text_by_its_id(narrow, hold):
    for id in (b"nobody's id", b"held"):
        narrow.execute([InferenceRequest(["text"], prompt=[b""], cancel=[id])])
    hold.go.set()
    assert hold.finished.wait(60)
    assert hold.responses[-1].error[0] == "CANCELLED"
    assert len(hold.responses) <= 3


def test_key_ends_one_of_two_texts_that_share_an_id(narrow, hold):
    requests = [
        send(narrow, "It", id="1", parameters={"one_answer": key, "max_new_tokens": 3}) for key in ("a key", "another")
    ]
    narrow.execute([InferenceRequest(["text"], prompt=[b""], cancel=[b"a key"])])
    hold.go.set()
    assert all(request.sender.finished.wait(60) for request in requests)
    assert ["text" in request.sender.responses[-1].outputs for request in requests] == [False, True]


def test_piece_that_cannot_be_sent_fails_its_request_alone(model):
    class Full(ResponseSender):
        def send(self, response, flags: int = 0) -> None:
            if not flags:
                raise RuntimeError("no shared memory")
            super().send(response, flags)

    expected = text(model, "I am going")
    failing, other = send(model, "It", Full()), send(model, "I am going", stream=False)
    assert status(failing) == "INTERNAL"
    assert pieces(other)[0]["text"] == expected


def test_text_that_cannot_be_decoded_fails_alone(model, pb_utils, monkeypatch):
    decode = model.model.decode

    def fail_for_one(tokens: list[int], skip_special_tokens: bool = True) -> str:
        if not skip_special_tokens:
            raise ValueError(f"no such token as {tokens}, which only the client may know")
        return decode(tokens, skip_special_tokens)

    expected = text(model, "I am going")
    monkeypatch.setattr(model.model, "decode", fail_for_one)
    failing, other = send(model, "It", stream=False, skip_special_tokens=False), send(model, "I am going", stream=False)
    assert status(failing) == "INTERNAL"
    logged = pb_utils.Logger.errors[-1]
    assert logged.startswith("a request failed: ValueError") and "no such token" not in logged
    assert pieces(other)[0]["text"] == expected


def test_running_texts_end_before_the_model_is_unloaded(engine, load, weights, tmp_path):
    load()
    engine.make(weights, tmp_path)
    model = engine.load(tmp_path, TOKENS)
    requests = [send(model, prompt, stream=False, max_new_tokens=100) for prompt in PROMPTS]
    model.finalize()
    assert [status(request) for request in requests] == [""] * len(PROMPTS)
    model.thread.join(60)
    assert not model.thread.is_alive()
