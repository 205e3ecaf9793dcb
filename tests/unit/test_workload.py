"""The workloads, and the requests that users send."""

import io
import itertools
import json
import unicodedata

import numpy as np
import pytest
from PIL import Image
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

from loadtest import examples
from loadtest.encoding import grpc_request, http_request
from loadtest.examples import Examples
from loadtest.users import Job, Traffic
from loadtest.workload import WORKLOADS, Workload
from scripts.common.settings import Settings, UserError


def test_corpus_varies_in_length_and_script():
    texts = WORKLOADS["mixed"].corpus.texts
    words = [len(text.split()) for text in texts]
    assert len(texts) >= 200
    assert len(set(texts)) == len(texts)
    assert all(text == text.strip() and unicodedata.is_normalized("NFC", text) for text in texts)
    assert min(words) <= 3
    assert 85 <= max(words) <= 110
    scripts = {unicodedata.name(character).split()[0] for text in texts for character in text if character.isalpha()}
    assert scripts >= {"LATIN", "HANGUL", "CJK", "HIRAGANA", "ARABIC", "DEVANAGARI", "CYRILLIC"}


def test_published_corpus_has_three_texts():
    korean, short, long = WORKLOADS["published"].corpus.texts
    assert any("HANGUL" in unicodedata.name(c) for c in korean)
    assert (len(short.split()), len(long.split())) == (12, 35)


def config(*inputs, **more) -> dict:
    """Return a model configuration; each input is (name, type, dims, optional)."""
    keys = ("name", "data_type", "dims", "optional")
    return {
        "name": "m",
        "max_batch_size": 8,
        "input": [dict(zip(keys, values, strict=False)) for values in inputs],
    } | more


TEXT = config(("input_text", "TYPE_STRING", ["1"]))
TEXTS = ["", "plain", "슈퍼 엔저 장기화에…"]


@pytest.mark.parametrize("row", range(3))
def test_http_request_equals_that_of_tritonclient(row):
    tensor = InferInput("input_text", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[TEXTS[row].encode()]], np.object_))
    expected, length = InferenceServerClient.generate_request_body(
        [tensor], outputs=[InferRequestedOutput("output__0", binary_data=True)]
    )
    request = http_request(Examples.from_config(TEXT, TEXTS).requests[row])
    assert request.body[request.header_length :] == expected[length:]
    assert json.loads(request.body[: request.header_length])["inputs"] == json.loads(expected[:length])["inputs"]


def test_grpc_request_carries_the_text():
    request = grpc_request("embedding", Examples.from_config(TEXT, ["한국"]).requests[0])
    assert request.raw_input_contents[0][4:].decode() == "한국"
    assert list(request.inputs[0].shape) == [1, 1]


def test_model_without_batches_gets_no_batch_dimension():
    prompt = config(("prompt", "TYPE_STRING", ["1"]), ("seed", "TYPE_INT64", ["1"], True), max_batch_size=0)
    ((tensor,),) = Examples.from_config(prompt, ["hello"]).requests
    assert (tensor.name, tensor.shape, tensor.data[4:]) == ("prompt", [1], b"hello")


def test_two_inputs_get_different_texts():
    pairs = config(("question", "TYPE_STRING", ["1"]), ("context", "TYPE_STRING", ["1"]))
    built = Examples.from_config(pairs, ["a", "b", "c"])
    assert [[t.name for t in request] for request in built.requests] == [["question", "context"]] * 3
    assert [[t.data[4:] for t in request] for request in built.requests] == [
        [b"a", b"b"],
        [b"b", b"c"],
        [b"c", b"a"],
    ]
    request = grpc_request("m", built.requests[0])
    assert (len(request.inputs), len(request.raw_input_contents)) == (2, 2)
    body = http_request(built.requests[0])
    assert body.body[body.header_length :] == b"\x01\0\0\0a\x01\0\0\0b"


def test_first_of_two_texts_leaves_room_for_the_second():
    """A model of 128 tokens refuses a question that takes half of them."""
    pairs = config(("query", "TYPE_STRING", ["1"]), ("text", "TYPE_STRING", ["1"]))
    for workload in WORKLOADS.values():
        texts = workload.corpus.texts
        requests = Examples.from_config(pairs, texts).requests
        assert all(0 < len(query.data) - 4 <= 48 for query, _ in requests)
        assert {text.data[4:].decode() for _, text in requests} == set(texts)
    queries = {query.data[4:] for query, _ in Examples.from_config(pairs, WORKLOADS["mixed"].corpus.texts).requests}
    assert len(queries) > 8
    assert all(query.endswith(b"?") for query in queries)


