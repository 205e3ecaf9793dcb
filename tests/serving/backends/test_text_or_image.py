"""The front of a system of texts and images forwards each request to one of two models, and passes on its answer."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace

import numpy as np
import pytest

from export.check import served
from tests.support.python_backend import instance_args, serve
from triton_transformers.errors import ERROR_STATUS, TypedError

INPUTS = {"input_text": "TYPE_STRING", "image": "TYPE_FP32", "image_bytes": "TYPE_STRING"}
TEXTS = np.array([[b"one"], [b"two"]], np.object_)
FILES = np.array([[b"\x89PNG"]], np.object_)
CONFIG = {
    "max_batch_size": 4,
    "input": [{"name": name, "data_type": kind, "dims": [1], "optional": True} for name, kind in INPUTS.items()],
    "output": [{"name": "token_count"}, {"name": "sentence_embedding"}],
    "parameters": {"text_model": {"string_value": "words"}, "image_model": {"string_value": "eyes"}},
}


class Server:
    """The other models of the server: `words` answers with ones, `eyes` with twos, or each with `error`."""

    def __init__(self) -> None:
        self.is_starting = False
        self.loaded: list[str] = []
        self.asked: list[tuple[str, list[str], list[str]]] = []
        self.error: SimpleNamespace | None = None

    def is_model_ready(self, model: str) -> bool:
        if self.is_starting:
            raise RuntimeError("Failed to check model readiness: Server not ready")
        return model in self.loaded

    def load_model(self, model: str) -> None:
        if model == "broken":
            raise RuntimeError("no such folder")
        self.loaded.append(model)

    def request(self, model_name, inputs, requested_output_names, parameters, preferred_memory):
        assert parameters == {ERROR_STATUS: True}
        self.asked.append((model_name, [tensor.name() for tensor in inputs], requested_output_names))
        rows = len(inputs[0].as_numpy())
        vector = np.full((rows, 3), 1.0 if model_name == "words" else 2.0, np.float32)
        tensors = {"token_count": np.full((rows, 1), 5, np.int32), "sentence_embedding": vector}
        answer = SimpleNamespace(
            has_error=lambda: self.error is not None,
            error=lambda: self.error,
            output_tensors=lambda: [served.Tensor(name, tensors[name]) for name in requested_output_names],
        )
        return SimpleNamespace(exec=lambda: answer)


@pytest.fixture
def server(pb_utils, monkeypatch):
    server = Server()
    serve(monkeypatch, server.request, server.is_model_ready, server.load_model)
    return server


def front(config: dict = CONFIG):
    model = importlib.import_module("serving.backends.text_or_image").TritonPythonModel()
    model.initialize(instance_args("", config))
    return model


def answers(model, *inputs: dict, outputs: tuple[str, ...] = ("sentence_embedding", "token_count")) -> list:
    requests = [served.InferenceRequest(tensors, list(outputs)) for tensors in inputs]
    responses = model.execute(requests)
    return [response or request.sender.response() for response, request in zip(responses, requests, strict=True)]


def test_requests_go_to_the_model_of_their_input(server):
    model = front()
    text, image, pixels = answers(
        model, {"input_text": TEXTS}, {"image_bytes": FILES}, {"image": np.zeros((1, 2, 2, 3), np.float32)}
    )
    assert server.loaded == ["words", "eyes"]
    assert text.tensors["sentence_embedding"].tolist() == [[1, 1, 1]] * 2
    assert text.tensors["token_count"].tolist() == [[5], [5]]
    for response in (image, pixels):
        assert response.tensors["sentence_embedding"].tolist() == [[2, 2, 2]]
        assert response.tensors["token_count"].tolist() == [[0]]
    assert sorted(server.asked) == [
        ("eyes", ["image"], ["sentence_embedding"]),
        ("eyes", ["image_bytes"], ["sentence_embedding"]),
        ("words", ["input_text"], ["token_count", "sentence_embedding"]),
    ]


def test_only_requested_outputs_are_asked_for(server):
    model = front()
    (text,) = answers(model, {"input_text": TEXTS}, outputs=("token_count",))
    (image,) = answers(model, {"image_bytes": FILES}, outputs=("token_count",))
    assert text.tensors.keys() == image.tensors.keys() == {"token_count"}
    assert server.asked == [("words", ["input_text"], ["token_count"])]


def test_text_and_image_in_one_request_are_refused(server):
    model = front()
    both, neither, text = answers(model, {"input_text": TEXTS, "image_bytes": FILES}, {}, {"input_text": TEXTS})
    assert "send 'input_text', or one of 'image' and 'image_bytes', not both" in str(both.error)
    assert "not neither" in str(neither.error)
    assert text.error is None


@pytest.mark.parametrize(
    ("status", "code"), [(400, "INVALID_ARG"), (503, "UNAVAILABLE"), (499, "CANCELLED"), (500, "INTERNAL")]
)
@pytest.mark.parametrize("is_typed", [True, False])
def test_typed_error_of_the_model_is_passed_on_whole(server, status, code, is_typed):
    """The prefix is that of an ensemble, as Triton 2.51 writes it."""
    known = TypedError.from_sentence(status, "input 'image_bytes': row 0 is wrong", "invalid_value", ["image_bytes"], 0)
    server.error = SimpleNamespace(message=lambda: f"in ensemble 'eyes', {known.encode()}")
    request = served.InferenceRequest({"image_bytes": FILES}, ["sentence_embedding"])
    request.parameters = lambda: json.dumps({ERROR_STATUS: is_typed})
    front().execute([request])
    shown = known.encode() if is_typed else "input 'image_bytes': row 0 is wrong"
    assert request.sender.response().error == (code, shown)


def test_error_that_is_not_of_our_backends_is_internal(server):
    model = front()
    server.error = SimpleNamespace(message=lambda: "input 'image_bytes' is more than Triton takes")
    (response,) = answers(model, {"image_bytes": FILES})
    assert response.error == ("INTERNAL", "RuntimeError: input 'image_bytes' is more than Triton takes")


def test_server_that_starts_loads_the_models_with_the_first_request(server):
    server.is_starting = True
    model = front()
    assert server.loaded == []
    server.is_starting = False
    (text,) = answers(model, {"input_text": TEXTS})
    assert text.error is None
    assert server.loaded == ["words", "eyes"]


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"text_model": {"string_value": "words"}}, "'text_model' and 'image_model'"),
        (
            {"text_model": {"string_value": "words"}, "image_model": {"string_value": "broken"}},
            "model 'broken', which this one needs, does not load: no such folder",
        ),
    ],
)
def test_missing_model_is_named(server, parameters, reason):
    with pytest.raises(ValueError, match=reason):
        front(CONFIG | {"parameters": parameters})
