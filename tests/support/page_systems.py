"""Stand-ins for the tests of the gateway's page: a system of each kind, and a Prometheus that has figures of them."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.edge import monitoring
from gateway.page import front
from tests.support.http_servers import Answer, script
from tests.support.triton_stand_in import (
    COUNTED,
    GENERATION_INPUTS,
    WAIT_S,
    Model,
    Signature,
    classifier,
    embedding,
    generator,
    read_rows,
    reranker,
    text_image,
    tokenized,
)
from triton_transformers.tasks.table import PIPELINE_TASKS
from triton_transformers.tensors import Tensor

HOSTILE = '<img src=x onerror="document.title=1">'
PIECES = [*COUNTED, f" {HOSTILE}"]
TEXT: Signature = {"input_text": ("STRING", [1])}
QUESTION: Signature = {"question": ("STRING", [1]), "context": ("STRING", [1])}
IMAGE: Signature = {"image": ("FP32", [-1, -1, 3]), "image_bytes": ("STRING", [1])}
# The systems that the page shows, in its order.
NAMES = (
    *("embedding", "reranker", "classifier", "writer", "names", "answers", "mask", "sparse", "images", "pets"),
    *("clip", "tensors", "absent"),
)


def models() -> list[Model]:
    """Return the models of a system of each kind."""
    return [
        *_ensemble(embedding(), _step("tokenizer", "tokenizer"), _step("encoder", "packed_onnx")),
        reranker(),
        classifier(),
        *(_writer(name, streams) for name, streams in (("writer", False), ("writer_stream", True))),
        _answering("names", TEXT, label=["PER", HOSTILE], score=[0.998, 0.97], start=[0, 24], end=[11, 30]),
        _answering("answers", QUESTION, answer=["Warsaw"], score=[0.93], start=[24], end=[30]),
        *_ensemble(
            _answering("mask", TEXT, token=["capital", HOSTILE], token_id=[7, 8], score=[0.9, 0.05]),
            _tokenizing("mask_encoder", exactly_one="[MASK]"),
        ),
        _answering("sparse", TEXT, token=["password", "reset"], token_id=[7, 8], weight=[2.5, 1.25]),
        _answering("images", IMAGE, pooler_output=[n / 500 for n in range(500)]),
        _answering("pets", IMAGE, label=[HOSTILE], score=[0.83], scores=[0.1, 0.83]),
        text_image(),
        _answering("tensors", {"x": ("FP32", [8])}, y=[1.0]),
    ]


def _ensemble(model: Model, *steps: Model) -> list[Model]:
    model.settings = {
        "platform": "ensemble",
        "ensemble_scheduling": {"step": [{"model_name": step.name, "model_version": -1} for step in steps]},
    }
    return [model, *steps]


def _step(name: str, backend: str) -> Model:
    settings = {"backend": backend, "dynamic_batching": {}}
    return Model(name, TEXT, {}, lambda inputs: [[]], settings=settings)


def _tokenizing(name: str, **parameters: str) -> Model:
    """Return a step that has a token for each character."""
    outputs: Signature = {"tokenized": ("STRING", [1])}
    return Model(
        name, TEXT, outputs, lambda inputs: [[tokenized(read_rows(inputs["input_text"]))]], parameters=parameters
    )


def _writer(name: str, streams: bool) -> Model:
    model = generator(name, streams=streams, pieces=PIECES)
    model.optional = tuple(GENERATION_INPUTS)
    model.parameters = {"max_batch": "32"} if streams else {"engine_model": f"{name}_stream"}
    model.settings = {"backend": "generation"}
    return model


def _answering(name: str, inputs: Signature, **outputs: list[Any]) -> Model:
    """Return a model that answers every request with one row of these values."""
    kinds = {str: "STRING", int: "INT64", float: "FP32"}
    tensors = [
        Tensor.from_texts(output, values, [1, len(values)])
        if isinstance(values[0], str)
        else Tensor.from_values(output, kinds[type(values[0])], [values])
        for output, values in outputs.items()
    ]
    signature: Signature = {output: (kinds[type(values[0])], [-1]) for output, values in outputs.items()}
    optional = tuple(IMAGE) if inputs is IMAGE else ()
    return Model(name, inputs, signature, lambda received: [tensors], optional=optional)


def pipeline(name: str, task: str, answer: object) -> Model:
    """Return a model that answers each request as the pipeline of the task does."""
    fields = PIPELINE_TASKS[task].fields
    inputs: Signature = {name: ("STRING", [1]) for name in ("inputs", *fields, "parameters")}
    tensor = Tensor.from_texts("outputs", [json.dumps(answer)], [1, 1])
    parameters = {
        "task": task,
        "fields": ",".join(f"{field}={kind}" for field, kind in fields.items()),
        "required_parameters": ",".join(PIPELINE_TASKS[task].required),
    }
    outputs: Signature = {"outputs": ("STRING", [1])}
    settings = {"backend": "pipeline"}
    return Model(name, inputs, outputs, lambda _: [[tensor]], 16, False, parameters, tuple(inputs), settings)


@contextlib.contextmanager
def patience() -> Iterator[None]:
    """Let gateways wait as long for Triton and Prometheus, before they show a page, as a busy machine needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(front, "TRITON_S", WAIT_S)
        patch.setattr(monitoring, "LIMIT_S", WAIT_S)
        yield


FIGURES = {
    "embedding": {"successes": 200.0, "failures": 4.0, "seconds": 2.62, "timed": 200.0},
    "encoder": {"batch": 7.93},
    "writer": {"successes": 0.25, "failures": 0.0, "seconds": 0.9, "timed": 0.25, "batch": 1.0},
    "writer_stream": {"successes": 0.5, "failures": 0, "seconds": 1.4, "timed": 0.5, "tokens": 41.2, "together": 3.4},
}


class PrometheusStandIn:
    """A Prometheus, as a context manager. It answers while `gate` is set. `received` is set when it gets a query."""

    def __init__(self) -> None:
        self.gate, self.received = threading.Event(), threading.Event()
        self.gate.set()
        self._server = script(self.answer)

    def __enter__(self) -> PrometheusStandIn:
        self.port = int(self._server.__enter__().url.rpartition(":")[2])
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.set()
        self._server.__exit__(None, None, None)

    def answer(self, path: str) -> Answer:
        self.received.set()
        self.gate.wait(WAIT_S)
        labels = [({"figure": figure, "model": name}, own[figure]) for name, own in FIGURES.items() for figure in own]
        labels += [
            ({"figure": "engine", "model": "encoder", "engine": "openvino", "precision": "bf16"}, 1),
            ({"figure": "answers", "code": "200"}, 200.5),
            ({"figure": "answers", "code": "429"}, 3.2),
            ({"figure": "p95"}, 0.0213),
            ({"figure": "in_flight"}, 12),
        ]
        result = [{"metric": metric, "value": [0, str(value)]} for metric, value in labels]
        return 200, {}, json.dumps({"data": {"resultType": "vector", "result": result}}).encode()
