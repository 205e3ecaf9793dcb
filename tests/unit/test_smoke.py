"""`make smoke` finds a system whose answers depend on what else is in the batch."""

from __future__ import annotations

import contextlib
import json

import pytest

from scripts.stack.smoke import CLIENTS, TEXTS, Limits, SmokeError, attempt, compare
from triton_transformers.models.record import Record
from triton_transformers.triton import TritonError

CONFIG = {
    "max_batch_size": 64,
    "input": [{"name": "input_text", "data_type": "TYPE_STRING", "dims": ["1"]}],
    "output": [{"name": "score", "data_type": "TYPE_FP32", "dims": ["1"]}],
}


class Server:
    """Stands in for Triton: answers the length of a text, and changes it as `in_batch` does where it sees a batch."""

    def __init__(self, config: dict, in_batch=lambda number, value: value, label: str = "") -> None:
        self.configs = {"system": config}
        self.in_batch = in_batch
        self.label = label

    def composing(self, name: str) -> dict:
        return self.configs

    def infer(self, name: str, request: dict, timeout: float) -> dict:
        texts = request["inputs"][-1]["data"]
        scores = [float(len(str(text))) for text in texts]
        if len(texts) > 1:
            scores = [self.in_batch(number, score) for number, score in enumerate(scores)]
        data = {"score": scores} | ({"label": [self.label] * len(texts)} if self.label else {})
        return {"outputs": [{"name": k, "shape": [len(v), 1], "data": v} for k, v in data.items()]}


def test_system_that_the_server_does_not_serve_is_one_sentence(monkeypatch):
    def refuse(server: Server, name: str) -> dict:
        raise TritonError(f"Request for unknown model: '{name}' is not found", 400)

    monkeypatch.setattr(Server, "composing", refuse)
    assert attempt(Server(CONFIG), "system", Limits()) == "it is not served"


def test_equal_answers_pass():
    assert attempt(Server(CONFIG), "system", Limits()) == ""


def test_small_differences_pass():
    assert attempt(Server(CONFIG, lambda number, value: value * 1.0001), "system", Limits()) == ""


def test_error_names_the_example_and_the_difference():
    longest = max(map(len, TEXTS))
    server = Server(CONFIG, lambda number, value: value + longest / 2 if number == 1 else value)
    assert attempt(server, "system", Limits()) == (
        "example 2 of 5 ('It rains.') is answered differently in one request with others than alone: score differs by "
        "0.5 of its largest value, at most 0.01 is allowed"
    )


def test_values_that_are_not_finite_are_an_error():
    server = Server(CONFIG, lambda number, value: float("nan"))
    assert attempt(server, "system", Limits()) == "score has values that are not finite"


def test_other_texts_are_an_error_unless_the_model_is_inexact():
    class Changing(Server):
        def infer(self, name, request, timeout):
            self.label = "cat" if len(request["inputs"][0]["data"]) == 1 else "dog"
            return super().infer(name, request, timeout)

    server = Changing(CONFIG, label="cat")
    assert "label is 'dog' instead of 'cat'" in attempt(server, "system", Limits())
    assert attempt(server, "system", Limits(compares_texts=False)) == ""


def test_question_stays_short_beside_contexts_of_every_length():
    config = CONFIG | {"input": [{**CONFIG["input"][0], "name": name} for name in ("question", "context")]}
    requests = []

    class Recording(Server):
        def infer(self, name, request, timeout):
            requests.append(request)
            return super().infer(name, request, timeout)

    assert attempt(Recording(config), "system", Limits()) == ""
    assert {json.dumps(request["inputs"][0]["data"][0]) for request in requests} == {'"Which one?"'}
    assert {request["inputs"][1]["data"][0] for request in requests} == set(TEXTS)


def test_models_without_a_batch_dimension_get_one_row_per_request():
    config = CONFIG | {"max_batch_size": 0}
    shapes = []

    class Recording(Server):
        def infer(self, name, request, timeout):
            shapes.append(request["inputs"][0]["shape"])
            return super().infer(name, request, timeout)

    assert attempt(Recording(config), "system", Limits()) == ""
    assert set(map(tuple, shapes)) == {(1,)}
    assert len(shapes) > CLIENTS


@pytest.mark.parametrize(
    ("format", "facts", "limits"),
    [
        ("onnx", {"tolerance": 1e-3}, Limits(1e-3)),
        ("python", {"tolerance": 1e-1}, Limits(1e-1, compares_texts=False)),
        ("onnx-int8", {"tolerance": 1e-3}, Limits(0.5, compares_texts=False)),
        ("python", {"dtype": "bfloat16"}, Limits(compares_texts=False)),
        ("openvino", {"weights": "int8"}, Limits(compares_texts=False)),
        ("openvino-fp16", {"weights": "fp16"}, Limits()),
    ],
)
def test_limits_depend_on_the_format(format, facts, limits):
    record = Record("system", (), "task", format, "1", (), "", "", facts=facts)
    assert Limits.from_record(record) == limits


def test_bf16_widens_the_limits():
    inexact = Server(CONFIG, lambda number, value: value * 1.02, label="cat")
    running = {"system": "openvino bf16", "another": "onnxruntime f32"}
    assert attempt(inexact, "system", Limits(), running) == ""
    assert "differs by 0.02 of" in attempt(inexact, "system", Limits(), {"system": "openvino f32"})
    assert "differs by 0.02 of" in attempt(inexact, "system", Limits(), {"another": "openvino bf16"})
    assert Limits(0.1).with_engines(["openvino bf16"]) == Limits(0.1, compares_texts=False)


def test_whole_numbers_are_compared_like_texts():
    class Changing(Server):
        def infer(self, name, request, timeout):
            answer = super().infer(name, request, timeout)
            answer["outputs"][0]["data"] = [3 if len(request["inputs"][0]["data"]) == 1 else 7] * answer["outputs"][0][
                "shape"
            ][0]
            return answer

    assert "score is '7' instead of '3'" in attempt(Changing(CONFIG), "system", Limits())
    assert attempt(Changing(CONFIG), "system", Limits(compares_texts=False)) == ""


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


def test_system_without_a_record_has_default_limits():
    assert Limits.from_record(None) == Limits()
