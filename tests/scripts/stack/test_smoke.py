"""`make smoke` finds a system whose answers depend on the batch, or differ from those that its assembly saw."""

from __future__ import annotations

import json
import math

import pytest

from export.record import Record
from scripts.stack.smoke import CLIENTS, attempt, check_system
from triton_transformers.answers import LIMITS, Limits, largest_difference, limits
from triton_transformers.settings import Settings
from triton_transformers.tasks.requests import TEXTS, Examples, example_rows
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
    assert attempt(Server(CONFIG), "system") == "it is not served"


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
    for precision, expected in (("", error), ("inexact", inexact_error)):
        found = attempt(server, "system", precision)
        assert expected in found
        assert bool(found) == bool(expected)


def test_requests_fit_the_model():
    question = CONFIG | {"input": [{**CONFIG["input"][0], "name": name} for name in ("question", "context")]}
    server = Server(question)
    assert attempt(server, "system") == ""
    assert {request["inputs"][0]["data"][0] for request in server.requests} == {"Which one?"}  # it leaves room
    assert {request["inputs"][1]["data"][0] for request in server.requests} == set(TEXTS)
    server = Server(CONFIG | {"max_batch_size": 0})
    assert attempt(server, "system") == ""
    assert {tuple(request["inputs"][0]["shape"]) for request in server.requests} == {(1,)}
    assert len(server.requests) > CLIENTS


@pytest.mark.parametrize(
    ("format", "facts", "precision"),
    [
        ("onnx", {"tolerance": 1e-3}, "float32"),
        ("python", {"tolerance": 1e-1}, "bfloat16"),
        ("onnx-int8", {"tolerance": 1e-3}, "onnx-int8"),
        ("int8", {"tolerance": 1e-3}, "int8"),
        ("python", {"dtype": "bfloat16"}, "inexact"),
        ("openvino", {"weights": "int8"}, "inexact"),
        ("openvino-fp16", {"weights": "fp16", "dtype": "float32"}, "exact"),
        ("openvino-bf16", {"weights": "fp16", "dtype": "bfloat16"}, "inexact"),
    ],
)
def test_precision_depends_on_the_format(format, facts, precision):
    assert Record("system", (), "task", format, "1", (), "", "", facts=facts).precision == precision
    assert ("batch", precision) in LIMITS and ("seen", precision) in LIMITS


def test_bf16_widens_the_limits():
    inexact = Server(CONFIG, lambda number, value: value * 1.02, ("cat", "cat"))
    running = {"system": "openvino bf16", "another": "onnxruntime f32"}
    assert attempt(inexact, "system", running=running) == ""
    assert "differs by 0.02 of" in attempt(inexact, "system", running={"system": "openvino f32"})
    assert "differs by 0.02 of" in attempt(inexact, "system", running={"another": "openvino bf16"})
    for engine in ("openvino bf16", "openvino-genai int8, bfloat16", "openvino-genai bfloat16, draft model"):
        assert limits("batch", "float32", [engine]) == Limits(3e-2, equal_texts=False)
        assert limits("batch", "onnx-int8", [engine]) == Limits(0.5, equal_texts=False)


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

    found = largest_difference([outputs([7, 9], [1.0, 1.0])], [outputs(ids, weights)], Limits())
    assert found.words.startswith(error) if error else found.size < 1e-3


@pytest.mark.parametrize(
    ("expected", "actual", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0, 0.0], ""),
        ([1.0, 2.0], [1.0, 2.0, 3.0], "output has 3 elements instead of 2"),
        ([1.0, 2.0], [1.0], "output has 1 elements instead of 2"),
        (["PER"], ["PER", ""], ""),
        ([7, 8], [7, 9], "output is '9' instead of '8'"),
        (["iVBORw0KGgo"], ["iVBORw0KGgoAAAAN"], ""),
        (["iVBORw0KGgo"], ["a text"], "output is 'a text' instead of 'iVBORw0KGgo'"),
    ],
)
def test_answer_may_end_in_padding_only(expected, actual, error):
    assert largest_difference([{"output": expected}], [{"output": actual}], Limits()).words.startswith(error)


# --- what the assembly saw --------------------------------------------------------------------------------------------


def examples(outputs: list[dict], precision: str = "float32") -> Examples:
    return Examples(example_rows("system", {"system": CONFIG}), outputs, "onnxruntime", precision)


@pytest.mark.parametrize(
    ("change", "precision", "error"),
    [
        (1.0, "float32", ""),
        (1.005, "float32", ""),
        (1.05, "float32", "is answered differently than its assembly saw it (onnxruntime): score differs by 0.05 of "
         "its largest value, at most 0.01 is allowed"),
        (1.05, "bfloat16", ""),
        (1.15, "bfloat16", "score differs by 0.15 of"),
    ],
)  # fmt: skip
def test_answer_is_compared_with_the_one_that_the_assembly_saw(change, precision, error):
    seen = [{"score": [len(text) / change]} for text in TEXTS]
    found = attempt(Server(CONFIG), "system", "float32", examples(seen, precision))
    assert error in found
    assert bool(found) == bool(error)


def test_swapped_rows_and_missing_outputs_are_found():
    seen = [{"score": [float(len(text))]} for text in TEXTS]
    assert "score differs by" in attempt(Server(CONFIG), "system", "float32", examples(seen[::-1]))
    labelled = [row | {"label": ["cat"]} for row in seen]
    assert "label has 0 elements instead of 1" in attempt(Server(CONFIG), "system", "float32", examples(labelled))


def test_system_of_an_earlier_release_is_compared_with_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("scripts.stack.smoke.Triton", lambda url: Server(CONFIG))
    monkeypatch.setattr("scripts.stack.smoke.engines", lambda url: {})
    settings = Settings.load().replace(MODEL_REPOSITORY=str(tmp_path))
    Record("system", (), "text-ranking", "onnx", "1", (), "", "", facts={"tolerance": 1e-3}).write(tmp_path)
    assert check_system(settings, "system") == ""
    assert "`make remove SYSTEM=system`, then `make add`" in " ".join(capsys.readouterr().err.split())
    examples([{"score": [0.0]}] * 5).write(tmp_path / "system")
    assert "than its assembly saw it" in check_system(settings, "system")
    assert capsys.readouterr().err == ""


def test_examples_keep_the_beginning_of_long_outputs(tmp_path):
    outputs = [{"text": ["UklGRabc", "dog"], "numbers": [1 / 3] * 5000}]
    Examples([], outputs, "pytorch", "exact").write(tmp_path / "m")
    kept = Examples.read(tmp_path / "m")
    assert kept.outputs == [{"text": ["UklGR", "dog"], "numbers": [0.3333333] * 2048}]
    assert largest_difference(kept.outputs, outputs, LIMITS["seen", "exact"]).size < 1e-6
    (tmp_path / "m/1/examples.json").write_text(json.dumps({"rows": [], "later": 1}))
    assert Examples.read(tmp_path / "m") is None
