"""Triton's own client library works unchanged: each way to send a request, model control, and shared memory."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.support.stacks import KEY, TestStack
from tests.support.triton_clients import IDS, connect, exchange_over_shared_memory, ids_input

# The header that carries the admin key has a longer name over gRPC.
HEADERS = {httpclient: {"triton-admin-key": KEY}, grpcclient: {"triton-grpc-protocol-triton-admin-key": KEY}}


@pytest.fixture(scope="module")
def lookup(stack: TestStack) -> TestStack:
    """Return the shared stack, with a model that maps `ids` to equal numbers `row`."""
    stack.triton.load("lookup")
    return stack


@pytest.fixture(params=[httpclient, grpcclient], ids=["http", "grpc"])
def library(request) -> ModuleType:
    return request.param


@pytest.fixture
def client(lookup, library) -> Iterator:
    with connect(lookup, library) as connected:
        yield connected


def test_sequences_reach_the_model(lookup, client, library):
    """Let Triton mark the first request of each of two sequences, which are sent in turn."""
    lookup.triton.load("sequence")
    sums = []
    for number in range(3):
        for sequence in (7, 8):
            tensor = library.InferInput("number", [1, 1], "INT32")
            tensor.set_data_from_numpy(np.array([[number]], np.int32))
            flags = {"sequence_start": number == 0, "sequence_end": number == 2}
            answer = client.infer("sequence", [tensor], sequence_id=sequence, **flags)
            sums.append(answer.as_numpy("sum").item())
    assert sums == [100, 100, 1, 1, 2, 2]


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_request_is_answered(client, library, algorithm):
    name = "request_compression_algorithm" if library is httpclient else "compression_algorithm"
    answer = client.infer("lookup", [ids_input(library)], **{name: algorithm})
    assert answer.as_numpy("row").tolist() == IDS.tolist()


def test_answers_of_a_stream_keep_their_order(lookup):
    answers: queue.Queue = queue.Queue()
    with connect(lookup, grpcclient) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for row in IDS:
            client.async_stream_infer("lookup", [ids_input(grpcclient, row[None])])
        received = [answers.get(timeout=120) for _ in IDS]
    assert [error for _, error in received] == [None] * len(IDS)
    assert np.concatenate([result.as_numpy("row") for result, _ in received]).tolist() == IDS.tolist()


def test_texts_are_answered_alike_over_both_protocols(lookup):
    texts = np.array([[b"Which battery fits?"], ["비 그친 뒤".encode()]], np.object_)
    vectors = []
    for library in (httpclient, grpcclient):
        tensor = library.InferInput("input_text", list(texts.shape), "BYTES")
        tensor.set_data_from_numpy(texts)
        with connect(lookup, library) as client:
            vectors.append(client.infer("embedding", [tensor]).as_numpy("output__0"))
    assert vectors[0].shape == (2, 384)
    np.testing.assert_allclose(*vectors, atol=1e-5)


def test_health_metadata_and_statistics_are_open(client, library):
    options = {} if library is httpclient else {"as_json": True}
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("lookup")
    assert client.get_server_metadata(**options)["name"] == "triton"
    assert client.get_model_metadata("lookup", **options)["inputs"][0]["name"] == "ids"
    config = client.get_model_config("lookup", **options)
    assert config.get("config", config)["max_batch_size"] == 32
    assert client.get_inference_statistics("lookup", **options)["model_stats"][0]["name"] == "lookup"


@pytest.mark.parametrize("library", [httpclient, grpcclient], ids=["http", "grpc"])
def test_encrypted_connection_is_refused(lookup, library):
    """Serve no TLS: docs/install.md names a proxy for that."""
    with connect(lookup, library, ssl=True) as client, pytest.raises((InferenceServerException, OSError)):
        client.is_server_live() if library is httpclient else client.infer("lookup", [ids_input(library)])


# --- the restricted endpoints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.get_model_repository_index(),
        lambda client: client.load_model("lookup"),
        lambda client: client.unload_model("lookup"),
        lambda client: client.get_system_shared_memory_status(),
        lambda client: client.update_log_settings({"log_info": False}),
        lambda client: client.get_trace_settings(),
    ],
    ids=["index", "load", "unload", "shared memory", "logging", "trace"],
)
def test_restricted_endpoint_needs_the_key(client, library, call):
    (header,) = HEADERS[library]
    with pytest.raises(InferenceServerException, match=f"restricted, expecting header '{header}'"):
        call(client)
    assert client.is_model_ready("lookup")


def test_model_control_with_the_key(client, library):
    headers = HEADERS[library]
    client.unload_model("fixed", headers=headers)
    client.load_model("fixed", headers=headers)
    assert client.is_model_ready("fixed")
    client.load_model("lookup", headers=headers, config='{"max_batch_size": "16"}')
    try:
        config = client.get_model_config("lookup", **({} if library is httpclient else {"as_json": True}))
        assert config.get("config", config)["max_batch_size"] == 16
    finally:
        client.load_model("lookup", headers=headers)
    with pytest.raises(InferenceServerException, match="failed to load"):
        client.load_model("wrong_model_name", headers=headers)


def test_shared_memory_with_the_key(client, library):
    assert exchange_over_shared_memory(client, library, HEADERS[library]).tolist() == IDS.tolist()
