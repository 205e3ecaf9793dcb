"""Text generation on the real server: what Triton adds to the engines of tests/conformance/engines."""

from __future__ import annotations

import itertools
import json
import os
import queue
import shlex
import shutil
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from urllib.error import HTTPError

import numpy as np
import pytest
import torch
import tritonclient.grpc as grpcclient
from transformers import AutoModelForCausalLM, AutoTokenizer

from gateway.edge import outages
from gateway.triton import inference
from tests.support.batches import all_at_once
from tests.support.checkpoints import language
from tests.support.generation import (
    PROMPTS,
    SECRET,
    counted,
    metrics,
    pieces,
    request,
    send_concurrently,
    settled,
    text,
)
from tests.support.stacks import TestStack, bring_up
from tests.support.triton_clients import connect
from triton_transformers.errors import CONTEXT_LENGTH, ERROR_STATUS, decode
from triton_transformers.settings import UserError
from triton_transformers.triton import TritonError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

MODELS = {
    "falcon7b": language.save_falcon,
    "mistral7b": language.save_mistral,
    "persimmon8b": language.save_persimmon,
    "mymodel": lambda folder: language.save_gpt2(folder, context=LONG_CONTEXT),
}
# To fill it takes longer than any pause of a busy machine.
LONG_CONTEXT = 32768
SECRET_ID = "an-id-that-nobody-guesses"
END = {"text_input": "", "cancel": SECRET_ID}
# A batch changes logits by up to 1e-5. If the best one leads by more than this, it is the best in a batch, too.
CLEAR = 1e-3
# The first edition of NVIDIA's tutorial, and today's, each with the name of its answer.
PUBLISHED = {
    name: (
        "curl -X POST localhost:8000/v2/models/falcon7b/infer -d "
        f'\'{{"inputs": [{{"name":"{name}","datatype":"BYTES","shape":[1],"data":["I am going"]}}]}}\''
    )
    for name in ("prompt", "text_input")
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {system: save(folder / system) for system, save in MODELS.items()}


@pytest.fixture(scope="module")
def served(stack, sources) -> TestStack:
    stack.assemble(
        *(
            {"SYSTEMS": system, "SOURCE": source, "TASK": "text-generation", "FORMAT": "openvino-fp32"}
            for system, source in sources.items()
        )
    )
    return stack.serve(*sources, "falcon7b_stream", "mymodel_stream")


@pytest.fixture
def plain(sources):
    """Return a function that generates greedily with transformers."""
    return lambda model, prompt, new_tokens: generated(sources[model], prompt, new_tokens)[0]


def generated(folder: Path, prompt: str, new_tokens: int) -> tuple[str, float]:
    """Return transformers' text, and by how much the best logit exceeds the second at the closest choice of a token."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded, tokenizer = checkpoint(folder, device)
    tokens = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(device)
    options = {"do_sample": False, "pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True}
    answer = loaded.generate(**tokens, max_new_tokens=new_tokens, **options)
    best, second = torch.stack(answer.logits)[:, 0].topk(2).values.T
    whole = tokenizer.decode(answer.sequences[0], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return whole, float((best - second).min())


@cache
def checkpoint(folder: Path, device: str):
    return AutoModelForCausalLM.from_pretrained(folder).to(device), AutoTokenizer.from_pretrained(folder)


# --- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "output"), [("prompt", "text"), ("text_input", "text_output")])
def test_published_request_works_as_written(served, plain, name, output):
    command = PUBLISHED[name].replace("localhost:8000", served.http.removeprefix("http://"))
    done = subprocess.run([*shlex.split(command), "-s"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {
        "model_name": "falcon7b",
        "model_version": "1",
        "outputs": [{"name": output, "datatype": "BYTES", "shape": [1], "data": [plain("falcon7b", "I am going", 64)]}],
    }


def generate(stack: TestStack, model: str, **fields) -> dict:
    return stack.triton.call(f"/v2/models/{model}/generate", fields)


@pytest.mark.parametrize("model", ["falcon7b", "falcon7b_stream"])
def test_generate_takes_vllms_request(served, plain, model):
    parameters = {"stream": False, "temperature": 0, "max_tokens": 12}
    answer = generate(served, model, text_input="I am going", parameters=parameters)
    expected = plain("falcon7b", "I am going", 12)
    assert answer == {"model_name": model, "model_version": "1", "text_output": expected}
    answer = generate(served, model, prompt="I am going", max_tokens=12, stream=False, exclude_input_in_output=True)
    assert "I am going" + answer["text"] == expected


@pytest.mark.parametrize(
    ("model", "stream"), [("falcon7b", False), ("falcon7b_stream", True), ("falcon7b_stream", False)]
)
def test_client_of_vllm_is_answered(served, sources, plain, model, stream):
    """Send what vLLM's client sends: options as text, twice, over a gRPC stream."""
    options = {"temperature": "0", "top_p": "0.95", "max_tokens": "12"}
    values = {
        "text_input": np.array([b"I am going"], np.object_),
        "stream": np.array([stream]),
        "sampling_parameters": np.array([json.dumps(options).encode()], np.object_),
        "exclude_input_in_output": np.array([stream]),
    }
    inputs = []
    for name, value in values.items():
        inputs.append(grpcclient.InferInput(name, [1], "BOOL" if value.dtype == bool else "BYTES"))
        inputs[-1].set_data_from_numpy(value)
    answers: queue.Queue = queue.Queue()
    _, tokenizer = checkpoint(sources["falcon7b"], "cpu")
    input_tokens = len(tokenizer("I am going").input_ids)
    with connect(served, grpcclient) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        names = ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens")
        outputs = [grpcclient.InferRequestedOutput(name) for name in names]
        client.async_stream_infer(model, inputs, outputs=outputs, parameters=options, enable_empty_final_response=True)
        received, new_tokens, reason = "", 0, ""
        final = False
        while not final:
            result, error = answers.get(timeout=120)
            assert error is None
            if (piece := result.as_numpy("text_output")) is not None:
                received += b"".join(piece).decode()
                assert not reason
                reason = result.as_numpy("finish_reason")[0].decode()
                new_tokens += int(result.as_numpy("num_output_tokens")[0])
                assert result.as_numpy("num_input_tokens").tolist() == [input_tokens]
            final = result.get_response().parameters["triton_final_response"].bool_param
    assert (reason, new_tokens) == ("length", 12)
    expected = plain("falcon7b", "I am going", 12)
    assert received == (expected.removeprefix("I am going") if stream else expected)


def test_model_without_a_chat_template_has_no_input_for_chats(served):
    assert "messages" not in [tensor["name"] for tensor in served.triton.config("falcon7b_stream")["input"]]


def test_batch_dimension_of_the_config_is_served(served, plain):
    """Triton fixes how many dimensions an input has; a config can add one, as NVIDIA's tutorial does for batches."""
    config = served.triton.config("falcon7b")
    inputs = [{"name": "text_input", "datatype": "BYTES", "shape": [2, 1], "data": ["I am going", "It"]}]
    request = {"inputs": inputs, "parameters": {"max_tokens": 5}}
    with pytest.raises(TritonError, match=r"unexpected shape for input 'text_input'.*Expected \[-1\], got \[2,1\]"):
        served.triton.infer("falcon7b", request)
    served.triton.load("falcon7b", config | {"max_batch_size": 8, "dynamic_batching": {}})
    try:
        (output,) = served.triton.infer("falcon7b", request)["outputs"]
    finally:
        served.triton.load("falcon7b", config)
    assert output["shape"] == [2, 1]
    assert output["data"] == [plain("falcon7b", "I am going", 5), plain("falcon7b", "It", 5)]


def test_64_concurrent_requests_get_their_own_text(served, sources):
    model = "mistral7b"
    before = settled(served, f"{model}_stream")
    lengths = [3 + n * 7 % 30 for n in range(64)]
    prompts, expected = [], []
    candidates = (f"{PROMPTS[n % len(PROMPTS)]} {n}" for n in itertools.count())
    while len(prompts) < 64:
        prompt = next(candidates)
        answer, margin = generated(sources[model], prompt, lengths[len(prompts)])
        if margin > CLEAR:
            prompts.append(prompt)
            expected.append(answer)
    assert all_at_once(served, 64, lambda n: text(served, model, prompts[n], max_new_tokens=lengths[n])) == expected

    def all_counted() -> dict[str, float] | None:
        now = {name: value - before[name] for name, value in counted(served, f"{model}_stream").items()}
        return now if now["first_tokens"] == 64 and now["later_tokens"] == now["generated_tokens"] - 64 else None

    now = served.wait(all_counted, "the tokens of 64 texts in the counters")
    assert now["texts"] == 64
    assert now["generated_tokens"] <= sum(lengths)
    assert now["generated_tokens"] > 1.5 * now["runs"]


# --- wrong requests ---------------------------------------------------------------------------------------------------


def test_wrong_option_is_refused(served):
    """test_prompts.py has the others: these need the model's context, or pass through Triton as parameters."""
    for fields, reason in (
        ({"prompt": SECRET, "max_new_tokens": 250}, r"context of 256 that leaves room for \d+ new ones"),
        ({"prompt": SECRET * 40}, r"input 'prompt' has \d+ tokens; in the model's context of 256 that leaves no room"),
        ({"text_input": "I am", "warmth": 3}, "unknown parameter 'warmth': the options are max_new_tokens"),
        ({"text_input": "I am", "stream": True}, "this model answers once"),
        ({"max_new_tokens": 3}, "input 'prompt' is missing: send it, or name it 'text_input'"),
    ):
        with pytest.raises(TritonError, match=reason) as error:
            generate(served, "falcon7b", **fields)
        assert error.value.status == 400


def test_error_is_typed_for_those_who_ask(served):
    request = {"prompt": SECRET, "max_new_tokens": 250, ERROR_STATUS: True}
    for ask in (
        lambda: generate(served, "falcon7b", **request),  # whose front passes on the engine's error
        lambda: served.triton.stream("falcon7b_stream", request),
    ):
        with pytest.raises(TritonError, match=r"context of 256") as error:
            ask()
        _, _, event = str(error.value).partition("data: ")  # of a stream
        typed = decode(json.loads(event)["error"] if event else str(error.value))
        assert typed
        assert (typed.status, typed.code, list(typed.fields)) == (400, CONTEXT_LENGTH, ["prompt", "max_new_tokens"])


# --- loading, unloading, disconnects ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameter", "value", "reason"),
    [
        ("temperature", "warm", "parameter 'temperature' must be 0"),
        ("weights", "nobody", "nobody/1 has no config.json"),
    ],
)
def test_wrong_config_keeps_the_old_model(served, plain, parameter, value, reason):
    config = served.triton.config("mistral7b_stream")
    changed = config | {"parameters": config["parameters"] | {parameter: {"string_value": value}}}
    with pytest.raises(TritonError, match=reason):
        served.triton.load("mistral7b_stream", changed)
    assert text(served, "mistral7b", "It", max_new_tokens=5) == plain("mistral7b", "It", 5)


