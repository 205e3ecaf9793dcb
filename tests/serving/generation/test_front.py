"""The front of a model that streams forwards each request to that model, and passes on its one answer."""

from __future__ import annotations

import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.python_backend import InferenceRequest, Tensor, instance_args, parameters, serve
from triton_transformers.errors import ERROR_STATUS, TypedError

CONFIG = parameters(engine_model="m_stream")
THE_ENGINE = "model 'm_stream', which generates for this one"
CRASHED = f"the process of {THE_ENGINE}, crashed: try again"
TEXT = np.array([b"a text"], np.object_)
PROMPT_IS_EMPTY = TypedError.from_sentence(400, "input 'prompt' is empty", "empty", ["prompt"])


class Engine:
    """The other model: it answers with `answer`, or with `error`, once `gate` is set."""

    def __init__(self) -> None:
        self.ready = {"m_stream": True}
        self.load_error = ""
        self.requests: list[dict] = []
        self.iterators: list[weakref.ref] = []
        self.error, self.is_late = "", False
        self.gate = threading.Event()
        self.gate.set()

    def load_model(self, model: str) -> None:
        if self.load_error:
            raise RuntimeError(self.load_error)
        self.ready[model] = True

    def request(self, **fields):
        fields |= {"inputs": {tensor.name(): tensor.as_numpy() for tensor in fields["inputs"]}}

        def execute(decoupled: bool):
            iterator = self.responses(fields)
            self.iterators.append(weakref.ref(iterator))
            return iterator

        return SimpleNamespace(exec=execute)

    def responses(self, fields: dict):
        self.requests.append(fields)
        yield response({})
        if "cancel" in fields["inputs"]:
            self.error, self.is_late = TypedError(499, "the client cancelled the request").encode(), True
            self.gate.set()
        assert self.gate.wait(30)
        if self.error and self.is_late:
            yield response({"tokenized": np.array([self.error.encode()], np.object_)})
        elif self.error:
            yield response({}, self.error)
        else:
            yield response({name: TEXT for name in sorted({*fields["requested_output_names"]} - {"tokenized"})})
        yield response({})


def response(tensors: dict, error: str = ""):
    return SimpleNamespace(
        has_error=lambda: bool(error),
        error=lambda: SimpleNamespace(message=lambda: error),
        output_tensors=lambda: [Tensor(name, array) for name, array in tensors.items()],
    )


@pytest.fixture
def engine(pb_utils, monkeypatch):
    engine = Engine()
    serve(monkeypatch, engine.request, lambda model: engine.ready.get(model, False), engine.load_model)
    return engine


@pytest.fixture
def front(engine, monkeypatch):
    """Return a function that loads the front and answers one request."""
    from serving.generation import front as generation_front

    monkeypatch.setattr(generation_front, "SILENCE_S", 600)
    monkeypatch.setattr(generation_front, "KEPT_S", 600)
    loaded = []

    def load(config: dict = CONFIG):
        front = generation_front.GenerationFront()
        front.initialize(instance_args("", config))
        loaded.append(front)
        return front

    yield load
    for front in loaded:
        front.finalize()


def ask(front, request: InferenceRequest):
    front.execute([request])
    return request.get_response_sender().response()


def test_iterator_of_responses_outlives_the_answer(front, engine, monkeypatch):
    ask(front(), InferenceRequest(["text"], prompt=TEXT))
    (iterator,) = engine.iterators
    assert iterator()
    freed = threading.Event()
    weakref.finalize(iterator(), freed.set)
    monkeypatch.setattr("serving.generation.front.KEPT_S", 0)
    assert freed.wait(30)


