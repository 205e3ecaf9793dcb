"""Hugging Face's Inference API: what the gateway reads, sends to Triton, and refuses."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.edge.config import Config
from tests.support import page_systems
from tests.support.gateway import Reply, RunningGateway, running_gateway
from tests.support.triton_stand_in import COUNTED, GENERATION_INPUTS, TritonStandIn, embedding, generator
from triton_transformers.tasks.media import png

IMAGE = png(1, 64, 48)
ENCODED = base64.b64encode(IMAGE).decode()
SOUND = base64.b64encode(b"RIFF").decode()
OPTIONS = {**GENERATION_INPUTS, "sampling_parameters": ("STRING", [1])}
ANSWERS: dict[str, Any] = {
    "zero-shot-classification": {"sequence": "a", "labels": ["x", "y"], "scores": [0.9, 0.1]},
    "zero-shot-image-classification": [{"label": "x", "score": 0.9}],
    "automatic-speech-recognition": {"text": "Hello"},
    "text-to-audio": {"audio": SOUND, "sampling_rate": 16000},
    "table-question-answering": {"answer": "36"},
    "text-classification": [{"label": "x", "score": 0.9}],
    "summarization": [{"summary_text": "b"}],
    "token-classification": [],
    "image-text-to-text": [{"generated_text": "a cat"}],
    "image-to-text": [{"generated_text": "a cat"}],
    "keypoint-matching": [],
}


@pytest.fixture(scope="module")
def triton() -> Iterator[TritonStandIn]:
    pipelines = [page_systems.pipeline(task, task, answer) for task, answer in ANSWERS.items()]
    generators = (
        generator(inputs=OPTIONS),
        generator("seer", OPTIONS | {"images": ("STRING", [-1])}, pieces=COUNTED[:3]),
        generator("streamer", OPTIONS, streams=True),
    )
    with TritonStandIn(*pipelines, *page_systems.models(), embedding("other"), *generators) as stand_in:
        yield stand_in


@pytest.fixture(scope="module")
def gateway(triton: TritonStandIn) -> Iterator[RunningGateway]:
    with running_gateway(Config(triton=triton.address, systems=tuple(triton.models))) as running:
        yield running


@pytest.fixture(autouse=True)
def forget_requests(triton: TritonStandIn) -> None:
    triton.received.clear()


def send(gateway: RunningGateway, system: str, body: Any, kind: str = "application/json") -> Reply:
    return gateway.post(f"/models/{system}", body, content_type=kind)


def columns(triton: TritonStandIn) -> dict[str, list[str]]:
    """Return the texts that the last request to Triton has."""
    return {name: t.texts() for name, t in triton.received[-1].inputs.items() if t.datatype == "BYTES"}


CALLS = [
    ("zero-shot-classification", {"inputs": "a", "parameters": {"candidate_labels": ["x", "y"]}},
     {"text": ["a"], "parameters": ['{"candidate_labels": ["x", "y"]}']},
     [{"label": "x", "score": 0.9}, {"label": "y", "score": 0.1}]),
    ("zero-shot-image-classification", {"inputs": ENCODED, "parameters": {"candidate_labels": ["x"]}},
     {"image": [ENCODED], "parameters": ['{"candidate_labels": ["x"]}']}, [{"label": "x", "score": 0.9}]),
    ("automatic-speech-recognition",
     {"inputs": SOUND, "parameters": {"return_timestamps": True, "generation_parameters": {"num_beams": 2}}},
     {"audio": [SOUND], "parameters": ['{"return_timestamps": true, "generate_kwargs": {"num_beams": 2}}']},
     {"text": "Hello"}),
    ("table-question-answering", {"inputs": {"table": {"a": ["1"]}, "query": "q"}, "parameters": {"model": "m"}},
     {"table": ['{"a": ["1"]}'], "query": ["q"], "parameters": ["{}"]}, {"aggregator": "NONE", "answer": "36"}),
    ("text-classification", {"inputs": "a", "options": {"wait_for_model": True}},
     {"text": ["a"], "parameters": ['{"top_k": null}']}, [[{"label": "x", "score": 0.9}]]),
    ("summarization", {"inputs": "a", "parameters": {"generate_parameters": {"max_new_tokens": 5}}},
     {"text": ["a"], "parameters": ['{"max_new_tokens": 5}']}, [{"summary_text": "b"}]),
    ("token-classification", {"inputs": "a"},
     {"text": ["a"], "parameters": ['{"aggregation_strategy": "simple"}']}, []),
    ("keypoint-matching", {"inputs": [ENCODED, ENCODED]},
     {"images": [json.dumps([ENCODED, ENCODED])], "parameters": ["{}"]}, []),
]  # fmt: skip


@pytest.mark.parametrize(("system", "body", "sent", "expected"), CALLS)
def test_pipeline_gets_its_fields_and_parameters(gateway, triton, system, body, sent, expected) -> None:
    reply = send(gateway, system, body)
    assert (reply.status, reply.json) == (200, expected)
    assert columns(triton) == sent


def test_headers_have_the_time_and_the_characters(gateway: RunningGateway) -> None:
    headers = send(gateway, "summarization", {"inputs": "abc"}).headers
    assert (headers["x-compute-type"], headers["x-compute-characters"]) == ("cpu", "3")
    assert float(headers["x-compute-time"]) >= 0
    assert send(gateway, "other", {"inputs": ["ab", "c"]}).headers["x-compute-characters"] == "3"


def test_text_becomes_a_file_of_sound(gateway: RunningGateway, triton: TritonStandIn) -> None:
    reply = send(gateway, "text-to-audio", {"inputs": "a", "parameters": {"do_sample": True}})
    assert (reply.headers["content-type"], reply.body) == ("audio/wav", b"RIFF")
    assert columns(triton)["parameters"] == ['{"generate_kwargs": {"do_sample": true}}']


@pytest.mark.parametrize("kind", ["image/png", "application/octet-stream", ""])
def test_file_is_the_whole_body(gateway: RunningGateway, kind: str) -> None:
    assert send(gateway, "pets", IMAGE, kind).json[0]["score"] == pytest.approx(0.83)


def test_question_about_an_image_becomes_a_chat(gateway: RunningGateway, triton: TritonStandIn) -> None:
    assert send(gateway, "image-text-to-text", IMAGE, "image/png").json == [{"generated_text": "a cat"}]
    body = {"inputs": ENCODED, "image": ENCODED, "question": "What is it?", "parameters": {"top_k": 2}}
    triton.received.clear()
    assert send(gateway, "image-text-to-text", body).json == [{"answer": "a cat"}]
    ((message,),) = map(json.loads, columns(triton)["text"])
    assert message["content"] == [{"type": "image", "image": ENCODED}, {"type": "text", "text": "What is it?"}]
    assert "top_k" not in columns(triton)["parameters"][0]


@pytest.mark.parametrize("system", ["image-text-to-text", "image-to-text", "seer"])
def test_description_has_the_form_that_the_client_takes(gateway: RunningGateway, system: str) -> None:
    (described,) = send(gateway, system, IMAGE, "image/png").json
    assert described["generated_text"]
    options = {"content_type": "image/png", "user_agent": "@huggingface/inference/4.13.30 Node.js/20"}
    assert gateway.post(f"/models/{system}", IMAGE, **options).json == described


def test_answer_about_an_image_has_its_probability(gateway: RunningGateway) -> None:
    (found,) = send(gateway, "seer", {"inputs": {"image": ENCODED, "question": "What is it?"}}).json
    assert found == {"answer": " ein zwei drei", "score": pytest.approx(math.exp(-1.5))}


def test_encoders_answer_with_the_apis_names(gateway: RunningGateway) -> None:
    text = "Marie Curie was born in Warsaw"
    first, _ = send(gateway, "names", {"inputs": text}).json
    assert (first["entity_group"], first["word"]) == ("PER", "Marie Curie")
    found = send(gateway, "answers", {"inputs": {"question": "Where?", "context": text}}).json
    assert (found["answer"], found["start"], found["end"]) == ("Warsaw", 24, 30)
    (best,) = send(gateway, "mask", {"inputs": "The [MASK].", "parameters": {"top_k": 1}}).json
    # The stand-in has a token for each character, of which the last one of the mask is taken for it.
    assert (best["token"], best["token_str"], best["sequence"]) == (7, "capital", "The [MASK\a.")


def test_systems_without_another_route_are_listed_and_named_by_their_address(gateway: RunningGateway) -> None:
    listed = {model["id"] for model in gateway.get("/v1/models").json["data"]}
    assert listed >= {"summarization", "keypoint-matching", "names", "answers", "mask", "pets", "other"}
    assert "tensors" not in listed
    error = gateway.post("/v1/completions", {"model": "summarization", "prompt": "a"}).error
    assert error["message"].endswith("It answers /models/summarization.")


# The parameters that LangChain's HuggingFaceEndpoint sends, without typical_p, which is 0.95 by default.
LANGCHAIN = {
    "max_new_tokens": 2, "top_k": 10, "top_p": 0.95, "temperature": 0.8, "repetition_penalty": None, "truncate": None,
    "return_full_text": False, "stop": [], "seed": None, "do_sample": False, "watermark": False,
}  # fmt: skip


@pytest.mark.parametrize("typical_p", [None, 1.0])
def test_generator_takes_the_parameters_of_langchain(gateway: RunningGateway, triton: TritonStandIn, typical_p) -> None:
    (answer,) = send(gateway, "counter", {"inputs": "a", "parameters": LANGCHAIN | {"typical_p": typical_p}}).json
    assert answer == {"generated_text": " ein zwei"}
    (options,) = columns(triton)["sampling_parameters"]
    assert json.loads(options) == {"top_k": 10}


REFUSED = [
    ("summarization", b"{", 400, "The body is not valid JSON"),
    ("summarization", {"parameters": {}}, 400, "Missing required parameter: 'inputs'"),
    ("summarization", {"inputs": 3}, 400, "'inputs.text' must be a text"),
    ("summarization", {"inputs": []}, 400, "'inputs' must not be empty"),
    ("summarization", {"inputs": "a", "colour": 1}, 400, "Unknown parameter: 'colour'"),
    ("summarization", {"inputs": "a", "stream": True}, 400, "does not stream"),
    ("table-question-answering", {"inputs": {"question": "q", "context": "c"}}, 400, "takes table, query"),
    ("zero-shot-image-classification", {"inputs": {"image": 1}}, 400, "'inputs.image' must be image in base64"),
    ("counter", {"inputs": "a", "parameters": {"max_new_tokens": 0}}, 400, "max_new_tokens"),
    ("summarization", {"inputs": "a", "parameters": {"generate_parameters": 1}}, 400, "must be an object"),
    ("pets", {"inputs": ENCODED, "parameters": {"top_k": "x"}}, 400, "top_k"),
    ("answers", {"inputs": {}, "parameters": {"doc_stride": 9}}, 400, "'doc_stride'"),
    ("counter", {"inputs": ["a"]}, 400, "'inputs' must be a text"),
    ("counter", {"inputs": "a", "parameters": {"typical_p": 0.95}}, 400, "'typical_p' is not supported here"),
    ("pets", {"inputs": "a text"}, 400, "'inputs' is not valid base64"),
    ("names", {"inputs": "a", "parameters": {"aggregation_strategy": "max"}}, 400, "'aggregation_strategy'"),
    ("answers", {"inputs": {"question": "a"}}, 400, "'inputs.context' must be a text"),
    ("nobody", {"inputs": "a"}, 404, "does not exist"),
]  # fmt: skip


@pytest.mark.parametrize(("system", "body", "status", "reason"), REFUSED)
def test_wrong_request_gets_the_reason(gateway, triton, system, body, status, reason) -> None:
    reply = send(gateway, system, body)
    assert (reply.status, reason in reply.json["error"]) == (status, True), reply.body
    assert not triton.received


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


def test_chat_is_answered_at_the_systems_own_address(gateway: RunningGateway, triton: TritonStandIn) -> None:
    schema = {"type": "object"}
    body = {"model": "dummy", "messages": [{"role": "user", "content": "Hi"}]}
    reply = gateway.post("/models/counter/v1/chat/completions", body | {"max_tokens": 1, "response_format": None})
    assert (reply.json["model"], reply.json["choices"][0]["message"]["content"]) == ("counter", " ein")
    triton.received.clear()
    gateway.post("/models/counter/v1/chat/completions", body | {"response_format": {"type": "json", "value": schema}})
    (options,) = columns(triton)["sampling_parameters"]
    assert json.loads(options)["structured_outputs"] == {"json": schema}
