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

from shared.errors import ConfigError
from shared.packing import RunCost
from tests.support.python_backend import InferenceRequest

TEXT = {"name": "input_text", "data_type": "TYPE_STRING", "dims": [1]}
OUTPUTS = {"sum": "TYPE_INT64", "text": "TYPE_STRING", "token_count": "TYPE_INT32"}
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

    def start(*inputs: dict[str, Any], **parameters: str) -> Any:
        save_tokenizer(tmp_path / "1")
        config = {
            "input": inputs,
            "output": [{"name": name, "data_type": kind} for name, kind in OUTPUTS.items()],
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


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(MAX_LENGTH)
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
