"""Text encoders: they make the tokens themselves, and long requests run in turns between the batches."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from serving.encoders.plan import Encoder
from serving.engines.packing import RunCost
from serving.triton.types import ConfigError
from tests.support.python_backend import InferenceRequest, instance_args, parameters
from triton_transformers.tensors import Tensor

TEXT = {"name": "input_text", "data_type": "TYPE_STRING", "dims": [1]}
TOKENS = [{"name": name, "data_type": "TYPE_INT64", "dims": [-1]} for name in ("input_ids", "attention_mask")]
OUTPUTS = {"sum": "TYPE_INT64", "text": "TYPE_STRING", "tokenized": "TYPE_STRING", "token_count": "TYPE_INT32"}
MAX_LENGTH = 4
WORDS = {"[UNK]": 0, "one": 1, "two": 2, "three": 3}
FAILING = 9  # the token with which a run of a model of tokens fails; a model of texts fails at "three"


class Engine:
    """Answers with the sum of a row's tokens. A test can hold its runs, which it records."""

    def __init__(self) -> None:
        self.runs: list[list[int]] = []
        self.cost: Any = RunCost(0, 1)
        self.failing = FAILING
        self.gate = threading.Event()
        self.gate.set()
        self.running = threading.Semaphore(0)

    def run(self, outputs: list[str], feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        sums = (feed["input_ids"] * feed["attention_mask"]).sum(axis=1, keepdims=True)
        self.runs.append(sums[:, 0].tolist())
        self.running.release()
        assert self.gate.wait(30)
        if (feed["input_ids"] == self.failing).any():
            raise ValueError("the failing token")
        return [sums]


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def start(pb_utils, tmp_path: Path, engine: Engine, monkeypatch) -> Iterator[Callable[..., Any]]:
    """Return a function that starts a model of these inputs. A turn is 48 tokens."""
    packed_encoder = importlib.import_module("serving.encoders.packed")
    monkeypatch.setattr(packed_encoder, "TURN_ROWS", 3)
    pb_utils.metrics.clear()
    started = []

    class Sums(packed_encoder.PackedEncoder):
        def load_encoder(self, config, args):
            inputs = {tensor["name"]: np.int64 for tensor in config["input"]}
            return Encoder(inputs, ["sum"], set(), engine.run, cost=engine.cost)

    def start(
        *inputs: dict[str, Any], outputs: dict[str, str] = OUTPUTS, direction: str = "right", **values: str
    ) -> Any:
        if TEXT in inputs:
            engine.failing = WORDS["three"]
            save_tokenizer(tmp_path / "1", direction)
        config = {
            "input": inputs,
            "output": [{"name": name, "data_type": kind} for name, kind in outputs.items()],
            "max_batch_size": 64,
            **parameters(**values),
        }
        model = Sums()
        model.initialize(instance_args(tmp_path, config))
        started.append(model)
        return model

    yield start
    engine.gate.set()
    for model in started:
        model.finalize()


def save_tokenizer(folder: Path, direction: str) -> None:
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(MAX_LENGTH, direction=direction)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture
def of_tokens(start) -> Any:
    return start(*TOKENS)


@pytest.fixture
def of_texts(start) -> Any:
    return start(TEXT)


def tokens(*values: int, length: int = 16) -> InferenceRequest:
    """Return a request with a row of `length` equal tokens for each value."""
    rows = np.repeat(np.array(values)[:, None], length, axis=1)
    return InferenceRequest(["sum"], input_ids=rows, attention_mask=np.ones_like(rows))


def texts(*values: str | bytes, outputs: tuple[str, ...] = ("sum",)) -> InferenceRequest:
    rows = [[text.encode() if isinstance(text, str) else text] for text in values]
    return InferenceRequest([*outputs], input_text=np.array(rows, np.object_).reshape(-1, 1))


def response(request: InferenceRequest) -> Any:
    """Return the only response that was sent."""
    assert request.sender.finished.wait(30)
    (only,) = request.sender.responses
    return only


def counted(model: Any, pb_utils: Any, *names: str) -> tuple[float, ...]:
    model.metrics.close()
    return tuple(pb_utils.metrics[f"transformers_{name}_total"] for name in names)


def test_texts_are_tokenized_and_answered(of_texts, pb_utils):
    responses = of_texts.execute([texts("one two", "two"), texts("one"), texts("two two two two two")])
    assert [response.outputs for response in responses] == [{"sum": [[3], [2]]}, {"sum": [[1]]}, {"sum": [[8]]}]
    assert counted(of_texts, pb_utils, "texts", "truncated_texts", "tokens") == (4, 1, 8)


def test_outputs_about_the_text_need_no_run(of_texts):
    """A run of the token 3 would fail."""
    counted, both = texts("one three", "two"), texts("two one")
    counted.outputs, both.outputs = ["text", "token_count"], ["sum", "token_count"]
    responses = of_texts.execute([counted, both])
    assert [response.outputs for response in responses] == [
        {"text": [[b"one three"], [b"two"]], "token_count": [[2], [1]]},
        {"sum": [[3]], "token_count": [[2]]},
    ]


@pytest.mark.parametrize(
    ("bad", "code", "message"),
    [
        (texts(b"\xff"), "INVALID_ARG", "input 'input_text': row 0 is not valid UTF-8 (byte 0)"),
        (texts("one", ""), "INVALID_ARG", "input 'input_text': text 1 has 0 tokens; it must have 1 to 4"),
        (texts(), "INVALID_ARG", "input 'input_text' has no rows"),
        (InferenceRequest(["sum"]), "INVALID_ARG", "input 'input_text' is missing"),
        (texts("three"), "INTERNAL", "ValueError: the failing token"),
    ],
    ids=["bytes", "empty", "none", "missing", "failing"],
)
def test_wrong_text_gets_its_error_alone(of_texts, bad, code, message):
    good, error, other = of_texts.execute([texts("one two"), bad, texts("two")])
    assert error.error == (code, message)
    assert (good.outputs, other.outputs) == ({"sum": [[3]]}, {"sum": [[2]]})


OWN = ": send texts, or ids of the model's own tokenizer"

# --- token ids --------------------------------------------------------------------------------------------------------


def ids(*numbers: int) -> bytes:
    """Return a row of token ids as the gateway sends it."""
    return Tensor.from_texts("input_text", [numbers]).data[4:]  # after the row's length


def test_token_ids_are_answered_as_their_text(of_texts):
    mixed, alone = texts("one two", ids(1, 2), ids(2)), texts(ids(2, 2, 2, 2))
    mixed.outputs = ["sum", "text", "token_count"]
    first, second = of_texts.execute([mixed, alone])
    assert first.outputs == {
        "sum": [[3], [3], [2]],
        "text": [[b"one two"], [b"one two"], [b"two"]],
        "token_count": [[2], [2], [1]],
    }
    assert second.outputs == {"sum": [[8]]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ids(4), "input 'input_text': row 0 has the token id 4; this model's ids are 0 to 3" + OWN),
        (ids(1, -1), "input 'input_text': row 0 has the token id -1; this model's ids are 0 to 3" + OWN),
        (ids(1, 1, 1, 1, 1), "input 'input_text': text 0 has more than 4 tokens; it must have 1 to 4"),
        (ids(1) + b"x", "input 'input_text': row 0 is not valid UTF-8 (byte 0)"),
    ],
)
def test_wrong_token_ids_are_refused_alone(of_texts, row, message):
    error, good = of_texts.execute([texts(row), texts("two")])
    assert (error.error, good.outputs) == (("INVALID_ARG", message), {"sum": [[2]]})


