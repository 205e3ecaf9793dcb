"""Each engine continues texts in the same way: alone and in one batch, for clients that wait and that leave.

A difference between engines is a column of its row.
"""

from __future__ import annotations

import gc
import itertools
import json
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from serving.structure.worker import COMPILE_SECONDS
from serving.triton.worker_process import WorkerEnded
from tests.conformance.engines.engines import ENGINES, Engine, world
from tests.conformance.engines.reference import TOKENS, Reference
from tests.serving.structure.test_worker import FORMS, REFUSED
from tests.support.checkpoints import language
from tests.support.python_backend import Held, InferenceRequest, InferenceResponse, ResponseSender
from triton_transformers.tensors import Tensor

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
    lambda _: {"temperature": 1e-60},
    lambda _: {"temperature": 1e-45},
    lambda _: {"temperature": 1, "top_p": 1e-60},
    lambda _: {"logprobs": 5},
    lambda _: {"logprobs": 20, "repetition_penalty": 1.5},
]
BIASES: list[Callable[[list[int]], dict[str, Any]]] = [
    lambda new: {"logit_bias": {new[0]: -100, new[1]: 5.5, new[2]: -1}},
    lambda new: {"logit_bias": {new[0]: -100}, "repetition_penalty": 1.5, "presence_penalty": 0.5, "logprobs": 3},
    lambda _: {"logit_bias": {SPECIAL: 6}, "skip_special_tokens": False},
]
SPECIAL = 0  # the token <s>
TEMPLATE = """\
{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}
{% for message in messages %}{{ message.role }}: {{ message.content }}
{% for call in message.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}
{% endfor %}{% if add_generation_prompt %}assistant{{ " thinks" if thinks }}:{% endif %}"""
QUESTION = [{"role": "user", "content": "Which battery fits the small torch? 비 그친 뒤"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
ANSWERED = [
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "sunny"},
]
# Messages, and the options that the template reads.
CHATS: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    (QUESTION, {}),
    ([{"role": "system", "content": "Be brief."}, *QUESTION], {}),
    ([*QUESTION, {"role": "assistant", "content": "The second one."}, *QUESTION], {}),
    (QUESTION, {"chat_template_kwargs": {"thinks": True}}),
    (QUESTION, {"tools": TOOLS}),
    ([*QUESTION, *ANSWERED], {"tools": TOOLS}),
]


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """Save a Llama that ends texts at a token that it generates."""
    folder = language.save_llama(tmp_path_factory.mktemp("weights"))
    new = Reference(folder).tokens(PROMPTS[0], {"ignore_eos": True})
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [1, new[5]]}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
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