def test_request_reaches_the_engine_whole(front, engine):
    inputs = {"prompt": [b"a text"], "stop": [b"b", b"c"]}
    wishes = {"max_tokens": 3, "temperature": 0.5, "top_p": 1.0, "stream": False}
    arrays = {name: np.array(values, np.object_) for name, values in inputs.items()}
    request = InferenceRequest(["text", "finish_reason"], wishes, **arrays)
    request.id = "one"
    assert ask(front(), request).outputs == {"text": [b"a text"], "finish_reason": [b"a text"]}
    (sent,) = engine.requests
    assert {name: array.tolist() for name, array in sent["inputs"].items()} == inputs
    assert (sent["model_name"], sent["request_id"]) == ("m_stream", "one")
    assert len(sent["parameters"].pop("one_answer")) >= 16
    assert {*sent["requested_output_names"]} == {"text", "finish_reason", "tokenized"}
    # Triton refuses floats in requests to other models.
    assert sent["parameters"] == {
        "max_tokens": 3, "temperature": "0.5", "top_p": 1, "stream": False, "error_status": True,
        "heartbeats": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PROMPT_IS_EMPTY.encode(), ("INVALID_ARG", "input 'prompt' is empty")),
        (
            TypedError(503, "1000 texts wait already: try again later").encode(),
            ("UNAVAILABLE", "1000 texts wait already: try again later"),
        ),
        (TypedError(500, "RuntimeError: two\nlines").encode(), ("INTERNAL", "RuntimeError: two\nlines")),
        (
            TypedError(499, "the client cancelled the request").encode(),
            ("CANCELLED", "the client cancelled the request"),
        ),
        (
            "Failed for execute the inference request. Model 'm_stream' is not ready.",
            ("UNAVAILABLE", f"{THE_ENGINE}, is not loaded: load it, or try again later"),
        ),
        ("Stub process 'm_stream_0_0' is not healthy.", ("UNAVAILABLE", CRASHED)),
        ("unexpected shape for input 'messages' for model 'm_stream'", ("INVALID_ARG", None)),
        ("another error", ("INTERNAL", "another error")),
    ],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_error_keeps_its_code_and_text(front, engine, error, expected, is_late):
    engine.error, engine.is_late = error, is_late
    code, message = expected
    assert ask(front(), InferenceRequest(["text"], prompt=TEXT)).error == (code, message or error)


@pytest.mark.parametrize("is_late", [False, True])
def test_client_that_asks_for_typed_errors_gets_the_engines_whole(front, engine, is_late):
    engine.error, engine.is_late = PROMPT_IS_EMPTY.encode(), is_late
    request = InferenceRequest(["text"], {ERROR_STATUS: True}, prompt=TEXT)
    assert ask(front(), request).error == ("INVALID_ARG", PROMPT_IS_EMPTY.encode())


def test_text_ends_when_the_client_left(front, engine):
    """Triton reports a cancellation; the front asks the engine to end the text, by a key that no client knows."""
    engine.gate.clear()
    request = InferenceRequest(["text"], prompt=TEXT)
    request.id = "1"  # as other clients may name theirs
    request.get_response_sender().is_cancelled = lambda: True
    assert ask(front(), request).error == ("CANCELLED", "the client cancelled the request")
    text, end = engine.requests
    assert end["inputs"]["cancel"].tolist() == [text["parameters"]["one_answer"].encode()]


def test_requests_of_a_crashed_engine_fail(front, engine, monkeypatch):
    """The engine sends its first empty response, and then no more."""
    loaded = front()
    engine.gate.clear()
    with monkeypatch.context() as patch:
        patch.setattr("serving.generation.front.SILENCE_S", 0)
        assert ask(loaded, request := InferenceRequest(["text"], prompt=TEXT)).error == ("UNAVAILABLE", CRASHED)
    engine.gate.set()
    assert ask(loaded, InferenceRequest(["text"], prompt=TEXT)).outputs == {"text": [b"a text"]}
    assert len(request.sender.responses) == 1


def test_100_requests_wait_side_by_side(front, engine):
    engine.gate.clear()
    requests = [InferenceRequest(["text"], prompt=TEXT) for _ in range(100)]
    loaded = front()
    loaded.execute(requests)
    while len(engine.requests) < 100:
        threading.Event().wait(0.01)
    engine.gate.set()
    assert all(request.get_response_sender().response().outputs["text"] == [b"a text"] for request in requests)


def test_batch_dimension_of_the_front_is_hidden_from_the_engine(front, engine):
    loaded = front(CONFIG | {"max_batch_size": 8})
    tokens = np.array([[3], [3]], np.int32)
    rows = np.array([[b"one"], [b"two"]], np.object_)
    ask(loaded, InferenceRequest([], text_input=rows, max_new_tokens=tokens))
    sent = engine.requests[0]["inputs"]
    assert (sent["text_input"].tolist(), sent["max_new_tokens"].tolist()) == ([b"one", b"two"], [3])
    one = ask(loaded, InferenceRequest(["text"], text_input=rows[:1]))
    assert one.outputs == {"text": [[b"a text"]]}
    tokens[1] = 4
    code, message = ask(loaded, InferenceRequest(["text"], text_input=rows, max_new_tokens=tokens)).error
    assert code == "INVALID_ARG"
    assert message.startswith("input 'max_new_tokens' must have the same value for all prompts")


def test_front_loads_its_engine(front, engine):
    engine.ready.clear()
    front()
    assert engine.ready == {"m_stream": True}
    engine.ready.clear()
    engine.load_error = "Failed to load: Server not ready"  # serve.sh lets Triton load it
    front()
    engine.load_error = "m_stream takes about 15.9 GB"
    with pytest.raises(ValueError, match=f"{THE_ENGINE}, does not load: m_stream takes"):
        front()