def test_token_ids_are_refused_where_a_text_is_required(start):
    outputs = {name: kind for name, kind in OUTPUTS.items() if name != "text"}  # which pairs do not have
    for name, reason in (("prompt", "before which no prompt is possible"), ("text_pair", "and pairs must be texts")):
        model = start(TEXT, TEXT | {"name": name, "optional": True}, outputs=outputs)
        rows = {"input_text": np.array([[ids(1)]], np.object_), name: np.array([[b"one"]], np.object_)}
        (error,) = model.execute([InferenceRequest(["sum"], **rows)])
        assert error.error == ("INVALID_ARG", f"input 'input_text': row 0 is token ids, {reason}")


@pytest.mark.parametrize("direction", ["right", "left"])
def test_tokenized_has_all_ids_and_the_text_of_ids(start, direction):
    """Texts longer than the model's maximum, and a token that would make a run fail."""
    model = start(TEXT, direction=direction)
    sent = texts("three one two two one three one", "one", ids(2, 1))
    sent.outputs = ["tokenized"]
    (response,) = model.execute([sent])
    rows = [json.loads(row) for (row,) in response.outputs["tokenized"]]
    words = [[0, 5], [6, 9], [10, 13], [14, 17], [18, 21], [22, 27], [28, 31]]
    assert rows == [
        {
            "ids": [3, 1, 2, 2, 1, 3, 1],
            "special": [0, 0],
            "max_length": MAX_LENGTH,
            "offsets": words,
            "special_texts": [],
        },
        {"ids": [1], "special": [0, 0], "max_length": MAX_LENGTH, "offsets": [[0, 3]], "special_texts": []},
        {"text": "two one", "plain_text": "two one"},
    ]


