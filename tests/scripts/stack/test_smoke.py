"""`make smoke` finds a system whose answers depend on what else is in the batch."""

from __future__ import annotations

import contextlib
import math

import pytest

from export.record import Record
from scripts.stack.smoke import CLIENTS, TEXTS, Limits, SmokeError, attempt, compare
from triton_transformers.triton import TritonError

CONFIG = {
    "max_batch_size": 64,
    "input": [{"name": "input_text", "data_type": "TYPE_STRING", "dims": ["1"]}],
    "output": [{"name": "score", "data_type": "TYPE_FP32", "dims": ["1"]}],
}


LONGEST = max(map(len, TEXTS))


class Server:
    """Stands in for Triton: answers the length of a text, and changes it as `in_batch` does where it sees a batch.

    It answers `label` too, if it has two of them: the first alone, the second in a batch.
    """

    def __init__(self, config: dict, in_batch=lambda number, value: value, labels=()) -> None:
        self.configs = {"system": config}
        self.in_batch = in_batch
        self.labels = labels
        self.requests: list[dict] = []

    def composing(self, name: str) -> dict:
        return self.configs

    def infer(self, name: str, request: dict, timeout: float) -> dict:
        self.requests.append(request)
        texts = request["inputs"][-1]["data"]
        scores = [float(len(str(text))) for text in texts]
        if len(texts) > 1:
            scores = [self.in_batch(number, score) for number, score in enumerate(scores)]
        data = {"score": scores} | ({"label": [self.labels[len(texts) > 1]] * len(texts)} if self.labels else {})
        return {"outputs": [{"name": k, "shape": [len(v), 1], "data": v} for k, v in data.items()]}


def test_system_that_the_server_does_not_serve_is_one_sentence(monkeypatch):
    def refuse(server: Server, name: str) -> dict:
        raise TritonError(f"Request for unknown model: '{name}' is not found", 400)

    monkeypatch.setattr(Server, "composing", refuse)
    assert attempt(Server(CONFIG), "system", Limits()) == "it is not served"


@pytest.mark.parametrize(
    ("server", "error", "inexact_error"),  # the second with a model whose texts may differ
    [
        (Server(CONFIG), "", ""),
        (Server(CONFIG, lambda number, value: value * 1.0001), "", ""),
        (
            Server(CONFIG, lambda number, value: value + LONGEST / 2 * (number == 1)),
            *["example 2 of 5 ('It rains.') is answered differently in one request with others than alone: score "
              "differs by 0.5 of its largest value, at most 0.01 is allowed"] * 2,
        ),
        (Server(CONFIG, lambda number, value: math.nan), *["score has values that are not finite"] * 2),
        (Server(CONFIG, labels=("cat", "dog")), "label is 'dog' instead of 'cat'", ""),
        (Server(CONFIG, labels=(3, 7)), "label is '7' instead of '3'", ""),
    ],
)  # fmt: skip
def test_difference_in_a_batch_is_one_sentence(server, error, inexact_error):
    for limits, expected in ((Limits(), error), (Limits(compares_texts=False), inexact_error)):
        found = attempt(server, "system", limits)
        assert expected in found
        assert bool(found) == bool(expected)


def test_requests_fit_the_model():
    question = CONFIG | {"input": [{**CONFIG["input"][0], "name": name} for name in ("question", "context")]}
    server = Server(question)
    assert attempt(server, "system", Limits()) == ""
    assert {request["inputs"][0]["data"][0] for request in server.requests} == {"Which one?"}  # it leaves room
    assert {request["inputs"][1]["data"][0] for request in server.requests} == set(TEXTS)
    server = Server(CONFIG | {"max_batch_size": 0})
    assert attempt(server, "system", Limits()) == ""
    assert {tuple(request["inputs"][0]["shape"]) for request in server.requests} == {(1,)}
    assert len(server.requests) > CLIENTS


@pytest.mark.parametrize(
    ("format", "facts", "limits"),
    [
        ("onnx", {"tolerance": 1e-3}, Limits(1e-3)),
        ("python", {"tolerance": 1e-1}, Limits(1e-1, compares_texts=False)),
        ("onnx-int8", {"tolerance": 1e-3}, Limits(0.5, compares_texts=False)),
        ("int8", {"tolerance": 1e-3}, Limits(0.2, compares_texts=False)),
        ("python", {"dtype": "bfloat16"}, Limits(compares_texts=False)),
        ("openvino", {"weights": "int8"}, Limits(compares_texts=False)),
        ("openvino-fp16", {"weights": "fp16", "dtype": "float32"}, Limits()),
        ("openvino-bf16", {"weights": "fp16", "dtype": "bfloat16"}, Limits(compares_texts=False)),
    ],
)
def test_limits_depend_on_the_format(format, facts, limits):
    record = Record("system", (), "task", format, "1", (), "", "", facts=facts)
    assert Limits.from_record(record) == limits
    assert Limits.from_record(None) == Limits()


def test_bf16_widens_the_limits():
    inexact = Server(CONFIG, lambda number, value: value * 1.02, ("cat", "cat"))
    running = {"system": "openvino bf16", "another": "onnxruntime f32"}
    assert attempt(inexact, "system", Limits(), running) == ""
    assert "differs by 0.02 of" in attempt(inexact, "system", Limits(), {"system": "openvino f32"})
    assert "differs by 0.02 of" in attempt(inexact, "system", Limits(), {"another": "openvino bf16"})
    for engine in ("openvino bf16", "openvino-genai int8, bfloat16", "openvino-genai bfloat16, draft model"):
        assert Limits(0.1).with_engines([engine]) == Limits(0.1, compares_texts=False)


@pytest.mark.parametrize(
    ("ids", "weights", "error"),
    [
        ([9, 7, -1], [1.0, 1.0, 0.0], ""),
        ([7, 9, 8], [1.0, 1.0, 1e-4], ""),
        ([9, -1, -1], [1.0, 0.0, 0.0], "weight differs by 1"),
        ([9, 8, -1], [1.0, 1.0, 0.0], "weight differs by 1"),
    ],
)
def test_tokens_of_equal_weight_may_change_places(ids, weights, error):
    def outputs(ids, weights):
        return {"token": [str(id) for id in ids], "token_id": ids, "weight": weights}

    row = [{"name": "input_text", "datatype": "BYTES", "data": ["a"]}]
    alone, together = [outputs([7, 9], [1.0, 1.0])], [outputs(ids, weights)]
    with pytest.raises(SmokeError, match=error) if error else contextlib.nullcontext():
        compare([row], alone, together, "together", Limits())
