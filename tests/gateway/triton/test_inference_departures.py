"""Clients that leave the gateway, on a Triton before 2.59, where the gateway must not cancel over gRPC."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from gateway.edge.config import Config, Limits
from gateway.triton import inference
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.triton_stand_in import GENERATION_INPUTS, WAIT_S, TritonStandIn, embedding, generator, refusal
from triton_transformers.tensors import Tensor

WITHOUT_CANCEL = {name: tensor for name, tensor in GENERATION_INPUTS.items() if name != "cancel"}
TEXTS = {"model": "embedding", "input": ["a text"] * 9}


@pytest.fixture
def triton() -> Iterator[TritonStandIn]:
    models = [embedding(), generator(), generator("counter_stream", streams=True)]
    with TritonStandIn(*models, generator("plain", WITHOUT_CANCEL)) as triton:
        triton.version = "2.51.0"
        yield triton


def gateway_over(triton: TritonStandIn, timeout: float = 60) -> Any:
    return running_gateway(Config(triton=triton.address, systems=tuple(triton.models), limits=Limits(timeout=timeout)))


def idle(gateway: RunningGateway, triton: TritonStandIn, model: str = "") -> None:
    """Let the model answer, and wait until no request holds a slot, and none to end a text is on its way."""
    if model:
        triton.models[model].gate.set()
    gateway.wait_until(lambda: gateway.app.counters.running == 0)
    triton.wait_until(lambda: not triton.running)


def leave(gateway: RunningGateway, triton: TritonStandIn, path: str, body: dict[str, Any], model: str) -> None:
    """Send a request that the model holds back, and leave."""
    triton.models[model].gate.clear()
    with gateway.sent("POST", path, body):
        triton.wait_until(lambda: triton.running == [model])


def test_request_goes_on_and_keeps_its_slot(triton: TritonStandIn) -> None:
    with gateway_over(triton) as gateway:
        leave(gateway, triton, "/v1/embeddings", TEXTS, "embedding")
        left = "gateway_requests_total", {"route": "/v1/embeddings", "code": "499"}
        gateway.wait_until(lambda: gateway.app.counters.registry.get_sample_value(*left) == 1)
        assert gateway.app.counters.running == 1
        idle(gateway, triton, "embedding")
    assert triton.cancelled == []
    assert len(triton.received) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_model_is_asked_to_end_the_text(triton: TritonStandIn, stream: bool) -> None:
    model = "counter_stream" if stream else "counter"
    with gateway_over(triton) as gateway:
        body = {"model": "counter", "prompt": "a secret", "stream": stream}
        leave(gateway, triton, "/v1/completions", body, model)
        triton.wait_until(lambda: len(triton.received) == 2)
        idle(gateway, triton, model)
    first, second = triton.received
    assert second.model == model
    texts = {name: tensor.texts() for name, tensor in second.inputs.items()}
    assert texts == {"text_input": [""], "cancel": [first.id]}
    assert triton.cancelled == []


def test_ids_of_requests_differ(triton: TritonStandIn) -> None:
    with gateway_over(triton) as gateway:
        for _ in range(2):
            assert gateway.post("/v1/completions", {"model": "counter", "prompt": "a"}).status == 200
    first, second = triton.received
    assert first.id and second.id and first.id != second.id


def test_model_without_the_input_is_not_asked(triton: TritonStandIn) -> None:
    with gateway_over(triton) as gateway:
        leave(gateway, triton, "/v1/completions", {"model": "plain", "prompt": "a"}, "plain")
        idle(gateway, triton, "plain")
    assert [request.id for request in triton.received] == [""]
    assert triton.cancelled == []


def test_model_is_asked_again_until_the_text_ends(triton: TritonStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another replica may get the question, or the model may get it before the text."""
    monkeypatch.setattr(inference, "ASK_AGAIN_S", 0.02)
    model = triton.models["counter"]
    answer = model.answer

    def answer_cancel_at_once(inputs: dict[str, Tensor]) -> Iterable[list[Tensor]]:
        if "cancel" not in inputs:
            assert hold.wait(WAIT_S)
        return answer(inputs)

    hold, model.answer = threading.Event(), answer_cancel_at_once
    with gateway_over(triton) as gateway:
        with gateway.sent("POST", "/v1/completions", {"model": "counter", "prompt": "a"}):
            triton.wait_until(lambda: triton.running == ["counter"])
        triton.wait_until(lambda: len(triton.received) >= 4)
        hold.set()
        idle(gateway, triton)
    assert triton.cancelled == []


def test_model_is_asked_while_triton_does_not_report_its_version(triton: TritonStandIn) -> None:
    """Triton does not report it while it loads a model."""
    triton.version = "2.72.0"
    with gateway_over(triton) as gateway:
        assert gateway.post("/v1/completions", {"model": "counter", "prompt": "a"}).status == 200
        triton.answers_about_models.clear()
        leave(gateway, triton, "/v1/completions", {"model": "counter", "prompt": "a"}, "counter")
        triton.wait_until(lambda: "cancel" in triton.received[-1].inputs)
        assert triton.cancelled == []
        triton.answers_about_models.set()
        idle(gateway, triton, "counter")


def test_texts_of_one_request_keep_one_slot(triton: TritonStandIn) -> None:
    triton.models["counter_stream"].gate.clear()
    with gateway_over(triton) as gateway:
        body = {"model": "counter", "prompt": ["a", "b", "c"], "stream": True}
        with gateway.sent("POST", "/v1/completions", body):
            triton.wait_until(lambda: len(triton.running) == 3)
        triton.wait_until(lambda: len(triton.running) == 6)
        assert gateway.app.counters.running == 1
        idle(gateway, triton, "counter_stream")
    assert triton.cancelled == []


@pytest.mark.parametrize("client_leaves", [False, True])
def test_request_that_triton_does_not_answer_in_time_is_not_cancelled(
    triton: TritonStandIn, client_leaves: bool
) -> None:
    with gateway_over(triton, timeout=2) as gateway:
        # This connects and reads the configurations, for which 2 s may be too short.
        gateway.wait_until(lambda: gateway.get("/v1/models").status == 200)
        triton.models["embedding"].gate.clear()
        if client_leaves:
            leave(gateway, triton, "/v1/embeddings", TEXTS, "embedding")
            gateway.wait_until(lambda: gateway.app.counters.running == 0)
        else:
            assert gateway.post("/v1/embeddings", TEXTS).status == 504
        assert triton.cancelled == [] and triton.running == ["embedding"]
        triton.models["embedding"].gate.set()
        triton.wait_until(lambda: not triton.running)


def test_failed_text_is_not_cancelled(triton: TritonStandIn) -> None:
    """Let it end by itself: at that moment, a cancellation would be most dangerous."""

    def fail(inputs: dict[str, Tensor]) -> Iterable[list[Tensor]]:
        raise refusal(400, "input 'text_input' is wrong", "text_input")

    triton.models["counter_stream"].answer = fail
    with gateway_over(triton) as gateway:
        assert gateway.post("/v1/completions", {"model": "counter", "prompt": "a", "stream": True}).status == 400
        idle(gateway, triton)
    assert triton.cancelled == []
    assert len(triton.received) == 1


def test_page_cannot_end_the_text_of_another(triton: TritonStandIn) -> None:
    with gateway_over(triton) as gateway:
        reply = gateway.post("/try/counter", {"inputs": {"text_input": "a", "cancel": "an id"}})
    assert reply.status == 400
    assert not triton.received
