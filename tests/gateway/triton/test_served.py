"""The systems that the gateway serves while Triton loads, unloads and restarts; Triton is a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.edge import outages
from gateway.edge.config import Config
from tests.support.gateway import RunningGateway, gateway_before, running_gateway
from tests.support.triton_stand_in import Failure, Model, TritonStandIn, classifier, embedding, reranker
from triton_transformers.ports import free_ports

BODY = {"model": "embedding", "input": ["a", "b", "c", "d", "e"]}


def other() -> Model:
    return Model("vision", {"image": ("FP32", [-1])}, {"pooler_output": ("FP32", [4])}, lambda inputs: [])


def generator(name: str, decoupled: bool = False) -> Model:
    inputs = {"text_input": ("STRING", [-1]), "max_new_tokens": ("INT32", [1])}
    return Model(name, inputs, {"text_output": ("STRING", [-1])}, lambda inputs: [], 0, decoupled)


@pytest.fixture(scope="module")
def triton() -> Iterator[TritonStandIn]:
    texts = generator("mistral7b"), generator("mistral7b_stream", decoupled=True), generator("gpt2_generate")
    with TritonStandIn(embedding(), embedding("encoder"), reranker(), classifier(), other(), *texts) as stand_in:
        yield stand_in


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serving") / "requested"
    path.write_text("embedding\nreranker\nclassifier\nvision\nmistral7b\ngpt2_ensemble\nabsent\n")
    return path


@pytest.fixture(scope="module")
def gateway(triton: TritonStandIn, file: Path) -> Iterator[RunningGateway]:
    with running_gateway(Config(triton=triton.address, systems_file=file)) as running:
        yield running


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the gateway report an outage at once."""
    monkeypatch.setattr(outages, "LIMIT_S", 0)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the gateway ask Triton for each request."""
    monkeypatch.setattr("gateway.triton.served.CACHED_S", 0)


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the gateway ask Triton once, however long the test takes."""
    monkeypatch.setattr("gateway.triton.served.CACHED_S", 3600)


def models(gateway: RunningGateway) -> list[str]:
    return [model["id"] for model in gateway.get("/v1/models").json["data"]]


def test_requests_do_not_wait_for_a_server_that_loads_a_model(
    triton: TritonStandIn, gateway: RunningGateway, fresh: None
) -> None:
    assert gateway.post("/v1/embeddings", BODY).status == 200
    triton.answers_about_models.clear()
    try:
        assert gateway.post("/v1/embeddings", BODY).status == 200
        assert gateway.post("/v1/embeddings", BODY).status == 200
    finally:
        triton.answers_about_models.set()


def test_list_has_the_loaded_systems_that_a_route_answers_for(gateway: RunningGateway) -> None:
    assert models(gateway) == ["embedding", "reranker", "classifier", "mistral7b", "gpt2_generate"]
    model = gateway.get("/v1/models/embedding").json
    assert model.pop("created") > 1_700_000_000
    assert model == {"id": "embedding", "object": "model", "owned_by": "triton-transformers"}


def test_other_model_is_not_found(gateway: RunningGateway) -> None:
    for name in ("nothing", "vision", "encoder", "a/b", "%2e%2e", "mistral7b_stream"):
        reply = gateway.get(f"/v1/models/{name}")
        assert (name, reply.status, reply.error["code"]) == (name, 404, "model_not_found")
    for model, endpoint in (("reranker", "/v1/rerank"), ("mistral7b", "/v1/completions"), ("vision", "/try/vision")):
        error = gateway.post("/v1/embeddings", BODY | {"model": model}).error
        assert error["code"] == "model_not_supported"
        assert f"does not support this endpoint. It answers {endpoint}" in error["message"]


def test_system_that_is_not_loaded_is_not_ready(gateway: RunningGateway) -> None:
    for reply in gateway.post("/v1/embeddings", BODY | {"model": "absent"}), gateway.get("/v1/models/absent"):
        assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "model_not_ready", "1")


def test_systems_follow_the_file(gateway: RunningGateway, file: Path, fresh: None) -> None:
    before = file.read_text()
    file.write_text("encoder\n")
    try:
        assert models(gateway) == ["encoder"]
        assert gateway.get("/v1/models/absent").status == 404
    finally:
        file.write_text(before)
        models(gateway)  # forget the list of this test


DAMAGED = [b"\xff\xfe\x00 embedding", bytes(64), b'{"a": [', b"../../etc\n"]


def test_damaged_file_changes_nothing(gateway: RunningGateway, file: Path, fresh: None) -> None:
    before = file.read_bytes()
    served = models(gateway)
    try:
        for content in DAMAGED:
            file.write_bytes(content)
            assert models(gateway) == served
            assert gateway.post("/v1/embeddings", BODY).status == 200
    finally:
        file.write_bytes(before)


