"""The workloads, and the requests that users send."""

import io
import json
import unicodedata
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

from loadtest import examples
from loadtest.examples import ROUTES, Examples, grpc_request, http_request
from loadtest.locust_users import GatewayUser, Job, Traffic
from loadtest.workload import WORKLOADS, Workload
from triton_transformers.settings import Settings, UserError


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
    request = http_request(Examples.from_config(TEXT, TEXTS).requests[row], ["output__0"])
    assert request.body[request.header_length :] == expected[length:]
    header, expected_header = json.loads(request.body[: request.header_length]), json.loads(expected[:length])
    assert all(header[key] == expected_header[key] for key in ("inputs", "outputs"))


def test_grpc_request_carries_the_text():
    request = grpc_request("embedding", Examples.from_config(TEXT, ["한국"]).requests[0])
    assert request.raw_input_contents[0][4:].decode() == "한국"
    assert list(request.inputs[0].shape) == [1, 1]


@pytest.mark.parametrize(
    ("outputs", "asked"),
    [
        (["input_ids", "token_count", "output__0"], ("output__0",)),
        (["token_count", "text", "sentence_embedding"], ("sentence_embedding",)),
        (["score", "token_count"], ()),
        (["input_ids", "attention_mask"], ()),
    ],
)
def test_load_asks_only_for_the_vector(outputs, asked):
    """Other outputs may need a step of their own, and a request that names no output asks for all."""
    examples = Examples.from_config(TEXT | {"output": [{"name": name, "dims": ["1"]} for name in outputs]}, TEXTS)
    assert examples.outputs == asked
    request = grpc_request("m", examples.requests[0], examples.outputs)
    assert tuple(output.name for output in request.outputs) == asked
    body = http_request(examples.requests[0], examples.outputs)
    named = json.loads(body.body[: body.header_length]).get("outputs", [])
    assert tuple(output["name"] for output in named) == asked


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


# Kind -> the configuration of such a system, and the request of its users to the gateway.
KINDS = {
    "embedding": (
        TEXT | {"output": [{"name": "output__0", "dims": ["384"]}]},
        ("/v1/embeddings", {"model": "m", "input": "plain", "encoding_format": "base64"}),
    ),
    "sparse": (
        TEXT | {"output": [{"name": name, "dims": ["-1"]} for name in ("token_id", "weight")]},
        ("/v1/embeddings", {"model": "m", "input": "plain", "embedding_type": "sparse"}),
    ),
    "multi": (
        config(("input_text", "TYPE_STRING", ["1"]), ("query", "TYPE_STRING", ["1"], True))
        | {"output": [{"name": "token_embeddings", "dims": ["-1", "16"]}]},
        ("/v1/embeddings", {"model": "m", "input": "plain", "embedding_type": "multi"}),
    ),
    "classify": (
        TEXT | {"output": [{"name": name, "dims": ["-1"]} for name in ("label", "score", "scores")]},
        ("/v1/classify", {"model": "m", "input": "plain"}),
    ),
    "rerank": (
        config(("query", "TYPE_STRING", ["1"]), ("text", "TYPE_STRING", ["1"]))
        | {"output": [{"name": "score", "dims": ["1"]}]},
        ("/v1/rerank", {"model": "m", "query": "plain", "documents": ["plain"]}),
    ),
    "generation": (
        config(("text_input", "TYPE_STRING", ["1"]), ("max_new_tokens", "TYPE_INT32", ["1"], True), max_batch_size=0)
        | {"output": [{"name": "text_output", "dims": ["1"]}]},
        ("/v1/completions", {"model": "m", "prompt": "plain", "temperature": 0, "max_tokens": 7}),
    ),
}


def gateway_job(config: dict, **values: str) -> Job:
    settings = Settings.load().replace(PROTOCOL="openai", SYSTEM="m", **values)
    return Job.from_settings(settings, Workload.from_settings(settings), Examples.from_config(config, ["plain"], 7))


@pytest.mark.parametrize("kind", KINDS)
def test_request_to_the_gateway_has_the_route_of_its_system(kind):
    config, (path, body) = KINDS[kind]
    job = gateway_job(config)
    assert (job.protocol, job.url, job.kind, job.key) == ("openai", "http://127.0.0.1:8080", kind, "")
    assert ROUTES[kind].path == path
    (request,) = Traffic(job).requests
    assert json.loads(request) == body