def test_tokenized_of_very_long_text_is_made_beside_the_batches(of_texts):
    sent = texts("one " * 1000)
    sent.outputs = ["tokenized", "token_count"]
    assert of_texts.execute([sent]) == [None]
    assert sent.sender.finished.wait(60)
    (response,) = sent.sender.responses
    assert json.loads(response.outputs["tokenized"][0][0])["ids"] == [1] * 1000


def test_tokenized_is_empty_beside_outputs_of_the_model(of_texts):
    """Do not make it for the requests of Triton's clients that name no outputs, which are requests for all."""
    sent = texts("one", ids(2))
    sent.outputs = ["sum", "tokenized"]
    (response,) = of_texts.execute([sent])
    assert response.outputs == {"sum": [[1], [2]], "tokenized": [[b""], [b""]]}


def test_parameters_of_the_tokenizer_apply(start):
    model = start(TEXT, max_length="1")
    (response,) = model.execute([texts("one two")])
    assert response.outputs == {"sum": [[1]]}


def test_texts_and_tokens_exclude_each_other(start):
    tokens = {"name": "input_ids", "data_type": "TYPE_INT64", "dims": [-1]}
    with pytest.raises(ConfigError, match=r"input 'input_ids' is no text: give the model texts .* or tokens, not both"):
        start(TEXT, tokens)


@pytest.mark.parametrize("name", ["numbers", "offsets", "past"])
def test_unknown_tensor_of_tokens_is_refused(start, name):
    with pytest.raises(ConfigError, match=f"parameter 'tokens': unknown tensor '{name}'; use input_ids, "):
        start(TEXT, tokens=f"{name}, attention_mask")


def test_tokens_without_rows_are_refused(of_tokens):
    (response,) = of_tokens.execute([tokens()])
    assert response.error[0] == "INVALID_ARG"
    assert "at least one row and one token" in response.error[1]


# --- long requests ----------------------------------------------------------------------------------------------------


def test_long_request_is_answered_in_the_order_of_its_rows(of_tokens, engine):
    values = [3, 1, 2, 5, 4, 7, 6]
    request = tokens(*values)
    assert of_tokens.execute([request]) == [None]
    assert response(request).outputs == {"sum": [[16 * value] for value in values]}
    assert sorted(map(len, engine.runs)) == [1, 3, 3]  # 48 tokens


def test_turn_of_a_model_that_takes_few_rows_ends(start, engine):
    engine.cost = lambda rows, length, tokens=None: np.where(rows <= 2, rows * length, np.inf)
    model = start(*TOKENS)
    assert model.long_requests.seconds == 48
    request = tokens(*[1] * 12)
    assert model.execute([request]) == [None]
    assert response(request).outputs == {"sum": [[16]] * 12}


