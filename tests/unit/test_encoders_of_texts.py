"""Text encoders that take texts and make the tokens themselves."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from gateway.inference import Tensor
from shared.errors import ConfigError
from shared.packing import RunCost
from tests.support.python_backend import InferenceRequest

TEXT = {"name": "input_text", "data_type": "TYPE_STRING", "dims": [1]}
OUTPUTS = {"sum": "TYPE_INT64", "text": "TYPE_STRING", "tokenized": "TYPE_STRING", "token_count": "TYPE_INT32"}
MAX_LENGTH = 4
WORDS = {"[UNK]": 0, "one": 1, "two": 2, "three": 3}


@pytest.fixture
def start(pb_utils, tmp_path) -> Callable[..., Any]:
    """Return a function that starts a model of these inputs, whose answer is the sum of the tokens of a text.

    Any text with the token 3 makes a run fail.
    """
    packed_encoder = importlib.import_module("shared.packed_encoder")
    pb_utils.metrics.clear()

    def run(outputs: list[str], feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        if (feed["input_ids"] == WORDS["three"]).any():
            raise ValueError("three")
        return [(feed["input_ids"] * feed["attention_mask"]).sum(axis=1, keepdims=True)]

    class Sums(packed_encoder.PackedEncoder):
        def load_encoder(self, config, args):
            inputs = {tensor["name"]: np.int64 for tensor in config["input"]}
            return packed_encoder.Encoder(inputs, ["sum"], set(), run, cost=RunCost(1e-4, 1e-4))

    def start(
        *inputs: dict[str, Any], outputs: dict[str, str] = OUTPUTS, direction: str = "right", **parameters: str
    ) -> Any:
        save_tokenizer(tmp_path / "1", direction)
        config = {
            "input": inputs,
            "output": [{"name": name, "data_type": kind} for name, kind in outputs.items()],
            "parameters": {name: {"string_value": value} for name, value in parameters.items()},
            "max_batch_size": 8,
        }
        args = {
            "model_name": "m",
            "model_instance_name": "m_0",
            "model_version": "1",
            "model_repository": str(tmp_path),
        }
        model = Sums()
        model.initialize({"model_config": json.dumps(config), **args})
        return model

    return start


def save_tokenizer(folder: Path, direction: str) -> None:
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(MAX_LENGTH, direction=direction)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def request(*texts: str | bytes) -> InferenceRequest:
    rows = [[text.encode() if isinstance(text, str) else text] for text in texts]
    return InferenceRequest(["sum"], input_text=np.array(rows, np.object_).reshape(-1, 1))


def test_texts_are_tokenized_and_answered(start, pb_utils):
    model = start(TEXT)
    responses = model.execute([request("one two", "two"), request("one"), request("two two two two two")])
    assert [response.outputs for response in responses] == [{"sum": [[3], [2]]}, {"sum": [[1]]}, {"sum": [[8]]}]
    model.finalize()
    counted = {name.removeprefix("transformers_"): value for name, value in pb_utils.metrics.items()}
    assert (counted["texts_total"], counted["truncated_texts_total"], counted["tokens_total"]) == (4, 1, 8)


def test_outputs_about_the_text_need_no_run(start):
    """A run of the token 3 would fail."""
    model = start(TEXT)
    counted, both = request("one three", "two"), request("two one")
    counted.outputs, both.outputs = ["text", "token_count"], ["sum", "token_count"]
    responses = model.execute([counted, both])
    assert [response.outputs for response in responses] == [
        {"text": [[b"one three"], [b"two"]], "token_count": [[2], [1]]},
        {"sum": [[3]], "token_count": [[2]]},
    ]
    model.finalize()


@pytest.mark.parametrize(
    ("bad", "code", "message"),
    [
        (request(b"\xff"), "INVALID_ARG", "input 'input_text': row 0 is not valid UTF-8 (byte 0)"),
        (request("one", ""), "INVALID_ARG", "input 'input_text': text 1 has 0 tokens; it must have 1 to 4"),
        (request(), "INVALID_ARG", "input 'input_text' has no rows"),
        (InferenceRequest(["sum"]), "INVALID_ARG", "input 'input_text' is missing"),
        (request("three"), "INTERNAL", "ValueError: three"),
    ],
    ids=["bytes", "empty", "none", "missing", "failing"],
)
def test_wrong_text_gets_its_error_alone(start, bad, code, message):
    model = start(TEXT)
    good, error, other = model.execute([request("one two"), bad, request("two")])
    assert error.error == (code, message)
    assert (good.outputs, other.outputs) == ({"sum": [[3]]}, {"sum": [[2]]})
    model.finalize()


OWN = ": send texts, or ids of the model's own tokenizer"

# --- token ids --------------------------------------------------------------------------------------------------------


def ids(*numbers: int) -> bytes:
    """Return a row of token ids as the gateway sends it."""
    return Tensor.from_texts("input_text", [numbers]).data[4:]  # after the row's length


def test_token_ids_are_answered_as_their_text(start):
    model = start(TEXT)
    mixed, alone = request("one two", ids(1, 2), ids(2)), request(ids(2, 2, 2, 2))
    mixed.outputs = ["sum", "text", "token_count"]
    first, second = model.execute([mixed, alone])
    assert first.outputs == {
        "sum": [[3], [3], [2]],
        "text": [[b"one two"], [b"one two"], [b"two"]],
        "token_count": [[2], [2], [1]],
    }
    assert second.outputs == {"sum": [[8]]}
    model.finalize()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ids(4), "input 'input_text': row 0 has the token id 4; this model's ids are 0 to 3" + OWN),
        (ids(1, -1), "input 'input_text': row 0 has the token id -1; this model's ids are 0 to 3" + OWN),
        (ids(1, 1, 1, 1, 1), "input 'input_text': text 0 has more than 4 tokens; it must have 1 to 4"),
        (ids(1) + b"x", "input 'input_text': row 0 is not valid UTF-8 (byte 0)"),
    ],
)
def test_wrong_token_ids_are_refused_alone(start, row, message):
    model = start(TEXT)
    error, good = model.execute([request(row), request("two")])
    assert (error.error, good.outputs) == (("INVALID_ARG", message), {"sum": [[2]]})
    model.finalize()


def test_token_ids_are_refused_where_a_text_is_required(start):
    outputs = {name: kind for name, kind in OUTPUTS.items() if name != "text"}  # which pairs do not have
    for name, reason in (("prompt", "before which no prompt is possible"), ("text_pair", "and pairs must be texts")):
        model = start(TEXT, TEXT | {"name": name, "optional": True}, outputs=outputs)
        rows = {"input_text": np.array([[ids(1)]], np.object_), name: np.array([[b"one"]], np.object_)}
        (error,) = model.execute([InferenceRequest(["sum"], **rows)])
        assert error.error == ("INVALID_ARG", f"input 'input_text': row 0 is token ids, {reason}")
        model.finalize()


@pytest.mark.parametrize("direction", ["right", "left"])
def test_tokenized_has_all_ids_and_the_text_of_ids(start, direction):
    """Texts longer than the model's maximum, and a token that would make a run fail."""
    model = start(TEXT, direction=direction)
    sent = request("three one two two one three one", "one", ids(2, 1))
    sent.outputs = ["tokenized"]
    (response,) = model.execute([sent])
    rows = [json.loads(row) for (row,) in response.outputs["tokenized"]]
    assert rows == [
        {"ids": [3, 1, 2, 2, 1, 3, 1], "special": [0, 0], "max_length": MAX_LENGTH},
        {"ids": [1], "special": [0, 0], "max_length": MAX_LENGTH},
        {"text": "two one"},
    ]
    model.finalize()