def test_too_large_model_is_refused_before_loading(served):
    """Make the file of the weights long and empty: reading it would fail with another message."""
    folder = served.folder / "models/toolarge"
    shutil.copytree(served.folder / "models/mymodel", folder)
    os.truncate(folder / "1/openvino_model.bin", 2 * 10**12)
    config = served.triton.config("mymodel_stream") | {"name": "toolarge", "parameters": {}}
    (folder / "config.pbtxt").write_text((folder / "config.pbtxt").read_text().replace('"mymodel"', '"toolarge"'))
    with pytest.raises(TritonError, match=r"toolarge takes about 2202\.0 GB and \d+\.\d GB of memory are free here"):
        served.triton.load("toolarge", config)
    assert text(served, "mymodel", "It", max_new_tokens=3)


def test_front_answers_503_while_its_engine_is_not_loaded(served, plain):
    served.triton.unload("persimmon8b_stream")
    try:
        with pytest.raises(
            TritonError, match="'persimmon8b_stream', which generates for this one, is not loaded"
        ) as error:
            text(served, "persimmon8b", "It")
        assert error.value.status == 503
    finally:
        served.triton.load("persimmon8b_stream")
    assert text(served, "persimmon8b", "It", max_new_tokens=5) == plain("persimmon8b", "It", 5)


