"""Hugging Face's Inference API: files, descriptions of images, details and headers. The rest is conformance/apis."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from tritonclient.grpc.model_config_pb2 import ModelConfig

from gateway.apis.hugging_face import compute_type
from gateway.triton.served import System
from tests.conformance.apis.hugging_face import ENCODED
from tests.conformance.apis.models import IMAGE
from tests.conformance.apis.run import read_request
from tests.conformance.apis.world import INPUTS, PIPELINES, SEES
from tests.support import page_systems
from tests.support.gateway import Reply, RunningGateway, gateway_before
from tests.support.triton_stand_in import COUNTED, TritonStandIn, embedding, generator


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[RunningGateway, TritonStandIn]]:
    tasks = ("summarization", "image-text-to-text", "image-to-text", "keypoint-matching", "token-classification")
    models = [
        *page_systems.models(),
        *(page_systems.pipeline(task, task, PIPELINES[task]) for task in tasks),
        *(embedding("other"), generator(inputs=INPUTS), generator("streamer", INPUTS, streams=True)),
        generator("seer", SEES, pieces=COUNTED[:3]),
    ]
    with gateway_before(*models) as served:
        yield served


def send(gateway: RunningGateway, system: str, body: Any, kind: str = "application/json") -> Reply:
    return gateway.post(f"/models/{system}", body, content_type=kind)


def test_headers_have_the_time_and_the_characters(gateway: RunningGateway) -> None:
    headers = send(gateway, "summarization", {"inputs": "abc"}).headers
    assert (headers["x-compute-type"], headers["x-compute-characters"]) == ("cpu", "3")
    assert float(headers["x-compute-time"]) >= 0
    assert send(gateway, "other", {"inputs": ["ab", "c"]}).headers["x-compute-characters"] == "3"


@pytest.mark.parametrize("kind", ["image/png", "application/octet-stream", ""])
def test_file_is_the_whole_body(gateway: RunningGateway, kind: str) -> None:
    assert send(gateway, "pets", IMAGE, kind).json[0]["score"] == pytest.approx(0.83)


def test_question_about_an_image_becomes_a_chat(gateway: RunningGateway, triton: TritonStandIn) -> None:
    assert send(gateway, "image-text-to-text", IMAGE, "image/png").json == [{"generated_text": "a cat"}]
    body = {"inputs": ENCODED, "image": ENCODED, "question": "What is it?", "parameters": {"top_k": 2}}
    assert send(gateway, "image-text-to-text", body).json == [{"answer": "a cat"}]
    sent = read_request(triton.received[-1])
    (message,) = json.loads(sent["text"][0])
    assert message["content"] == [{"type": "image", "image": ENCODED}, {"type": "text", "text": "What is it?"}]
    assert "top_k" not in sent["parameters"]


@pytest.mark.parametrize("system", ["image-text-to-text", "image-to-text", "seer"])
def test_description_has_the_form_that_the_client_takes(gateway: RunningGateway, system: str) -> None:
    (described,) = send(gateway, system, IMAGE, "image/png").json
    assert described["generated_text"]
    options = {"content_type": "image/png", "user_agent": "@huggingface/inference/4.13.30 Node.js/20"}
    assert gateway.post(f"/models/{system}", IMAGE, **options).json == described


def test_systems_without_another_route_are_listed_and_named_by_their_address(gateway: RunningGateway) -> None:
    listed = {model["id"] for model in gateway.get("/v1/models").json["data"]}
    assert listed >= {"summarization", "keypoint-matching", "names", "answers", "mask", "pets", "other"}
    assert "tensors" not in listed
    error = gateway.post("/v1/completions", {"model": "summarization", "prompt": "a"}).error
    assert error["message"].endswith("It answers /models/summarization.")


@pytest.mark.parametrize(("engine", "expected"), [("KIND_GPU", "gpu"), ("KIND_CPU", "cpu")])
def test_system_computes_where_the_models_that_it_calls_do(engine: str, expected: str) -> None:
    kinds = {"mychat": "KIND_CPU", "mychat_stream": engine}
    configs = {name: ParseDict({"instance_group": [{"kind": kind}]}, ModelConfig()) for name, kind in kinds.items()}
    assert compute_type(System("mychat", configs)) == expected


@pytest.mark.parametrize("body", [b"{", b"[]"])
def test_body_that_is_not_the_right_json_is_refused(gateway: RunningGateway, body: bytes) -> None:
    assert send(gateway, "summarization", body).status == 400


@pytest.mark.parametrize(
    ("system", "kind", "status"), [("summarization", "image/png", 400), ("other", "", 400), ("pets", "text/plain", 415)]
)
def test_file_of_a_wrong_kind_is_refused(gateway, triton, system, kind, status) -> None:
    assert send(gateway, system, IMAGE, kind).status == status
    assert not triton.received


def test_generator_continues_a_text(gateway: RunningGateway, triton: TritonStandIn) -> None:
    body = {"inputs": "a", "parameters": {"max_new_tokens": 2, "details": True}}
    (answer,) = send(gateway, "counter", body).json
    assert answer["generated_text"] == " ein zwei"
    assert (answer["details"]["finish_reason"], len(answer["details"]["tokens"])) == ("length", 2)
    assert triton.received[-1].inputs["temperature"].array().item() == 0


def test_completions_take_the_parameters_of_the_client_for_javascript(gateway, triton) -> None:
    parameters = {"max_tokens": 2, "do_sample": False, "return_full_text": True}
    body = {"model": "http://elsewhere", "prompt": "a", "stream": True, **parameters}
    reply = gateway.post("/models/streamer/v1/completions", body)
    *events, end = [line.removeprefix("data: ") for line in reply.body.decode().split("\n\n") if line]
    assert end == "[DONE]"
    first, last = map(json.loads, events)
    assert [event["token"]["text"] for event in (first, last)] == ["a ein", " zwei"]
    assert [event["choices"][0]["text"] for event in (first, last)] == ["a ein", " zwei"]
    assert (first["generated_text"], last["generated_text"]) == (None, "a ein zwei")
    assert (last["details"]["finish_reason"], last["choices"][0]["finish_reason"]) == ("length", "length")
    assert triton.received[-1].inputs["temperature"].array().item() == 0