def test_load_goes_to_the_gateways_address_with_a_plain_key():
    digest = f"sha256:{'0' * 64}"
    job = gateway_job(KINDS["embedding"][0], API_KEYS=f"{digest} a-key-of-the-tests", TLS_CERT="c", GATEWAY_PORT="8443")
    assert (job.url, job.key) == ("https://127.0.0.1:8443", "a-key-of-the-tests")
    assert "a-key-of-the-tests" not in repr(job)
    with pytest.raises(UserError, match=r"^PROTOCOL=openai: API_KEYS has only digests"):
        gateway_job(KINDS["embedding"][0], API_KEYS=digest)


@pytest.mark.parametrize("config", [TEXT, config(("image", "TYPE_FP32", ["-1", "-1", "3"]))], ids=["text", "image"])
def test_system_without_a_route_is_refused(config):
    with pytest.raises(UserError, match=r"^PROTOCOL=openai: the gateway has no route for SYSTEM=m, .* set PROTOCOL="):
        gateway_job(config)


@pytest.mark.parametrize(
    ("content", "defect"),
    [
        (b'{"data": [{"embedding": "AAAA"}]}', ""),
        (b'{"data": []}', "the response has no data"),
        (b'{"results": [1]}', "the response has no data"),
        (b"[]", "the response has no data"),
        (b"<html>", "the response is not JSON"),
    ],
)
def test_answer_of_the_gateway_without_data_counts_as_failed(content, defect):
    user = SimpleNamespace(traffic=Traffic(gateway_job(KINDS["embedding"][0])))
    assert GatewayUser.defect(user, SimpleNamespace(content=content)) == defect


def job(seed):
    return Job("http", "http://127.0.0.1:1", "embedding", Examples.from_config(TEXT, TEXTS).requests, (0.0, 0.0), seed)


def test_same_seed_sends_the_same_texts():
    def first_choices(seed):
        shared = Traffic(job(seed))
        return [[shared.new_random().choice(range(240)) for _ in range(5)] for _ in range(3)]

    assert first_choices(1) == first_choices(1) != first_choices(2)


def test_users_in_workers_have_the_same_random_streams():
    def streams(count, *worker_of):
        traffic = Traffic(job(1), *worker_of)
        return [traffic.new_random().random() for _ in range(count)]

    alone, first, second = streams(5), streams(3, 0, 2), streams(2, 1, 2)
    assert len(set(alone)) == 5
    assert alone == [first[0], second[0], first[1], second[1], first[2]]


def test_settings_override_the_workload():
    base = Settings.load() | {"WORKLOAD": "published", "USERS": "", "WAIT": "", "MAX_BATCH": ""}
    published = Workload.from_settings(Settings(base))
    assert (published.users, published.spawn_rate, published.wait, published.max_batch) == (300, 3, (0.1, 0.4), 8)
    changed = Workload.from_settings(Settings(base | {"USERS": "5", "WAIT": "0.5", "MAX_BATCH": "2"}))
    assert (changed.users, changed.wait, changed.max_batch) == (5, (0.5, 0.5), 2)
    for wrong in ("a", "1,2,3", "2,1", "-1"):
        with pytest.raises(UserError, match="WAIT="):
            Workload.from_settings(Settings(base | {"WAIT": wrong}))


def test_rate_makes_users_a_pool_without_a_pace():
    base = Settings.load() | {"WORKLOAD": "published", "RATE": "20", "USERS": "", "WAIT": "", "SPAWN_RATE": ""}
    workload = Workload.from_settings(Settings(base), generates=True)
    assert (workload.rate, workload.users, workload.spawn_rate, workload.wait) == (20, 256, 100, (0, 0))
    assert workload.max_batch == 8
    assert Workload.from_settings(Settings(base | {"USERS": "5"})).users == 5
    for name in ("WAIT", "SPAWN_RATE"):
        with pytest.raises(UserError, match=f"RATE=20: requests arrive at this rate, whatever users do; clear {name}"):
            Workload.from_settings(Settings(base | {name: "1"}))


def test_job_takes_rate_and_arrivals_from_the_settings():
    settings = Settings(Settings.load() | {"RATE": "20", "ARRIVALS": "constant"})
    job = Job.from_settings(settings, Workload.from_settings(settings), Examples.from_config(TEXT, TEXTS))
    assert (job.rate, job.arrivals) == (20, "constant")
    settings = Settings(settings | {"RATE": ""})
    job = Job.from_settings(settings, Workload.from_settings(settings), Examples.from_config(TEXT, TEXTS))
    assert job.rate == 0
