"""GPT-2 in three steps and in one: both say what transformers says, whoever asks beside, and whatever is asked."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests
import torch
import transformers

from scripts.common.http import opener
from scripts.common.settings import ROOT
from scripts.common.triton import TritonError
from tests.support.checkpoints import language
from tests.support.stack import TestStack, brought_up

pytestmark = pytest.mark.slow

POSITIONS = 256
ASCII = [
    "I am",
    "It was raining when",
    "Dynamic batching serves many requests",
    "Which battery fits the small torch? The",
]
ANY = [
    *ASCII,
    "비 그친 뒤",
    "Grüße aus",
    "  two  spaces ",
    "a",
    "☀ 🥖",
    "\n\nI am going",
    "The second",
    "München: schönes",
]


@dataclass
class Original:
    """What transformers itself says."""

    model: transformers.GPT2LMHeadModel
    tokenizer: transformers.PreTrainedTokenizerBase

    @classmethod
    def load(cls, folder: Path) -> Original:
        model = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
        return cls(model, transformers.AutoTokenizer.from_pretrained(folder))

    def goes_on(self, text: str, tokens: int) -> str:
        prompt = self.tokenizer(text, return_tensors="pt")
        found = self.model.generate(**prompt, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        return self.decode(found[0, prompt.input_ids.shape[1] :])

    def next(self, text: str) -> str:
        return self.goes_on(text, 1)

    def decode(self, tokens) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def taught(folder: Path) -> Path:
    """One that knows its lines: what it says reads back as the tokens it said, which a loop over texts relies on."""
    language.save_gpt2(folder, context=POSITIONS)
    original = Original.load(folder)
    end = original.tokenizer.eos_token
    original.tokenizer.pad_token = end
    lines = original.tokenizer([line + end for line in language.LINES.splitlines()], return_tensors="pt", padding=True)
    labels = lines.input_ids.masked_fill(lines.attention_mask == 0, -100)
    optimizer = torch.optim.AdamW(original.model.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        original.model(**lines, labels=labels).loss.backward()
        optimizer.step()
    original.model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def served(new_stack) -> TestStack:
    stack = new_stack()
    checkpoint = taught(stack.folder / "checkpoint")
    done = stack.make("models", SYSTEMS="gpt2_ensemble", SOURCE=checkpoint)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "with a past and without" in done.stdout
    stack.environment["SYSTEMS"] = "gpt2_ensemble gpt2_generate"
    return brought_up(stack)


@pytest.fixture(scope="module")
def original(served) -> Original:
    return Original.load(served.folder / "checkpoint")


def ask(stack: TestStack, model: str, *texts: str, tokens: int | None = None) -> list[str]:
    inputs = [{"name": "TEXT", "shape": [len(texts)], "datatype": "BYTES", "data": list(texts)}]
    if tokens is not None:
        inputs.append({"name": "max_new_tokens", "shape": [1], "datatype": "INT32", "data": [tokens]})
    (output,) = stack.triton.infer(model, {"inputs": inputs})["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("out", "BYTES", [len(texts)])
    return output["data"]


def loop(stack: TestStack, text: str, tokens: int) -> str:
    """The client: the continuation, a token a call."""
    said = ""
    for _ in range(tokens):
        said += ask(stack, "gpt2_ensemble", text + said)[0]
    return said


def unload(stack: TestStack, model: str) -> None:
    """And all that it is made of."""
    stack.triton._call(f"/v2/repository/models/{model}/unload", {"parameters": {"unload_dependents": True}})
    stack.wait(lambda: stack.triton.index()[model][0] == "UNAVAILABLE", f"{model} unloaded")


# --- a token a call ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ASCII)
def test_the_loop_is_greedy_generation(served, original, text):
    said = loop(served, text, 12)
    assert said == original.goes_on(text, 12)
    assert text + said in language.LINES  # spaces and all


def test_the_published_client(served, original):
    """As written, but for the address and the signature. It puts a space of its own before each token."""
    data = "I am going"
    url = f"{served.http}/v2/models/gpt2_ensemble/versions/1/infer"

    count = 0
    max_gen_len = 10
    gen_sentence = data
    while count < max_gen_len:
        payload = {
            "inputs": [
                {
                    "name": "TEXT",
                    "datatype": "BYTES",
                    "shape": [1],
                    "data": [gen_sentence],
                }
            ]
        }
        headers = {"model_name": "ensemble_model", "model_version": "1"}
        ret = requests.post(url, json=payload, headers=headers)
        assert ret.status_code == 200
        res = ret.json()
        next_seq = str(res["outputs"][0]["data"][0])
        assert next_seq == original.next(gen_sentence)
        gen_sentence += " " + next_seq
        count += 1
    assert len(gen_sentence) > len(data) + 10


def test_the_documents_requests(served, original):
    document = (ROOT / "docs/gpt2.md").read_text().replace("localhost:8000", served.http.removeprefix("http://"))
    curls = re.findall(r"```sh\n(curl .*?)```", document, re.DOTALL)
    prompts = ["My dog is cute, but", "It was raining when"]
    expected = [[original.next(prompts[0])], [original.goes_on(prompt, 50) for prompt in prompts]]
    for curl, answer in zip(curls, expected, strict=True):
        done = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["outputs"][0]["data"] == answer
    (client,) = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    client = client.replace(prompts[0], prompts[1])
    done = subprocess.run([sys.executable, "-c", client], capture_output=True, text=True, check=True)
    assert done.stdout == f"{prompts[1]}{original.goes_on(prompts[1], 20)}\n"


@pytest.mark.parametrize("text", ANY)
def test_any_text(served, original, text):
    assert ask(served, "gpt2_ensemble", text) == [original.next(text)]


def test_part_of_a_character(served, original):
    """A token may be one byte of three: alone it is no text."""
    assert ask(served, "gpt2_ensemble", "비 그친 뒤 골목에 빵 굽는 냄새가 퍼진다. 날") == ["\ufffd"]
    assert ask(served, "gpt2_generate", "비 그친 뒤 골목에 빵 굽는 냄새가 퍼진다. 날", tokens=3) == ["씨"]


def test_a_text_that_has_ended_goes_on_with_nothing(served):
    assert ask(served, "gpt2_ensemble", language.LINES.splitlines()[0]) == [""]
    assert ask(served, "gpt2_generate", language.LINES.splitlines()[0]) == [""]


def test_a_batch_of_unequal_texts(served, original):
    assert ask(served, "gpt2_ensemble", *ANY) == [original.next(text) for text in ANY]


def test_sixteen_clients_each_its_own(served, original):
    texts = [text[:end] for text in language.LINES.splitlines() for end in (3, 9, 20)][:16]
    alone = [original.next(text) for text in texts]
    before = served.triton.statistics()["gpt2"]
    with ThreadPoolExecutor(16) as clients:
        for _ in range(4):
            found = list(clients.map(lambda text: ask(served, "gpt2_ensemble", text)[0], texts))
            assert found == alone
    after = served.triton.statistics()["gpt2"]
    assert after["inference_count"] - before["inference_count"] == 64
    assert after["execution_count"] - before["execution_count"] < 64  # texts of about one length went together


# --- all of it in one call --------------------------------------------------------------------------------------------


def test_the_loop_in_the_server(served, original):
    for text in ASCII:
        assert ask(served, "gpt2_generate", text, tokens=12) == [loop(served, text, 12)]
    assert ask(served, "gpt2_generate", "I am") == [original.goes_on("I am", 20)]


def test_texts_of_a_request_end_each_on_its_own(served, original):
    alone = [original.goes_on(text, 60) for text in ANY]
    assert len({len(original.tokenizer(said).input_ids) for said in alone}) > 5
    assert ask(served, "gpt2_generate", *ANY, tokens=60) == alone


def test_requests_are_generated_together(served, original):
    wanted = [(text, 5 + 9 * i % 41) for i, text in enumerate(ANY * 2)]
    alone = [original.goes_on(*each) for each in wanted]
    tokens = sum(len(original.tokenizer(said).input_ids) for said in alone)
    before = served.triton.statistics()["gpt2"]["execution_count"]
    with ThreadPoolExecutor(len(wanted)) as clients:
        found = list(clients.map(lambda each: ask(served, "gpt2_generate", each[0], tokens=each[1])[0], wanted))
    assert found == alone
    assert served.triton.statistics()["gpt2"]["execution_count"] - before < tokens / 2


def test_more_texts_than_are_generated_at_a_time(served, original):
    assert ask(served, "gpt2_generate", *ANY * 4, tokens=6) == [original.goes_on(text, 6) for text in ANY] * 4


def test_no_texts(served):
    assert ask(served, "gpt2_generate") == []


def test_the_model_it_asks_is_loaded_with_it(served, original):
    unload(served, "gpt2_ensemble")
    unload(served, "gpt2")
    try:
        assert ask(served, "gpt2_generate", "I am", tokens=5) == [original.goes_on("I am", 5)]
    finally:
        served.triton.load("gpt2_ensemble")


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "texts", "tokens", "reason"),
    [
        ("gpt2_ensemble", [""], None, "text 0 has 0 tokens; it must have 1 to 256"),
        ("gpt2_ensemble", ["I am", ""], None, "text 1 has 0 tokens"),
        ("gpt2_ensemble", ["a b " * 200], None, "tokens; it must have 1 to 256"),
        ("gpt2_ensemble", ["I am"] * 33, None, "batch-size must be <= 32"),
        ("gpt2_generate", ["I am", ""], None, "input 'TEXT': text 1 is empty"),
        ("gpt2_generate", ["I am"], 254, "text 0 has 3 tokens; of the model's 256 positions that leaves 253, and 254"),
        ("gpt2_generate", ["a" * 256], None, "text 0 has 256 tokens; of the model's 256 positions that leaves 0"),
        ("gpt2_generate", ["I am"], 0, "input 'max_new_tokens' must be at least 1"),
    ],
)
def test_refused(served, model, texts, tokens, reason):
    with pytest.raises(TritonError) as error:
        ask(served, model, *texts, tokens=tokens)
    assert error.value.status == 400
    assert reason in str(error.value)


@pytest.mark.parametrize("model", ["gpt2_ensemble", "gpt2_generate"])
def test_text_that_is_no_utf8_is_refused(served, model):
    tensor = b"\x02\x00\x00\x00\xffa"
    parameters = {"binary_data_size": len(tensor)}
    header = {"inputs": [{"name": "TEXT", "shape": [1], "datatype": "BYTES", "parameters": parameters}]}
    encoded = json.dumps(header).encode()
    request = urllib.request.Request(
        f"{served.http}/v2/models/{model}/infer",
        data=encoded + tensor,
        headers={"Inference-Header-Content-Length": str(len(encoded))},
    )
    with pytest.raises(urllib.error.HTTPError) as error:
        opener.open(request, timeout=30)
    assert error.value.code == 400
    assert b"not valid UTF-8 (byte 0)" in error.value.read()


def test_the_last_position_is_used(served, original):
    text = "a" * (POSITIONS - 1)
    assert ask(served, "gpt2_generate", text) == [original.next(text)]
    assert ask(served, "gpt2_ensemble", text) == [original.next(text)]


def test_only_gpt2_becomes_gpt2(served):
    more = language.save_gpt2(served.folder / "more")
    tokenizer = transformers.AutoTokenizer.from_pretrained(more)
    tokenizer.add_tokens(["<of its own>"])
    tokenizer.save_pretrained(more)
    graph = served.folder / "models/gpt2/1/model.onnx"
    before = graph.stat().st_mtime_ns
    for checkpoint, reason in (
        (language.save_falcon(served.folder / "falcon"), "is a model of type falcon, and this system takes only gpt2"),
        (more, f"its tokenizer has {len(tokenizer)} tokens, but the model only {len(tokenizer) - 1}"),
    ):
        done = served.make("models", SYSTEMS="gpt2_ensemble", SOURCE=checkpoint)
        assert done.returncode == 2
        assert reason in done.stderr
        assert "Traceback" not in done.stderr
    assert graph.stat().st_mtime_ns == before


# --- make generate ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["embedding", "gpt2_generate"])
def test_make_generate(served, original, system):
    done = served.make("generate", PROMPT="I am", TOKENS=8, SYSTEM=system)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"I am{original.goes_on('I am', 8)}\n"


def test_make_generate_stops_where_the_text_does(served):
    done = served.make("generate", PROMPT="I am going", TOKENS=200)
    assert done.stdout == language.LINES.splitlines()[0] + "\n"
    assert done.returncode == 0


def test_make_generate_of_a_model_that_is_not_loaded(served):
    unload(served, "gpt2_ensemble")
    try:
        done = served.make("generate", PROMPT="I am")
        assert done.returncode == 2
        assert "gpt2_ensemble is not loaded: make up SYSTEMS=" in done.stderr
    finally:
        served.triton.load("gpt2_ensemble")


def test_no_text_in_the_log(served):
    marker = "unheard-of-words"
    ask(served, "gpt2_ensemble", marker)
    ask(served, "gpt2_generate", marker)
    time.sleep(0.5)
    assert marker not in served.log