def test_text_of_a_front_ends_by_its_id(served):
    """Repeat the request to end it: it may arrive before the text."""
    before = settled(served, "mymodel_stream")["generated_tokens"]
    long = {"id": SECRET_ID, **request(["I am going"], max_new_tokens=LONG_CONTEXT - 10)}
    end = {
        "inputs": [{"name": name, "datatype": "BYTES", "shape": [1], "data": [value]} for name, value in END.items()]
    }
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(served.triton.infer, "mymodel", long)
        while not asked.done():
            assert served.triton.infer("mymodel", end)["outputs"][0]["data"] == [""]
    with pytest.raises(TritonError, match="the client cancelled the request"):
        asked.result()
    assert settled(served, "mymodel_stream")["generated_tokens"] - before < LONG_CONTEXT / 2


def test_disconnect_stops_only_its_own_text(served, plain):
    before = settled(served, "mymodel_stream")
    body = json.dumps({"prompt": "I am going", "max_new_tokens": LONG_CONTEXT - 10}).encode()
    address = served.http.removeprefix("http://")
    with socket.create_connection(address.split(":")) as gone:
        head = f"POST /v2/models/mymodel_stream/generate_stream HTTP/1.1\r\nHost: {address}\r\n"
        gone.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert gone.recv(100)
    answers = send_concurrently(4, lambda n: "".join(pieces(served, "mymodel_stream", PROMPTS[n], max_new_tokens=30)))
    assert answers == [plain("mymodel", prompt, 30) for prompt in PROMPTS[:4]]

    def generated_tokens() -> float | None:
        now = counted(served, "mymodel_stream")
        return now["generated_tokens"] - before["generated_tokens"] if now["texts"] - before["texts"] == 5 else None

    assert served.wait(generated_tokens, "five texts in the counters") < LONG_CONTEXT / 2


