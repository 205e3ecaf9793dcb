"""POST /v1/rerank and /v1/classify, with a stand-in for Triton."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gateway.config import Config, Limits
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.triton_stand_in import Model, TritonStandIn, classifier, reranker

DOCUMENTS = ["nothing", "a red house", "red", "house and home"]


@pytest.fixture(scope="module")
def triton() -> Iterator[TritonStandIn]:
    models = reranker(max_batch=3), classifier(max_batch=3), pair_classifier(), instructed_reranker()
    with TritonStandIn(*models) as stand_in:
        yield stand_in


@pytest.fixture(scope="module")
def gateway(triton: TritonStandIn) -> Iterator[RunningGateway]:
    config = Config(triton=triton.address, systems=tuple(triton.models), limits=Limits(texts=10))
    with running_gateway(config) as running:
        yield running


@pytest.fixture(autouse=True)
def forget_requests(triton: TritonStandIn) -> None:
    triton.received.clear()


def pair_classifier() -> Model:
    model = classifier("pairs")
    model.inputs["text_pair"] = ("STRING", [1])
    return model


def instructed_reranker() -> Model:
    model = reranker("instructed", max_batch=3)
    model.inputs["prompt"] = ("STRING", [1])
    return model


def rerank(gateway: RunningGateway, **fields: Any) -> Any:
    body = {"model": "reranker", "query": "red house", "documents": DOCUMENTS}
    return gateway.post("/v1/rerank", body | fields)


def classify(gateway: RunningGateway, input: Any, model: str = "classifier") -> Any:
    return gateway.post("/v1/classify", {"model": model, "input": input})


def test_documents_are_sorted_by_relevance(gateway: RunningGateway) -> None:
    answer = rerank(gateway).json
    assert answer.pop("id").startswith("rerank-")
    tokens = sum(2 + len(document.split()) + 2 for document in DOCUMENTS)
    assert answer == {
        "model": "reranker",
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "results": [
            {"index": 1, "relevance_score": 1.0, "document": {"text": DOCUMENTS[1]}},
            {"index": 2, "relevance_score": 0.5, "document": {"text": DOCUMENTS[2]}},
            {"index": 3, "relevance_score": 0.5, "document": {"text": DOCUMENTS[3]}},
            {"index": 0, "relevance_score": 0.0, "document": {"text": DOCUMENTS[0]}},
        ],
    }


def test_instruction_goes_with_every_pair(gateway: RunningGateway, triton: TritonStandIn) -> None:
    rerank(gateway, model="instructed", documents=DOCUMENTS[:2], instruction="Find houses")
    assert triton.received[0].inputs["prompt"].texts() == ["Find houses"] * 2
    refusal = rerank(gateway, instruction="Find houses")
    assert refusal.status == 400
    assert refusal.json["error"]["message"] == "The model 'reranker' takes no instruction."


def test_query_goes_with_every_part_of_the_documents(gateway: RunningGateway, triton: TritonStandIn) -> None:
    rerank(gateway)
    parts = sorted((received.inputs for received in triton.received), key=lambda inputs: -inputs["text"].shape[0])
    assert [part["text"].texts() for part in parts] == [DOCUMENTS[:3], DOCUMENTS[3:]]
    assert [part["query"].texts() for part in parts] == [["red house"] * 3, ["red house"]]


def test_top_n_keeps_the_best(gateway: RunningGateway) -> None:
    assert [result["index"] for result in rerank(gateway, top_n=2).json["results"]] == [1, 2]
    assert len(rerank(gateway, top_n=100).json["results"]) == 4


def test_documents_are_left_out_on_request(gateway: RunningGateway) -> None:
    assert "document" not in rerank(gateway, return_documents=False).json["results"][0]


def test_documents_may_be_objects(gateway: RunningGateway) -> None:
    answer = rerank(gateway, documents=[{"text": "red"}, "red house"]).json
    assert [result["document"]["text"] for result in answer["results"]] == ["red house", "red"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": ""}, "query"),
        ({"query": None}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": "a"}, "documents"),
        ({"documents": ["a", ""]}, "documents[1]"),
        ({"documents": ["a", {"text": ""}]}, "documents[1]"),
        ({"documents": ["a", {}]}, "documents[1].text"),
        ({"documents": ["a", 3]}, "documents[1]"),
        ({"documents": ["a"] * 11}, "documents"),
        ({"top_n": 0}, "top_n"),
        ({"max_tokens_per_doc": 5}, "max_tokens_per_doc"),
        ({"model": "classifier"}, "model"),
    ],
)
def test_wrong_field_of_rerank_is_named(
    gateway: RunningGateway, triton: TritonStandIn, fields: dict[str, Any], param: str
) -> None:
    reply = rerank(gateway, **fields)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert not triton.received


def test_texts_get_labels_and_probabilities(gateway: RunningGateway) -> None:
    answer = classify(gateway, ["good", "bad", "bad", "so good"]).json
    assert answer.pop("id").startswith("classify-")
    assert answer.pop("created") > 1_700_000_000
    assert [item["label"] for item in answer["data"]] == ["positive", "negative", "negative", "positive"]
    assert answer["data"][1] == {"index": 1, "label": "negative", "probs": [0.75, 0.25], "num_classes": 2}
    assert answer["usage"] == {"prompt_tokens": 13, "total_tokens": 13, "completion_tokens": 0}


def test_one_text_may_be_a_string(gateway: RunningGateway) -> None:
    assert [item["label"] for item in classify(gateway, "good").json["data"]] == ["positive"]


def test_pairs_of_texts_reach_both_inputs(gateway: RunningGateway, triton: TritonStandIn) -> None:
    classify(gateway, [["a", "b"], "c"], "pairs")
    (received,) = triton.received
    assert received.inputs["input_text"].texts() == ["a", "c"]
    assert received.inputs["text_pair"].texts() == ["b", ""]


@pytest.mark.parametrize(
    ("input", "param"),
    [
        ("", "input"),
        ([], "input"),
        (["a", ""], "input[1]"),
        (["a"] * 11, "input"),
        ([["a", "b"]], "input"),
        ([["a", "b", "c"]], "input[0]"),
        ([1], "input[0]"),
    ],
)
def test_wrong_input_of_classify_is_named(
    gateway: RunningGateway, triton: TritonStandIn, input: Any, param: str
) -> None:
    reply = classify(gateway, input)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert not triton.received