def on_engines(engines: Sequence[Engine]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("engine", engines, indirect=True, ids=lambda engine: engine.row.name)


OUTPUTS = [
    *("text", "finish_reason", "stop_reason"),
    *("num_input_tokens", "num_output_tokens", "num_cached_tokens", "logprobs"),
]


def send(
    model: Any,
    prompt: str | list[dict[str, Any]],
    sender: ResponseSender | None = None,
    id: str = "",
    parameters: Any = None,
    **options: Any,
) -> InferenceRequest:
    """Send a prompt or a chat."""
    name, text = ("prompt", prompt) if isinstance(prompt, str) else ("messages", json.dumps(prompt))
    inputs = {name: [text.encode()], "sampling_parameters": [json.dumps(options).encode()]}
    request = InferenceRequest(OUTPUTS, parameters or {}, **inputs)
    request.sender, request.id = sender or request.sender, id
    model.execute([request])
    return request


def execute(model: Any, outputs: list[str], parameters: dict[str, Any], **inputs: Any) -> InferenceRequest:
    """Send a request with other inputs and outputs."""
    request = InferenceRequest(outputs, parameters, **inputs)
    model.execute([request])
    return request


def status(request: InferenceRequest) -> str:
    """Return the status of the last response, or nothing if it is no error."""
    return error(request)[0]


def error(request: InferenceRequest) -> tuple[str, str]:
    """Return the status and the message of the last response, both empty if it is no error."""
    assert request.sender.finished.wait(60)
    status, message = request.sender.responses[-1].error or ("", "")
    return status, message


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


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the answer whose pieces these are."""
    *before, last = parts
    assert all(piece["finish_reason"] == piece["stop_reason"] == "" for piece in before)
    assert {piece["num_input_tokens"] for piece in parts} == {last["num_input_tokens"]}
    answer = last | {
        "text": "".join(piece["text"] for piece in parts),
        "num_output_tokens": sum(piece["num_output_tokens"] for piece in parts),
        "logprobs": [own for piece in parts for own in piece["logprobs"]],
    }
    answer.pop("num_cached_tokens", None)
    return answer


# --- texts ------------------------------------------------------------------------------------------------------------


def test_options_mean_the_same_on_each_engine_in_one_batch(model, reference):
    new = reference.tokens(PROMPTS[0], {"ignore_eos": True})
    table = [make(new) for make in (*OPTIONS, *(BIASES if has_biases(model) else []))]
    cases = [(prompt, {"logprobs": 0} | options) for prompt in PROMPTS for options in table]
    expected = [reference.answer(*case) for case in cases]
    assert len({answer["text"] for answer in expected}) > len(cases) / 3
    assert {answer["finish_reason"] for answer in expected} == {"stop", "length"}
    requests = [send(model, prompt, stream=False, **options) for prompt, options in cases]
    for (prompt, options), request, answer in zip(cases, requests, expected, strict=True):
        assert joined(pieces(request)) == answer, (prompt, options)


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
    parts = stream(prompt, **options)
    for piece in parts:
        ids += [own["id"] for own in piece["logprobs"]]
        text += piece["text"]
        assert text.startswith(prompt + reference.decode(ids))
    assert len(parts) > 2
    assert joined(parts) == answer


@pytest.mark.parametrize("length", [1, 2, 4])
def test_logprobs_end_where_a_stop_string_cuts_the_text(model, stream, reference, length):
    """Cut the text at different places of its tokens, also between two of them."""
    for prompt, between in itertools.product(PROMPTS, (False, True)):
        options = {"logprobs": 1, "ignore_eos": True}
        whole = reference.answer(prompt, options)
        first = [own["id"] for own in whole["logprobs"]][:6]
        at = len(prompt + reference.decode(first)) - 1 if between else len(whole["text"]) - 5
        stop = whole["text"][at : at + length]
        options["stop"] = [stop]
        (answer,) = pieces(send(model, prompt, stream=False, **options))
        assert answer["text"] == whole["text"][: whole["text"].index(stop, len(prompt))]
        ids = [own["id"] for own in answer["logprobs"]]
        new = answer["text"].removeprefix(prompt)
        assert ids == [own["id"] for own in whole["logprobs"]][: len(ids)]
        assert reference.decode(ids).startswith(new)
        before = reference.decode(ids[:-1])
        assert len(before) < len(new) or before.endswith("\ufffd") or not new  # the rest of a character stays, too
        expected = joined([answer | {"logprobs": whole["logprobs"][: len(ids)]}])
        assert joined(stream(prompt, **options)) == expected


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"stop_token_ids": [100_000]}, "option 'stop_token_ids' has the token id 100000; this model's ids are 0 to"),
        ({"min_tokens": TOKENS + 1}, f"option 'min_tokens' is {TOKENS + 1}, and 'max_new_tokens' is {TOKENS}: it must"),
        ({"logit_bias": {"100000": 1}}, "option 'logit_bias' has the token id 100000; this model's ids are 0 to"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(model, options, reason):
    code, message = error(send(model, "It", **options))
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
    expected = (whole[first][: whole[first].index(stop, len(first))], "stop", stop)
    assert (ended["text"], ended["finish_reason"], ended["stop_reason"]) == expected
    assert [own["text"] for (own,) in rest] == [whole[prompt] for prompt in others]


@pytest.mark.parametrize(("prompt", "options"), [("a 1 " * 500, {}), ("a 1 " * 60, {"max_new_tokens": 200})])
def test_prompt_that_does_not_fit_is_refused(model, prompt, options):
    assert status(send(model, prompt, **options)) == "INVALID_ARG"


@pytest.mark.parametrize(
    ("name", "parameters", "output", "has_prompt", "is_streamed"),
    [
        ("prompt", {}, "text", True, True),
        ("text_input", {}, "text_output", True, True),
        ("text_input", {"stream": True}, "text_output", False, True),  # as vLLM's clients expect it
        ("text_input", {"stream": True, "exclude_input_in_output": False}, "text_output", True, True),
        ("text_input", {"stream": False}, "text_output", True, False),
        ("prompt", {"stream": False, "exclude_input_in_output": True}, "text", False, False),
    ],
)
def test_text_has_the_form_that_its_client_asks_for(
    model, reference, name, parameters, output, has_prompt, is_streamed
):
    parameters = {"ignore_eos": True, **parameters}
    request = execute(model, ["text", "text_output"], parameters, **{name: [PROMPTS[0].encode()]})
    assert not status(request)
    responses = request.sender.responses
    assert {(*response.outputs,) for response in responses} == {(output,)}
    assert (len(responses) > 2) == is_streamed
    text = b"".join(response.outputs[output][0] for response in responses).decode()
    assert text == reference.answer(PROMPTS[0], {"ignore_eos": True})["text"].removeprefix(
        "" if has_prompt else PROMPTS[0]
    )


def test_prompts_of_one_request_are_answered_together(model, reference):
    request = execute(model, ["text", "num_input_tokens"], {"stream": False}, prompt=[own.encode() for own in PROMPTS])
    assert not status(request)
    (response,) = request.sender.responses
    expected = [reference.answer(prompt, {}) for prompt in PROMPTS]
    assert [own.decode() for own in response.outputs["text"]] == [answer["text"] for answer in expected]
    assert response.outputs["num_input_tokens"] == [answer["num_input_tokens"] for answer in expected]


def test_stream_is_refused_where_one_answer_is_asked_for(model):
    request = execute(model, ["text"], {}, prompt=[b"I am", b"It"])
    assert error(request) == ("INVALID_ARG", "input 'prompt' holds 2 prompts; streaming takes one per request")
    refusal = error(send(model, "It", parameters={"one_answer": "a key"}, stream=True))
    assert refusal[0] == "INVALID_ARG" and refusal[1].startswith("option 'stream' is true, but this model answers once")


def test_token_ids_are_continued_as_their_text(model, reference):
    ids = np.array([ids_sent(reference.tokenizer(PROMPTS[0]).input_ids)], np.object_)
    requests = [execute(model, OUTPUTS[:5], {"stream": False}, prompt=own) for own in (ids, [PROMPTS[0].encode()])]
    assert [status(request) for request in requests] == ["", ""]
    of_ids, of_text = (request.sender.responses[0].outputs for request in requests)
    assert of_ids == of_text


def ids_sent(ids: list[int]) -> bytes:
    return bytes(Tensor.from_texts("prompt", [ids]).data[4:])


def test_tokenized_has_ids_of_texts_and_chats_and_the_text_of_ids(model, reference):
    def tokenized(**inputs: Any) -> dict[str, Any]:
        request = execute(model, ["tokenized"], {}, **inputs)
        assert not status(request)
        (row,) = request.sender.responses[0].outputs["tokenized"]
        return dict(json.loads(row))

    tokenizer = reference.tokenizer
    ids = tokenizer(PROMPTS[0]).input_ids
    row = tokenized(text_input=[PROMPTS[0].encode()])
    before, after = row["special"]
    plain = tokenizer(PROMPTS[0], add_special_tokens=False).input_ids
    assert (row["ids"], ids[before : len(ids) - after]) == (ids, plain)
    assert tokenized(messages=[json.dumps(QUESTION).encode()])["ids"] == reference.ids(QUESTION, {})
    expected = {"text": tokenizer.decode(ids), "plain_text": tokenizer.decode(ids, skip_special_tokens=True)}
    assert tokenized(text_input=np.array([ids_sent(ids)], np.object_)) == expected


@pytest.mark.parametrize("outputs", [OUTPUTS, ["tokenized"]])
def test_unknown_token_id_is_refused(model, outputs):
    rows = np.array([b"I am going", ids_sent([10**6])], np.object_)
    refusal = error(execute(model, outputs, {"stream": False}, text_input=rows))
    assert "row 1 has the token id 1000000; this model's ids are 0 to" in refusal[1]


def test_response_sender_is_freed_with_the_last_response(model):
    """Switch the garbage collector off: it frees the request and its rows at some later time."""
    gc.disable()
    try:
        request = send(model, "It")
        assert request.sender.finished.wait(60)
        sender = weakref.ref(request.sender)
        del request
        text(model, "It")
        assert sender() is None
    finally:
        gc.enable()


# --- chats ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [False, True])
def test_chats_are_answered_in_one_batch(model, reference, streams):
    sampling = {"ignore_eos": True, "max_new_tokens": TOKENS, "logprobs": 0}
    expected = [reference.answer(chat, sampling | options) for chat, options in CHATS]
    assert len({(*reference.ids(chat, options),) for chat, options in CHATS}) == len(CHATS)
    requests = [send(model, chat, stream=streams, **sampling, **options) for chat, options in CHATS]
    for (chat, options), request, answer in zip(CHATS, requests, expected, strict=True):
        assert joined(pieces(request)) == answer, (chat, options)
        assert (len(request.sender.responses) > 2) == streams


def test_chat_without_a_limit_fills_the_context(model, reference):
    """The parameter max_new_tokens limits only prompts."""
    (answer,) = pieces(send(model, QUESTION, stream=False, ignore_eos=True))
    room = language.CONTEXT - len(reference.ids(QUESTION, {}))
    assert (answer["finish_reason"], answer["num_output_tokens"]) == ("length", room)


@pytest.mark.parametrize(
    ("messages", "parameters", "reason"),
    [
        ("[]", {}, "input 'messages' must be one JSON list of messages"),
        ('{"role": "user", "content": "a"}', {}, "input 'messages' must be one JSON list"),
        ('["a"]', {}, "input 'messages' must be one JSON list"),
        ('[{"role": "user"}]', {}, "input 'messages' must be one JSON list"),
        ('[{"role": 1, "content": "a"}]', {}, "input 'messages' must be one JSON list"),
        ("[" * 100_000, {}, "input 'messages' must be one JSON list"),
        (b"\xff", {}, "input 'messages' must be one JSON list"),
        (json.dumps(QUESTION * 20), {}, "input 'messages' has "),
        ('[{"role": "user", "content": "\\ud83e"}]', {}, "input 'messages': the model's chat template fails"),
        (json.dumps(QUESTION), {"exclude_input_in_output": False}, "option 'exclude_input_in_output' must be true"),
        (json.dumps(QUESTION), {"max_tokens": 250}, "input 'messages' has "),
    ],
)
def test_wrong_chat_is_refused(model, messages, parameters, reason):
    messages = messages if isinstance(messages, bytes) else messages.encode()
    code, message = error(execute(model, OUTPUTS, parameters, messages=[messages]))
    assert code == "INVALID_ARG"
    assert message.startswith(reason)
    assert "torch" not in message


# --- structured output ------------------------------------------------------------------------------------------------

STRUCTURED = {"stream": False, "max_new_tokens": 60, "temperature": 1.0, "seed": 5, "exclude_input_in_output": True}


def structured(model: Any, structure: Any, **options: Any) -> InferenceRequest:
    return send(model, "I am going", structured_outputs=structure, **STRUCTURED | options)


def chosen(request: InferenceRequest) -> tuple[str, str]:
    (answer,) = pieces(request)
    return answer["text"], answer["finish_reason"]


def test_structures_are_obeyed_beside_other_texts(model):
    plain = text(model, "It")
    requests = [structured(model, structure) for structure, _ in FORMS]
    other = send(model, "It", stream=False)
    for (structure, pattern), request in zip(FORMS, requests, strict=True):
        answer, reason = chosen(request)
        assert re.fullmatch(pattern, answer), structure
        assert reason == "stop"
    assert pieces(other)[0]["text"] == plain


@pytest.mark.parametrize(
    ("structure", "options", "reason"),
    [
        ({"json": REFUSED[0][0]}, {}, "option 'structured_outputs': keyword 'uniqueItems' cannot be enforced"),
        ({"json": {"properties": 5}}, {}, "'structured_outputs': a keyword of a schema has a value of the wrong type"),
        ({"grammar": "root ::= other"}, {}, 'Rule "other" is not defined'),
        ({"regex": "a(b"}, {}, "missing ), unterminated subpattern"),
        ({"choice": []}, {}, "it must be a list of strings"),
        ({"json": {"enum": ["x" * 300_000]}}, {}, "at most 262144 are allowed"),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "magic"}}}, {}, "the format 'magic'"),
        ({"choice": ["a"]}, {"ignore_eos": True}, "options 'ignore_eos' and 'structured_outputs' exclude each other"),
    ],
)
def test_wrong_structure_is_refused_before_anything_is_generated(model, structure, options, reason):
    request = structured(model, structure, **options)
    code, message = error(request)
    assert code == "INVALID_ARG" and reason in message
    assert len(request.sender.responses) == 1


def test_text_ends_with_an_error_where_its_grammar_allows_no_token(model):
    dead_end = {"grammar": 'root ::= "x" never\nnever ::= never "y"'}
    failing, other = structured(model, dead_end), structured(model, {"choice": ["other"]})
    assert "no token of this model can continue the text" in error(failing)[1]
    assert chosen(other) == ("other", "stop")


def test_texts_go_on_while_a_structure_compiles_that_takes_too_much(model, monkeypatch):
    """The worker holds one structure until another text has ended, and then ends as if it had taken too much."""
    asked, go = threading.Event(), threading.Event()

    def ask(*_: object) -> None:
        asked.set()
        assert go.wait(60)
        raise WorkerEnded("too much memory")

    with monkeypatch.context() as patched:
        patched.setattr("serving.triton.worker_process.WorkerProcess.ask", ask)
        held = structured(model, {"choice": ["held"]})
        assert asked.wait(60)
        assert text(model, "It")
        assert not held.sender.finished.is_set()
        go.set()
        assert "too much memory to compile: make it smaller" in error(held)[1]
    assert chosen(structured(model, {"choice": ["then"]})) == ("then", "stop")


@on_engines(ENGINES[:1])  # the worker is the same for all
def test_explosive_grammar_ends_only_its_worker(model):
    bomb = {"grammar": 'root ::= ((("a"{1,200}){1,200}){1,200}){1,200}'}
    assert re.search(f"too much memory|more than {COMPILE_SECONDS} s", error(structured(model, bomb))[1])
    assert chosen(structured(model, {"choice": ["then"]})) == ("then", "stop")


def test_grammars_beyond_the_bytes_of_the_cache_are_compiled_again(model, monkeypatch):
    monkeypatch.setattr("serving.structure.checks.MAX_CACHED_BYTES", 1)
    monkeypatch.setattr("serving.generation.openvino.structure.MAX_CACHED_BYTES", 1)
    for _ in range(2):
        for word in ("one", "two"):
            assert chosen(structured(model, {"choice": [word]})) == (word, "stop")
    assert len(model.structures.cached) == 1


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


def test_text_joins_while_another_runs_if_the_engine_lets_it(load, engine):
    """A short text that arrives during a long one ends first."""
    model, long = load(), Held()
    running = send(model, "It", long, **LONG)
    assert long.holds.wait(60)
    short = send(model, "I am", stream=False, max_new_tokens=2)
    long.go.set()
    assert not status(short)
    assert running.sender.finished.is_set() != engine.row.is_continuous
    assert not status(running)


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


@on_engines([own for own in ENGINES if not own.row.is_continuous])
def test_texts_of_a_batch_that_fails_run_again_one_by_one(model, reference, monkeypatch):
    generate = model.decoder.generate

    def fail(rows: list[Any], after_token: Callable[[], None]) -> None:
        if any(row.prompt == "fails" for row in rows):
            raise RuntimeError("it takes no such text")
        generate(rows, after_token)

    monkeypatch.setattr(model.decoder, "generate", fail)
    failing, *others = [send(model, prompt, stream=False) for prompt in ("fails", *PROMPTS)]
    assert error(failing) == ("INTERNAL", "RuntimeError: it takes no such text")
    assert [pieces(own)[0]["text"] for own in others] == [reference.answer(own, {})["text"] for own in PROMPTS]


def test_running_texts_end_before_the_model_is_unloaded(engine, load, weights, tmp_path):
    load()
    engine.make(weights, tmp_path)
    model = engine.load(tmp_path, TOKENS)
    requests = [send(model, prompt, stream=False, max_new_tokens=100) for prompt in PROMPTS]
    model.finalize()
    assert [status(request) for request in requests] == [""] * len(PROMPTS)
    model.thread.join(60)
    assert not model.thread.is_alive()