def test_short_request_waits_for_one_turn_of_long_ones(of_tokens, engine):
    long, other = tokens(*[1] * 12), tokens(*[2] * 12)
    engine.gate.clear()
    assert of_tokens.execute([long, other]) == [None, None]
    engine.running.acquire()  # the first turn
    answers: list[Any] = []
    short = threading.Thread(target=lambda: answers.extend(of_tokens.execute([tokens(3)])))
    short.start()
    while not of_tokens.long_requests.turns.waiting:
        pass
    engine.gate.set()
    short.join(30)
    assert [answer.outputs for answer in answers] == [{"sum": [[48]]}]
    assert response(long).outputs == {"sum": [[16]] * 12}
    assert response(other).outputs == {"sum": [[32]] * 12}
    position = engine.runs.index([48])
    assert position == 1
    assert engine.runs[0] == [16, 16, 16]
    # Both long ones took turns.
    assert engine.runs[2:] == [[32] * 3, [16] * 3, [32] * 3, [16] * 3, [32] * 3, [16] * 3, [32] * 3]


def test_short_requests_of_the_same_batch_do_not_wait_for_the_long_one(of_tokens, engine):
    long = tokens(*[1] * 12)
    answers = of_tokens.execute([tokens(3), long, tokens(4)])
    assert [answer and answer.outputs for answer in answers] == [{"sum": [[48]]}, None, {"sum": [[64]]}]
    assert sorted(engine.runs[0]) == [48, 64]
    assert response(long).outputs == {"sum": [[16]] * 12}


def test_long_requests_leave_tritons_queue_at_once(of_tokens, engine):
    """Or the short requests behind them would wait for a turn of each."""
    requests = [tokens(*[value] * 12) for value in range(1, 6)]
    engine.gate.clear()
    assert of_tokens.execute(requests[:2]) == [None, None]
    engine.running.acquire()  # the first turn, which does not end
    for request in requests[2:]:
        assert of_tokens.execute([request]) == [None]
    engine.gate.set()
    for value, request in enumerate(requests, 1):
        assert response(request).outputs == {"sum": [[16 * value]] * 12}


def test_long_texts_alone_are_a_batch_of_one_for_each_worker(of_tokens, engine):
    requests = [tokens(value, length=64) for value in (1, 2)]
    answer, none = of_tokens.execute(requests)
    assert answer.outputs == {"sum": [[64]]}
    assert none is None
    assert response(requests[1]).outputs == {"sum": [[128]]}


def test_too_many_long_requests_stay_in_tritons_queue(of_tokens, engine, monkeypatch):
    monkeypatch.setattr(importlib.import_module("serving.encoders.packed"), "WAITING", 2)
    requests = [tokens(*[value] * 12) for value in range(1, 6)]
    assert of_tokens.execute(requests) == [None] * 5
    assert len(of_tokens.long_requests.waiting) <= 2
    for value, request in enumerate(requests, 1):
        assert response(request).outputs == {"sum": [[16 * value]] * 12}


def test_failing_long_request_fails_alone(of_tokens):
    bad, good = tokens(*[1] * 3, *[FAILING] * 2, *[1] * 3), tokens(*[2] * 8)
    assert of_tokens.execute([bad, good]) == [None, None]
    assert response(bad).error == ("INTERNAL", "ValueError: the failing token")
    assert response(good).outputs == {"sum": [[32]] * 8}
    assert [answer.outputs for answer in of_tokens.execute([tokens(3)])] == [{"sum": [[48]]}]


def test_tokens_are_copied_before_triton_takes_their_memory_back(of_tokens, engine):
    request = tokens(*[1] * 12)
    engine.gate.clear()
    execution = threading.Thread(target=of_tokens.execute, args=([request],))
    execution.start()
    engine.running.acquire()
    for tensor in request.inputs():
        tensor.as_numpy()[:] = 0
    engine.gate.set()
    execution.join(30)
    assert response(request).outputs == {"sum": [[16]] * 12}