IMAGE, FILE = ("image", "TYPE_FP32", ["-1", "-1", "3"], True), ("image_bytes", "TYPE_STRING", ["1"], True)


@pytest.mark.slow
def test_image_files_vary_in_size_and_repeat_in_every_run():
    built = Examples.from_config(config(IMAGE, FILE), TEXTS)
    assert built.noun == "images"
    assert built.sha256 == Examples.from_config(config(IMAGE, FILE), TEXTS).sha256
    files = [tensor.data[4:] for (tensor,) in built.requests]
    assert len(set(files)) == len(files) >= 24
    sizes = [Image.open(io.BytesIO(file), formats=["JPEG"]).size for file in files]
    areas = sorted(width * height for width, height in sizes)
    assert areas[0] < 10_000
    assert 900_000 < areas[-1] < 1_200_000
    assert all((tensor.name, tensor.shape) == ("image_bytes", [1, 1]) for (tensor,) in built.requests)


def test_model_without_files_gets_pixels():
    built = Examples.from_config(config(IMAGE), TEXTS)
    assert built.noun == "images"
    for (tensor,) in built.requests:
        pixels = np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)
        assert tensor.shape[0] == 1
        assert tensor.shape[3] == 3
        assert 0 <= pixels.min() < pixels.max() <= 255


def test_fill_mask_texts_contain_the_mask(monkeypatch):
    tokenizer = TEXT | {"parameters": {"exactly_one": {"string_value": "<mask>"}}}
    monkeypatch.setattr(examples, "composing", lambda triton, system: {system: TEXT, "tokenizer": tokenizer})
    ((tensor,),) = Examples.from_server(Settings.load(), ["hello"]).requests
    assert tensor.data[4:] == b"<mask> hello"


def test_unsupported_inputs_raise_an_error():
    with pytest.raises(UserError, match="SYSTEM=m takes input_ids: load tests send only texts and images"):
        Examples.from_config(config(("input_ids", "TYPE_INT64", ["-1"])), TEXTS)
    with pytest.raises(UserError, match="SYSTEM=m takes seed: load tests send only texts and images"):
        Examples.from_config(config(("seed", "TYPE_INT64", ["1"], True)), TEXTS)


def job(seed):
    return Job("http", "http://127.0.0.1:1", "embedding", Examples.from_config(TEXT, TEXTS).requests, (0.0, 0.0), seed)


def test_same_seed_sends_the_same_texts():
    def first_choices(seed):
        shared = Traffic(job(seed))
        return [[shared.new_random().choice(range(240)) for _ in range(5)] for _ in range(3)]

    assert first_choices(1) == first_choices(1) != first_choices(2)


def test_users_in_workers_have_the_same_random_streams():
    def streams(count, *numbers):
        traffic = Traffic(job(1), *numbers)
        return [traffic.new_random().random() for _ in range(count)]

    alone, first, second = streams(5), streams(3, itertools.count(0, 2)), streams(2, itertools.count(1, 2))
    assert len(set(alone)) == 5
    assert alone == [first[0], second[0], first[1], second[1], first[2]]


def test_settings_override_the_workload(monkeypatch):
    base = Settings.load() | {"WORKLOAD": "published", "USERS": "", "WAIT": "", "MAX_BATCH": ""}
    published = Workload.from_settings(Settings(base))
    assert (published.users, published.spawn_rate, published.wait, published.max_batch) == (300, 3, (0.1, 0.4), 8)
    changed = Workload.from_settings(Settings(base | {"USERS": "5", "WAIT": "0.5", "MAX_BATCH": "2"}))
    assert (changed.users, changed.wait, changed.max_batch) == (5, (0.5, 0.5), 2)
    for wrong in ("a", "1,2,3", "2,1", "-1"):
        with pytest.raises(UserError, match="WAIT="):
            Workload.from_settings(Settings(base | {"WAIT": wrong}))