@pytest.mark.parametrize("content", [*DAMAGED, None])
def test_gateway_that_starts_with_a_damaged_file_says_so(
    triton: TritonStandIn, tmp_path: Path, content: bytes | None, fresh: None
) -> None:
    file = tmp_path / "requested"
    if content is not None:
        file.write_bytes(content)
    with running_gateway(Config(triton=triton.address, systems_file=file)) as gateway:
        for reply in gateway.post("/v1/embeddings", BODY), gateway.get("/v1/models"), gateway.get("/"):
            assert (reply.status, reply.headers["retry-after"]) == (503, "1")
            assert "`make up` writes it again" in reply.error["message"]
        file.write_text("embedding\n")
        assert gateway.post("/v1/embeddings", BODY).status == 200


def test_configuration_is_read_once_for_many_requests(cached: None) -> None:
    reads = []

    class Counting(TritonStandIn):
        def ModelConfig(self, request: Any, context: Any) -> Any:
            reads.append(request.name)
            return super().ModelConfig(request, context)

    with (
        Counting(embedding()) as triton,
        running_gateway(Config(triton=triton.address, systems=("embedding",))) as gateway,
    ):
        for _ in range(5):
            assert gateway.post("/v1/embeddings", BODY).status == 200
    assert reads == ["embedding"]


def test_request_is_split_again_if_the_batch_shrank(
    gateway: RunningGateway, triton: TritonStandIn, cached: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gateway.post("/v1/embeddings", BODY).status == 200
    monkeypatch.setattr(triton.models["embedding"], "max_batch", 2)
    triton.received.clear()
    reply = gateway.post("/v1/embeddings", BODY)
    assert (reply.status, len(reply.json["data"])) == (200, 5)
    assert sorted(received.inputs["input_text"].shape[0] for received in triton.received) == [1, 2, 2, 5]


@pytest.mark.parametrize(
    ("unloaded", "path", "body"),
    [
        ("embedding", "/v1/embeddings", BODY),
        ("mistral7b_stream", "/v1/completions", {"model": "mistral7b", "prompt": "a", "stream": True}),
    ],
)
def test_unloaded_system_is_not_ready(gateway, triton, cached, monkeypatch, unloaded, path, body) -> None:
    assert gateway.post(path, body).status == 200  # and the gateway knows the system
    monkeypatch.delitem(triton.models, unloaded)
    reply = gateway.post(path, body)
    assert (reply.status, reply.error["code"]) == (503, "model_not_ready")


def test_requested_stream_that_is_not_loaded_yet_is_not_ready(
    gateway: RunningGateway, triton: TritonStandIn, file: Path, fresh: None
) -> None:
    """After a restart, Triton loads a system before the one that streams its texts."""
    before = file.read_text()
    model = triton.models.pop("mistral7b_stream")
    body = {"model": "mistral7b", "prompt": "a", "stream": True}
    try:
        assert gateway.post("/v1/completions", body).status == 400
        file.write_text(f"{before}mistral7b_stream\n")
        reply = gateway.post("/v1/completions", body)
    finally:
        triton.models["mistral7b_stream"] = model
        file.write_text(before)
        assert gateway.post("/v1/completions", body).status == 200  # forget the list and the answers of this test
    assert (reply.status, reply.error["code"]) == (503, "model_not_ready")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (grpc.StatusCode.UNAVAILABLE, 503),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 503),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 504),
        (grpc.StatusCode.INTERNAL, 500),
        (grpc.StatusCode.UNKNOWN, 500),
        (grpc.StatusCode.CANCELLED, 500),
    ],
)
def test_failure_of_triton_keeps_its_secrets(
    gateway: RunningGateway, triton: TritonStandIn, code: grpc.StatusCode, status: int, caplog: Any, monkeypatch: Any
) -> None:
    def fail(inputs: Any) -> Any:
        raise Failure(code, "a secret of the server")

    monkeypatch.setattr(triton.models["classifier"], "answer", fail)
    reply = gateway.post("/v1/classify", {"model": "classifier", "input": "a"}, x_request_id="my-id")
    assert (reply.status, reply.error["type"]) == (status, "server_error")
    assert "secret" not in reply.error["message"]
    gateway.get("/health")  # so that the failure is logged
    (record,) = caplog.records
    assert record.getMessage() == f"request my-id: /v1/classify was answered with {status} (Triton: {code.name})"


def test_gateway_recovers_when_triton_restarts() -> None:
    (port,) = free_ports(1)
    with running_gateway(Config(triton=f"127.0.0.1:{port}", systems=("embedding",))) as gateway:
        for _ in range(2):
            reply = gateway.post("/v1/embeddings", BODY)
            assert (reply.status, reply.headers["retry-after"]) == (503, "1")
            assert gateway.get("/v1/models").status == 503
            with TritonStandIn(embedding(), port=port):
                gateway.wait_until(lambda: gateway.post("/v1/embeddings", BODY).status == 200)


def test_request_in_flight_gets_503_if_triton_ends() -> None:
    model = embedding()
    with gateway_before(model) as (gateway, triton):
        model.gate.clear()
        with gateway.sent("POST", "/v1/embeddings", BODY) as response:
            triton.wait_until(lambda: bool(triton.running))
            triton.stop()
            assert response().status == 503
