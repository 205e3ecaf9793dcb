"""GPT-2 with the loop in the client and in the server: both return the texts of transformers, alone and in batches."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests
import torch
import transformers

from tests.support.batches import one_batch
from tests.support.checkpoints import language
from tests.support.stacks import TestStack
from triton_transformers.http import opener
from triton_transformers.settings import ROOT, UserError
from triton_transformers.triton import TritonError

pytestmark = pytest.mark.slow

POSITIONS = 256
ASCII = [
    "I am",
    "It was raining when",
    "Dynamic batching serves many requests",
    "Which battery fits the small torch? The",
]
ANY_TEXT = [
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
    """The original model in transformers."""

    model: transformers.GPT2LMHeadModel
    tokenizer: transformers.PreTrainedTokenizerBase

    @classmethod
    def load(cls, folder: Path) -> Original:
        model = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
        return cls(model, transformers.AutoTokenizer.from_pretrained(folder))

    def continuation(self, text: str, tokens: int) -> str:
        prompt = self.tokenizer(text, return_tensors="pt")
        output = self.model.generate(**prompt, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        return self.decode(output[0, prompt.input_ids.shape[1] :])

    def next(self, text: str) -> str:
        return self.continuation(text, 1)

    def decode(self, tokens) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def train(folder: Path) -> Path:
    """Train a model on a few lines, so that its text has the same tokens when a client sends it back."""
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
def checkpoint(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def served(stack, checkpoint) -> TestStack:
    assert "of the original's" in stack.assemble({"SYSTEMS": "gpt2_ensemble", "SOURCE": checkpoint})
    return stack.serve("gpt2_ensemble", "gpt2_generate")


@pytest.fixture(scope="module")
def original(checkpoint) -> Original:
    return Original.load(checkpoint)


def ask(stack: TestStack, model: str, *texts: str, tokens: int | None = None) -> list[str]:
    inputs = [{"name": "TEXT", "shape": [len(texts)], "datatype": "BYTES", "data": list(texts)}]
    if tokens is not None:
        inputs.append({"name": "max_new_tokens", "shape": [1], "datatype": "INT32", "data": [tokens]})
    (output,) = stack.triton.infer(model, {"inputs": inputs})["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("out", "BYTES", [len(texts)])
    return output["data"]


def loop(stack: TestStack, text: str, tokens: int) -> str:
    """Return the continuation as a client gets it, one token per call."""
    continuation = ""
    for _ in range(tokens):
        continuation += ask(stack, "gpt2_ensemble", text + continuation)[0]
    return continuation


# --- one token per call -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ASCII)
def test_client_loop_equals_greedy_generation(served, original, text):
    continuation = loop(served, text, 12)
    assert continuation == original.continuation(text, 12)
    assert text + continuation in language.LINES  # with the same spaces


def test_published_client_works_as_written(served, original):
    """Run the published client; only its address is changed. It adds a space before each token."""
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


def test_documented_requests_work(served, original):
    document = (ROOT / "docs/guides.md").read_text().split("## GPT-2 in three steps")[1]
    document = document.replace("localhost:8000", served.http.removeprefix("http://"))
    curls = re.findall(r"```sh\n(curl .*?)```", document, re.DOTALL)
    prompts = ["My dog is cute, but", "It was raining when"]
    expected = [[original.next(prompts[0])], [original.continuation(prompt, 50) for prompt in prompts]]
    for curl, answer in zip(curls, expected, strict=True):
        done = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["outputs"][0]["data"] == answer
    (client,) = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    client = client.replace(prompts[0], prompts[1])
    done = subprocess.run([sys.executable, "-c", client], capture_output=True, text=True, check=True)
    assert done.stdout == f"{prompts[1]}{original.continuation(prompts[1], 20)}\n"


def test_partial_character_is_replaced(served):
    """Continue with a token that is one byte of a character of three."""
    assert ask(served, "gpt2_ensemble", "비 그친 뒤 골목에 빵 굽는 냄새가 퍼진다. 날") == ["\ufffd"]
    assert ask(served, "gpt2_generate", "비 그친 뒤 골목에 빵 굽는 냄새가 퍼진다. 날", tokens=3) == ["씨"]


def test_ended_text_returns_an_empty_piece(served):
    assert ask(served, "gpt2_ensemble", language.LINES.splitlines()[0]) == [""]
    assert ask(served, "gpt2_generate", language.LINES.splitlines()[0]) == [""]


def test_batch_of_unequal_texts_equals_transformers(served, original):
    assert ask(served, "gpt2_ensemble", *ANY_TEXT) == [original.next(text) for text in ANY_TEXT]


def test_sixteen_clients_get_their_own_text(served, original):
    lines = language.LINES.splitlines()
    texts = [text[:end] for text in lines for end in (3, 9, 20)][:16]
    alone = [original.next(text) for text in texts]
    with ThreadPoolExecutor(16) as clients:
        for _ in range(4):
            assert list(clients.map(lambda text: ask(served, "gpt2_ensemble", text)[0], texts)) == alone
        texts = [text[:end] for text in lines for end in (2, 3, 4)][:16]
        alone = [original.next(text) for text in texts]
        with one_batch(served, "gpt2", rows=16):  # short texts are all padded to the same length
            assert list(clients.map(lambda text: ask(served, "gpt2_ensemble", text)[0], texts)) == alone


# --- the whole text per call ------------------------------------------------------------------------------------------


def test_server_loop_equals_transformers(served, original):
    for text in ASCII:
        assert ask(served, "gpt2_generate", text, tokens=12) == [loop(served, text, 12)]
    assert ask(served, "gpt2_generate", "I am") == [original.continuation("I am", 20)]


def test_texts_of_a_request_end_independently(served, original):
    alone = [original.continuation(text, 60) for text in ANY_TEXT]
    assert len({len(original.tokenizer(text).input_ids) for text in alone}) > 5
    assert ask(served, "gpt2_generate", *ANY_TEXT, tokens=60) == alone


def test_ended_text_has_the_reason_and_its_tokens(served, original):
    texts = [language.LINES.splitlines()[0], "I am"]
    inputs = [
        {"name": "TEXT", "shape": [2], "datatype": "BYTES", "data": texts},
        {"name": "max_new_tokens", "shape": [1], "datatype": "INT32", "data": [3]},
    ]
    names = ("out", "finish_reason", "num_input_tokens", "num_output_tokens")
    request = {"inputs": inputs, "outputs": [{"name": name} for name in names]}
    outputs = served.triton.infer("gpt2_generate", request)["outputs"]
    assert {output["name"]: output["data"] for output in outputs} == {
        "out": ["", original.continuation("I am", 3)],
        "finish_reason": ["stop", "length"],
        "num_input_tokens": [len(original.tokenizer(text).input_ids) for text in texts],
        "num_output_tokens": [1, 3],
    }


# --- wrong requests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "texts", "tokens", "reason"),
    [
        ("gpt2_ensemble", ["I am", ""], None, "text 1 has 0 tokens; it must have 1 to 256"),
        ("gpt2_ensemble", ["a b " * 200], None, "tokens; it must have 1 to 256"),
        ("gpt2_ensemble", ["I am"] * 33, None, "batch-size must be <= 32"),
        ("gpt2_generate", [], None, "input 'TEXT' holds no prompt: send at least one"),
        ("gpt2_generate", ["I am"], 254, "context of 256 that leaves room for 253 new ones"),
    ],
)
def test_wrong_request_is_refused(served, model, texts, tokens, reason):
    with pytest.raises(TritonError) as error:
        ask(served, model, *texts, tokens=tokens)
    assert error.value.status == 400
    assert reason in str(error.value)


@pytest.mark.parametrize("model", ["gpt2_ensemble", "gpt2_generate"])
def test_text_without_utf8_is_refused(served, model):
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
        opener.open(request, timeout=120)
    assert error.value.code == 400
    assert b"not valid UTF-8 (byte 0)" in error.value.read()


def test_other_architectures_are_refused(served, tmp_path):
    larger = language.save_gpt2(tmp_path / "larger")
    tokenizer = transformers.AutoTokenizer.from_pretrained(larger)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(larger)
    graph = served.folder / "models/gpt2/1/model.onnx"
    before = graph.stat().st_mtime_ns
    for checkpoint, reason in (
        (language.save_falcon(tmp_path / "falcon"), "is a model of type falcon, and this system takes only gpt2"),
        (larger, f"its tokenizer has {len(tokenizer)} tokens, but the model only {len(tokenizer) - 1}"),
    ):
        with pytest.raises(UserError, match=reason):
            served.assemble({"SYSTEMS": "gpt2_ensemble", "SOURCE": checkpoint})
    assert graph.stat().st_mtime_ns == before


# --- make generate ----------------------------------------------------------------------------------------------------


def test_make_generate_equals_transformers(served, original):
    done = served.make("generate", PROMPT="I am", TOKENS=8)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"I am{original.continuation('I am', 8)}\n"
    done = served.make("generate", PROMPT="I am going", TOKENS=200, SYSTEM="gpt2_generate")
    assert done.returncode == 0, done.stderr
    assert done.stdout == language.LINES.splitlines()[0] + "\n"


def test_log_contains_no_text(served):
    marker = "unheard-of-words"
    ask(served, "gpt2_ensemble", marker)
    ask(served, "gpt2_generate", marker)
    assert marker not in served.log