def test_tokenized_of_very_long_text_is_made_beside_the_batches(start):
    model = start(TEXT)
    sent = request("one " * 1000)
    sent.outputs = ["tokenized", "token_count"]
    assert model.execute([sent]) == [None]
    assert sent.sender.finished.wait(60)
    (response,) = sent.sender.responses
    assert json.loads(response.outputs["tokenized"][0][0])["ids"] == [1] * 1000
    model.finalize()


def test_tokenized_is_empty_beside_outputs_of_the_model(start):
    """Do not make it for the requests of Triton's clients that name no outputs, which are requests for all."""
    model = start(TEXT)
    sent = request("one", ids(2))
    sent.outputs = ["sum", "tokenized"]
    (response,) = model.execute([sent])
    assert response.outputs == {"sum": [[1], [2]], "tokenized": [[b""], [b""]]}
    model.finalize()


def test_wrong_text_leaves_the_others_in_one_run(start, pb_utils):
    model = start(TEXT)
    model.execute([request("one"), request(""), request("two")])
    model.finalize()
    assert pb_utils.metrics["transformers_runs_total"] == 1


def test_parameters_of_the_tokenizer_apply(start):
    model = start(TEXT, max_length="1")
    (response,) = model.execute([request("one two")])
    assert response.outputs == {"sum": [[1]]}
    model.finalize()


def test_texts_and_tokens_exclude_each_other(start):
    tokens = {"name": "input_ids", "data_type": "TYPE_INT64", "dims": [-1]}
    with pytest.raises(ConfigError, match=r"input 'input_ids' is no text: give the model texts .* or tokens, not both"):
        start(TEXT, tokens)


def test_pairs_have_no_output_of_their_text(start):
    with pytest.raises(ConfigError, match="a model of pairs of texts has no output 'text'"):
        start(TEXT, TEXT | {"name": "text_pair"})


@pytest.mark.parametrize("name", ["numbers", "offsets", "past"])
def test_unknown_tensor_of_tokens_is_refused(start, name):
    with pytest.raises(ConfigError, match=f"parameter 'tokens': unknown tensor '{name}'; use input_ids, "):
        start(TEXT, tokens=f"{name}, attention_mask")