@pytest.mark.parametrize("long", ["x" * 9000, " " * 9000 + "one", "one" + " " * 9000 + "two"])
def test_text_that_takes_long_to_tokenize_leaves_the_batch(of_texts, long):
    request = texts(long, "one two", outputs=("sum", "text"))
    answer, none = of_texts.execute([texts("two"), request])
    assert answer.outputs == {"sum": [[2]]}
    assert none is None
    expected = 3 if "two" in long else int("one" in long)
    assert response(request).outputs == {"sum": [[expected], [3]], "text": [[long.encode()], [b"one two"]]}


def test_text_of_many_words_stays_in_the_batch(of_texts, pb_utils):
    (answer,) = of_texts.execute([texts("two " * 100_000, "one")])
    assert answer.outputs == {"sum": [[2 * MAX_LENGTH], [1]]}
    assert counted(of_texts, pb_utils, "texts", "truncated_texts", "tokens") == (2, 1, MAX_LENGTH + 1)


def test_too_many_texts_that_take_long_are_refused(of_texts):
    started, gate = threading.Event(), threading.Event()
    of_texts.tokenization.slow_thread.submit(lambda: (started.set(), gate.wait(30)))
    started.wait(30)
    requests = [texts("x" * 9000) for _ in range(17)]
    of_texts.execute(requests)
    assert response(requests[16]).error == (
        "UNAVAILABLE",
        "16 texts that take long to tokenize wait already: try again later",
    )
    gate.set()
    assert [response(request).outputs for request in requests[:16]] == [{"sum": [[0]]}] * 16
    again = texts("x" * 9000)
    of_texts.execute([again])
    assert response(again).outputs == {"sum": [[0]]}


def test_wrong_text_that_takes_long_gets_its_error(of_texts):
    request = texts("x" * 9000, "")
    assert of_texts.execute([request]) == [None]
    assert response(request).error == (
        "INVALID_ARG",
        "input 'input_text': text 1 has 0 tokens; it must have 1 to 4",
    )


class TwoThreads:
    """Long requests whose rows are numbers. `send` records the responses."""

    def __init__(self) -> None:
        self.long_requests = importlib.import_module("serving.encoders.long_requests")
        self.responses: list[Any] = []
        self.sent = threading.Event()
        self.all = self.long_requests.LongRequests(
            1, 1, lambda rows: [{"row": np.array(row)} for _, row in rows], lambda name, results: (name, len(results))
        )

    def send(self, response: Any) -> None:
        self.responses.append(response)
        self.sent.set()

    def long(self, name: str, rows: int, response: Any = None) -> Any:
        return self.long_requests.LongRequest(name, response or self, np.arange(rows), np.ones(rows))


@pytest.fixture
def two_threads(pb_utils) -> Iterator[TwoThreads]:
    threads = TwoThreads()
    yield threads
    threads.all.close()


def test_request_that_waits_after_a_turn_of_the_batches_thread_is_continued(two_threads):
    two_threads.all.waiting.append(two_threads.long("a", 3))  # as if the other thread had not seen it
    two_threads.all.take_turn()
    assert two_threads.sent.wait(10)
    assert two_threads.responses == [("a", 3)]


def test_request_that_another_thread_ends_is_answered_once(two_threads):
    """A turn that ends one request responds to it while another thread takes the last turn of the next."""

    class Slow:
        def send(self, response: Any) -> None:
            two_threads.all.take_turn()
            two_threads.send(response)

    two_threads.all.close()
    two_threads.all.waiting += [two_threads.long("a", 1, Slow()), two_threads.long("b", 2)]
    two_threads.all.seconds = 2
    two_threads.all.take_turn()
    assert two_threads.responses == [("b", 2), ("a", 1)]


def test_turns_follow_the_order_of_arrival():
    turns = importlib.import_module("serving.encoders.long_requests").Turns()
    order: list[int] = []

    def take(number: int) -> None:
        with turns:
            order.append(number)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(5)]
    with turns:
        for number, thread in enumerate(threads):
            thread.start()
            while len(turns.waiting) <= number:
                pass
    for thread in threads:
        thread.join(30)
    assert order == [*range(5)]
