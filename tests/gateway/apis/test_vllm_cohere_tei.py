"""Routes that name no system, lists in the form of a client, and steps of ensembles. The rest is conformance/apis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gateway.edge.config import Config, Limits
from tests.support.gateway import RunningGateway, gateway_before, running_gateway
from tests.support.triton_stand_in import Model, TritonStandIn, classifier, embedding, generator, ids_of, reranker


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[RunningGateway, TritonStandIn]]:
    models = embedding(), reranker(), classifier(), generator(), embedding("prompted")
    with gateway_before(*models, limits=Limits(texts=10)) as served:
        yield served


def gateway_serving(triton: TritonStandIn, *systems: str) -> Any:
    return running_gateway(Config(triton=triton.address, systems=systems))


def test_errors_of_a_shared_path_have_the_form_of_the_body(gateway: RunningGateway) -> None:
    wrong = {"query": "a", "colour": "red"}
    expected = {"error": "Unknown parameter: 'colour'.", "error_type": "Validation"}
    assert gateway.post("/rerank", wrong | {"texts": ["b"]}).json == expected
    assert gateway.post("/rerank", wrong | {"documents": ["b"]}).error["param"] == "colour"


CLIENTS = {
    "cohere": {"x_fern_sdk_name": "cohere"},
    "anthropic": {"anthropic_version": "2023-06-01"},
    "hugging_face": {"user_agent": "unknown/None; hf_hub/2.4.0; python/3.12"},
}


@pytest.mark.parametrize(
    ("path", "client", "keys"),
    [
        ("/v2/nothing", None, {"message"}),
        ("/v1/nothing", "cohere", {"message"}),
        ("/v1/messages/batches", None, {"type", "error"}),
        ("/v1/nothing", "anthropic", {"type", "error"}),
        ("/models/embedding/nothing", None, {"error", "error_type"}),
        ("/nothing", "hugging_face", {"error", "error_type"}),
        ("/v1/nothing", None, {"error"}),
        ("/v1/models/nobody", "cohere", {"message"}),
        ("/v1/models/nobody", "anthropic", {"type", "error"}),
    ],
)
def test_unknown_path_has_the_form_of_the_clients_api(gateway: RunningGateway, path, client, keys) -> None:
    reply = gateway.get(path, **CLIENTS.get(client, {}))
    assert (reply.status, reply.json.keys()) == (404, keys)


def test_models_are_listed_in_the_form_of_the_client(gateway: RunningGateway) -> None:
    listed = gateway.get("/v1/models", **CLIENTS["anthropic"]).json
    assert (listed["has_more"], listed["first_id"], len(listed["data"])) == (False, "embedding", 5)
    first = gateway.get("/v1/models/embedding", **CLIENTS["anthropic"]).json
    assert first == listed["data"][0]
    assert first.pop("created_at").endswith("Z")
    assert first == {"type": "model", "id": "embedding", "display_name": "embedding", "lifecycle": "active"}
    models = gateway.get("/v1/models", **CLIENTS["cohere"]).json["models"]
    assert models[:2] == [{"name": "embedding", "endpoints": ["embed"]}, {"name": "reranker", "endpoints": ["rerank"]}]
    (chat,) = gateway.get("/v1/models?endpoint=chat", **CLIENTS["cohere"]).json["models"]
    assert chat == gateway.get("/v1/models/counter", **CLIENTS["cohere"]).json


def test_step_of_an_ensemble_tokenizes() -> None:
    """Ask the step itself: from an ensemble, Triton would ask it for its other outputs, too."""
    whole, encoder = embedding(), embedding("encoder")
    del whole.outputs["tokenized"]
    steps = [{"model_name": "encoder", "model_version": -1}]
    whole.settings = {"platform": "ensemble", "ensemble_scheduling": {"step": steps}}
    with gateway_before(whole, encoder) as (gateway, triton):
        assert gateway.post("/tokenize", {"model": "embedding", "prompt": "a"}).json["tokens"] == ids_of("a")
        assert [(received.model, received.outputs) for received in triton.received] == [("encoder", ["tokenized"])]


def test_health_of_a_model(triton: TritonStandIn) -> None:
    with gateway_serving(triton, "embedding", "loads") as gateway:
        statuses = [gateway.get(f"/models/{name}/health").status for name in ("embedding", "loads", "nobody")]
        assert statuses == [200, 503, 404]


def test_info_names_the_kind_and_the_limits(gateway: RunningGateway) -> None:
    info = gateway.get("/models/embedding/info").json
    assert (info["model_id"], info["model_type"], info["max_input_length"]) == ("embedding", {"embedding": {}}, 256)
    assert info["max_client_batch_size"] == 10
    assert gateway.get("/models/reranker/info").json["model_type"] == {"reranker": {}}
    assert gateway.get("/models/classifier/info").json["model_type"] == {"classifier": {}}


def test_request_without_a_name_is_for_the_only_system(gateway: RunningGateway, triton: TritonStandIn) -> None:
    reply = gateway.post("/embed", {"inputs": "a"})
    expected = "/embed is answered by embedding, prompted. Name one in the address, such as /models/embedding/embed."
    assert (reply.status, reply.json["error"]) == (400, expected)
    with gateway_serving(triton, "embedding") as one:
        reply = one.post("/predict", {"inputs": "a"})
    expected = "No served system answers /predict: the page at / lists them."
    assert (reply.status, reply.json["error"]) == (404, expected)


def test_request_without_a_name_waits_for_the_system_that_loads(triton: TritonStandIn, monkeypatch: Any) -> None:
    monkeypatch.setattr("gateway.edge.outages.LIMIT_S", 0.1)
    with gateway_serving(triton, "embedding", "loads") as gateway:
        reply = gateway.post("/predict", {"inputs": "a"})
        assert (reply.status, reply.json["error_type"]) == (503, "Unhealthy")


def test_classifier_without_names_of_labels_is_refused() -> None:
    old: Model = classifier()
    old.parameters = {}
    with gateway_before(old) as (gateway, _):
        reply = gateway.post("/predict", {"inputs": "a"})
        assert (reply.status, "`make models`" in reply.json["error"]) == (400, True)
