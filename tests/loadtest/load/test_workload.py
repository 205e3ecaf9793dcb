"""The workloads, and the requests that users send."""

import io
import json
import math
import unicodedata

import numpy as np
import pytest
from PIL import Image
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

from loadtest.load import examples
from loadtest.load.examples import Examples, grpc_request, http_request
from loadtest.load.locust_users import Job, Traffic, answer_defect
from loadtest.load.workload import WORKLOADS, Workload
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


def test_two_inputs_get_different_texts():
    pairs = config(("question", "TYPE_STRING", ["1"]), ("context", "TYPE_STRING", ["1"]))
    built = Examples.from_config(pairs, ["a", "b", "c"])
    assert [[(t.name, t.data[4:]) for t in request] for request in built.requests] == [
        [("question", question), ("context", context)]
        for question, context in ((b"a", b"b"), (b"b", b"c"), (b"c", b"a"))
    ]
    request = grpc_request("m", built.requests[0])
    assert (len(request.inputs), len(request.raw_input_contents), request.raw_input_contents[0][4:]) == (2, 2, b"a")
    assert list(request.inputs[0].shape) == [1, 1]
    body = http_request(built.requests[0])
    assert body.body[body.header_length :] == b"\x01\0\0\0a\x01\0\0\0b"


@pytest.mark.parametrize("tensor", [("input_ids", "TYPE_INT64", ["-1"]), ("seed", "TYPE_INT64", ["1"], True)])
def test_unsupported_inputs_raise_an_error(tensor):
    with pytest.raises(UserError, match=f"SYSTEM=m takes {tensor[0]}: load tests send texts and files only"):
        Examples.from_config(config(tensor), TEXTS)


@pytest.mark.parametrize("config", [TEXT, config(("image", "TYPE_FP32", ["-1", "-1", "3"]))], ids=["text", "image"])
def test_system_without_a_route_is_refused(config):
    with pytest.raises(UserError, match=r"^PROTOCOL=openai: OpenAI's API has no route for SYSTEM=m, .* set PROTOCOL="):
        gateway_job(config)


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
    areas = sorted(math.prod(Image.open(io.BytesIO(file), formats=["JPEG"]).size) for file in files)
    assert areas[0] < 10_000 and 900_000 < areas[-1] < 1_200_000
    assert all((tensor.name, tensor.shape) == ("image_bytes", [1, 1]) for (tensor,) in built.requests)


def test_model_without_files_gets_pixels():
    for (tensor,) in Examples.from_config(config(IMAGE), TEXTS).requests:
        pixels = np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)
        assert (tensor.shape[0], tensor.shape[3]) == (1, 3)
        assert 0 <= pixels.min() < pixels.max() <= 255


def test_fill_mask_texts_contain_the_mask(monkeypatch):
    tokenizer = TEXT | {"parameters": {"exactly_one": {"string_value": "<mask>"}}}
    monkeypatch.setattr(examples, "composing", lambda triton, system: {system: TEXT, "tokenizer": tokenizer})
    ((tensor,),) = Examples.from_server(Settings.load(), ["hello"]).requests
    assert tensor.data[4:] == b"<mask> hello"


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
        (
            "/v1/completions",
            {
                "model": "m",
                "prompt": "plain",
                "temperature": 0,
                "max_tokens": 7,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        ),
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
    (request,) = Traffic(job).requests
    head, _, content = request.partition(b"\r\n\r\n")
    assert head.startswith(f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:8080\r\n".encode())
    assert json.loads(content) == body


def test_load_goes_to_the_gateways_address_with_a_plain_key():
    digest = f"sha256:{'0' * 64}"
    job = gateway_job(KINDS["embedding"][0], API_KEYS=f"{digest} a-key-of-the-tests", TLS_CERT="c", GATEWAY_PORT="8443")
    assert (job.url, job.key) == ("https://127.0.0.1:8443", "a-key-of-the-tests")
    assert "a-key-of-the-tests" not in repr(job)
    with pytest.raises(UserError, match=r"^PROTOCOL=openai: API_KEYS has only digests"):
        gateway_job(KINDS["embedding"][0], API_KEYS=digest)


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
    assert answer_defect("embedding", content) == defect


@pytest.mark.parametrize(
    ("content", "is_whole"),
    [
        (b'data: {"choices": [{"text": "an \\"error\\": no"}]}\n\ndata: [DONE]\n\n', True),
        (b'data: {"choices": [{"text": "a"}]}\n\n', False),
        (b'data: {"error": {"message": "gone"}}\n\ndata: [DONE]\n\n', False),
    ],
)
def test_stream_that_is_not_whole_counts_as_failed(content, is_whole):
    assert (answer_defect("generation", content) == "") == is_whole


def job(seed):
    return Job("http", "http://127.0.0.1:1", "embedding", Examples.from_config(TEXT, TEXTS).requests, (0.0, 0.0), seed)


def test_users_in_workers_have_the_random_streams_of_their_seed():
    def streams(count, *worker_of, seed=1):
        traffic = Traffic(job(seed), *worker_of)
        return [traffic.new_random().random() for _ in range(count)]

    alone, first, second = streams(5), streams(3, 0, 2), streams(2, 1, 2)
    assert len(set(alone)) == 5
    assert alone == [first[0], second[0], first[1], second[1], first[2]]
    assert not set(alone) & set(streams(5, seed=2))


@pytest.mark.parametrize(
    ("changes", "generates", "expected"),
    [
        ({}, False, (0, 300, 3, (0.1, 0.4), 8)),
        ({"USERS": "5", "WAIT": "0.5", "MAX_BATCH": "2"}, False, (0, 5, 3, (0.5, 0.5), 2)),
        ({"RATE": "20"}, True, (20, 256, 100, (0, 0), 8)),  # the users are a pool without a pace
        ({"RATE": "20", "USERS": "5"}, False, (20, 5, 100, (0, 0), 8)),
        ({"WORKLOAD": "mixed"}, False, (0, 32, None, (0, 0), None)),
        ({"WORKLOAD": "mixed"}, True, (0, 8, None, (0, 0), None)),
        ({"WORKLOAD": "mixed", "USERS": "40"}, True, (0, 40, None, (0, 0), None)),
        ({}, True, (0, 300, 3, (0.1, 0.4), 8)),
    ],
)
def test_settings_override_the_workload(changes, generates, expected):
    settings = Settings(PUBLISHED | changes | {"ARRIVALS": "constant"})
    workload = Workload.from_settings(settings, generates)
    assert (workload.rate, workload.users, workload.spawn_rate, workload.wait, workload.max_batch) == expected
    job = Job.from_settings(settings, workload, Examples.from_config(TEXT, TEXTS))
    assert (job.rate, job.arrivals) == (expected[0], "constant")


PUBLISHED = Settings.load() | dict.fromkeys(("USERS", "WAIT", "MAX_BATCH", "RATE", "SPAWN_RATE"), "")
PUBLISHED |= {"WORKLOAD": "published"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"WAIT": wrong}, "WAIT=") for wrong in ("a", "1,2,3", "2,1", "-1")),
        *(
            ({"RATE": "20", name: "1"}, f"RATE=20: requests arrive at this rate, whatever users do; clear {name}")
            for name in ("WAIT", "SPAWN_RATE")
        ),
    ],
)
def test_wrong_load_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        Workload.from_settings(Settings(PUBLISHED | changes))