def test_draft_is_kept_and_changes_no_text(served, sources, plain):
    """The draft is the model itself, so that all its tokens are right; then the text proposes its own."""
    record = served.folder / "models/mymodel/1/assembled.json"
    added = served.make("add", SYSTEM="mymodel", DRAFT=sources["mymodel"])
    assert added.returncode == 0, added.stdout + added.stderr
    for settings in ({"DRAFT": sources["mymodel"]}, {"DRAFT": "lookup"}, {"FORMAT": "openvino-fp32"}):
        served.assemble({"SYSTEMS": "mymodel", **settings})  # the first and the last one change nothing
        before = served.stub("mymodel_stream").pid
        bring_up(served)
        assert (served.stub("mymodel_stream").pid != before) == (settings == {"DRAFT": "lookup"})
        assert json.loads(record.read_text())["draft"].startswith(str(settings.get("DRAFT", "lookup")))
        if "DRAFT" in settings:
            answers = send_concurrently(len(PROMPTS), lambda n: text(served, "mymodel", PROMPTS[n], max_new_tokens=30))
            assert answers == [plain("mymodel", prompt, 30) for prompt in PROMPTS]
    with pytest.raises(UserError, match="set DRAFT=none"):
        served.assemble({"SYSTEMS": "mymodel", "FORMAT": "python"})
    added = served.make("add", SYSTEM="mymodel", DRAFT="none")
    assert added.returncode == 0, added.stdout + added.stderr
    assert "draft" not in json.loads(record.read_text())
    assert text(served, "mymodel", PROMPTS[0], max_new_tokens=30) == plain("mymodel", PROMPTS[0], 30)


def test_log_contains_no_prompt(served):
    text(served, "falcon7b", SECRET, max_new_tokens=5)
    assert "falcon7b" in served.log
    assert SECRET not in served.log
    assert "zebra" not in served.log


def test_requests_of_a_killed_process_fail_and_later_ones_are_answered(served, plain):
    long = {"max_tokens": LONG_CONTEXT - 10, "temperature": 0, "ignore_eos": True}

    def direct() -> None:
        with pytest.raises(TritonError, match=r"the process of model 'mymodel_stream'.* crashed: try again") as error:
            text(served, "mymodel", "I am going", max_new_tokens=LONG_CONTEXT - 10)
        assert error.value.status == 503

    def through_the_gateway() -> None:
        with pytest.raises(HTTPError) as error:
            served.post("/v1/completions", model="mymodel", prompt="I am going", **long)
        assert (error.value.code, json.load(error.value)["error"]["message"]) == (503, inference.CRASHED)

    back = "watchdog: model 'mymodel_stream' is back"
    times_back = served.log.count(back)
    with ThreadPoolExecutor(2) as pool:
        failures = [pool.submit(direct), pool.submit(through_the_gateway)]
        served.wait(lambda: metrics(served, "mymodel_stream").get("running_texts") == 2, "two running texts")
        served.stub("mymodel_stream").kill()
        for failure in failures:
            failure.result(timeout=300)
    later = {"model": "mymodel", "prompt": "It", "max_tokens": 5, "temperature": 0}
    sent_at, answer = time.monotonic(), None
    try:
        answer = served.post("/v1/completions", **later)
    except HTTPError as error:
        # On a busy machine, the model takes longer to load than the gateway holds a request.
        assert error.code == 503 and time.monotonic() - sent_at >= outages.LIMIT_S
    served.wait(lambda: served.log.count(back) > times_back, "the reloaded model")
    answer = answer or served.post("/v1/completions", **later)
    expected = plain("mymodel", "It", 5)
    assert "It" + answer["choices"][0]["text"] == expected
    assert text(served, "mymodel", "It", max_new_tokens=5) == expected
