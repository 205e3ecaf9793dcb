"""The embedding system: the published requests, batching, and the errors that clients get."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.http as httpclient

from export.catalogue import SYSTEMS
from tests.support.batches import batches_of
from tests.support.embedding import CURL, body, embed
from triton_transformers.corpus import MIXED
from triton_transformers.triton import TritonError


def refused(stack, *texts: bytes, model: str = "embedding") -> tuple[int, str]:
    data, headers = body(*texts)
    request = urllib.request.Request(stack.http + f"/v2/models/{model}/infer", data=data, headers=headers)
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=120)
    return error.value.code, json.loads(error.value.read())["error"]


@pytest.fixture(scope="module")
def original():
    """Return the original model, without Triton and ONNX."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(SYSTEMS["embedding"].source.verify()), device="cpu")


@pytest.mark.parametrize(
    ("model", "outputs"),
    [
        ("embedding", {"output__0": "FP32", "token_count": "INT32", "input_ids": "INT64"}),
        ("tokenizer", {"input_ids": "INT64", "attention_mask": "INT64", "token_count": "INT32"}),
    ],
)
def test_published_curl_works_as_written(stack, model, outputs):
    command = CURL.format(model=model).replace("http://localhost:8000", stack.http)
    done = subprocess.run(["bash", "-c", command], check=True, capture_output=True, text=True)
    answer = {output["name"]: output for output in json.loads(done.stdout)["outputs"]}
    assert list(answer) == list(outputs)
    assert {name: output["datatype"] for name, output in answer.items()} == outputs
    assert all(output["shape"][0] == 2 for output in answer.values())
    if model == "embedding":
        assert answer["output__0"]["shape"] == [2, 384]


def test_published_client_works_as_written(stack):
    text = np.array([["비 그친 뒤 골목에".encode()], ["막차를 놓쳤다면?".encode()]], dtype=np.bytes_)
    input_text = httpclient.InferInput("input_text", list(text.shape), datatype="BYTES")
    input_text.set_data_from_numpy(text, binary_data=True)
    outputs = httpclient.InferRequestedOutput("output__0", binary_data=True)
    client = httpclient.InferenceServerClient(url=stack.http.removeprefix("http://"))
    result = client.infer(model_name="embedding", inputs=[input_text], outputs=[outputs])
    assert result.as_numpy("output__0").shape == (2, 384)


@pytest.mark.parametrize("output", ["output__0", "token_count", "input_ids", ""])
def test_tokenizer_runs_only_for_its_output(stack, output):
    data, headers = body(b"one answer", output=output)
    before = stack.triton.statistics()
    request = urllib.request.Request(stack.http + "/v2/models/embedding/infer", data=data, headers=headers)
    urllib.request.urlopen(request, timeout=120).close()
    assert stack.executions("encoder", 1, before["encoder"]) == 1
    if output in ("input_ids", ""):
        assert stack.executions("tokenizer", 1, before["tokenizer"]) == 1
    else:
        assert stack.triton.statistics()["tokenizer"]["inference_count"] == before["tokenizer"]["inference_count"]


def test_served_vectors_equal_the_original(stack, original):
    """Compare also an empty text, one token, and more tokens than the maximum."""
    # It imports transformers, whose ssl Locust would patch too late.
    from export.recipes.text.recipe import example_texts

    texts = example_texts(256)
    served = np.concatenate([embed(stack, *texts[i : i + 30]) for i in range(0, len(texts), 30)])
    expected = original.encode(texts, batch_size=16, show_progress_bar=False)
    assert (served * expected).sum(axis=1).min() > 0.9999
    np.testing.assert_allclose(served, expected, atol=1e-4)


def test_64_clients_get_the_same_vectors_as_one(stack):
    """Send requests of several rows, to test that they keep their order."""
    texts = MIXED.texts[:63]
    alone = {text: embed(stack, text)[0] for text in texts}
    triples = [texts[i : i + 3] for i in range(0, len(texts), 3)] * 4
    with batches_of(stack, "encoder", rows=63), ThreadPoolExecutor(64) as clients:
        before = stack.triton.statistics()["encoder"]
        answers = list(clients.map(lambda triple: embed(stack, *triple), triples))
        assert stack.executions("encoder", 3 * len(triples), before) == 3 * len(triples) / 63
    for triple, answer in zip(triples, answers, strict=True):
        np.testing.assert_allclose(answer, [alone[text] for text in triple], atol=1e-5)


def test_wrong_request_leaves_its_batch_unharmed(stack):
    good = ["a sound request", "잘못이 없는 요청", ""]
    alone = {text: embed(stack, text)[0] for text in good}

    def ask(n: int):
        if n % 4 == 3:
            return refused(stack, b"fine", b"\xff\xfe never quoted")
        return embed(stack, good[n % 4])[0]

    with ThreadPoolExecutor(64) as clients:
        answers = list(clients.map(ask, range(128)))
    for n, answer in enumerate(answers):
        if n % 4 == 3:
            code, message = answer
            assert code == 400
            assert "input 'input_text': row 1 is not valid UTF-8 (byte 0)" in message
            assert "never quoted" not in message
        else:
            np.testing.assert_allclose(answer, alone[good[n % 4]], atol=1e-5)
    assert "never quoted" not in stack.log


def test_wrong_request_gets_400_with_the_reason(stack):
    for tensor, reason in (
        ({"name": "input_text", "shape": [1, 2], "datatype": "BYTES", "data": ["a", "b"]}, "input_text"),
        ({"name": "input_text", "shape": [65, 1], "datatype": "BYTES", "data": ["a"] * 65}, "batch-size must be <= 64"),
        ({"name": "input_texts", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}, "input_texts"),
    ):
        with pytest.raises(TritonError, match=reason) as error:
            stack.triton.infer("embedding", {"inputs": [tensor]})
        assert error.value.status == 400


def test_encoder_of_tokens_computes_the_same_and_refuses_wrong_ones(stack, original):
    """Load the encoder with a config that takes the tokenizer's tokens."""
    config = stack.triton.config("encoder")
    names = ("input_ids", "attention_mask")
    inputs = [{"name": name, "data_type": "TYPE_INT64", "dims": ["-1"], "allow_ragged_batch": True} for name in names]
    vector = [tensor for tensor in config["output"] if tensor["name"] == "sentence_embedding"]
    stack.triton.load("encoder", config | {"input": inputs, "output": vector})
    try:
        tokens = stack.ask("tokenizer", input_text=["a text"])
        (answer,) = encode(stack, *(tokens[name] for name in names))["outputs"]
        np.testing.assert_allclose(answer["data"], original.encode("a text"), atol=1e-4)
        for ids, mask, reason in (
            ([[101, 7, 102]], [[1, 1]], r"input 'input_ids' has shape \[1, 3\], but 'attention_mask' has \[1, 2\]"),
            ([[101, 10**9, 102]], [[1, 1, 1]], "the model refused the values"),
        ):
            with pytest.raises(TritonError, match=reason) as error:
                encode(stack, ids, mask)
            assert error.value.status == 400
    finally:
        stack.triton.load("encoder", config)


def encode(stack, ids, mask) -> dict:
    inputs = [
        {"name": name, "shape": np.shape(rows), "datatype": "INT64", "data": np.ravel(rows).tolist()}
        for name, rows in (("input_ids", ids), ("attention_mask", mask))
    ]
    return stack.triton.infer("encoder", {"inputs": inputs})
