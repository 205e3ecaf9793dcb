"""Tasks of one text: their parameters, and what the gateway needs of them.

tests/conformance/tasks compares their answers with those of the library.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from export.check.served import InferenceRequest, answers, served_system
from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.tasks import task_of
from tests.conformance.tasks.references import finds_entities
from tests.conformance.tasks.rows import NAMES
from tests.conformance.tasks.run import check, expect
from tests.support.checkpoints import encoders
from tests.support.served import ask, assemble, request
from triton_transformers.tensors import TOKEN_IDS

pytestmark = pytest.mark.usefixtures("stored")

# --- masked words: the gateway puts each word into the tokens of the text, and asks for their text --------------------


@pytest.mark.parametrize("save", [encoders.save_bert, encoders.save_roberta], ids=["wordpiece", "byte-level"])
def test_tokens_of_filled_texts_become_those_of_the_pipeline(tmp_path, save):
    weights = save(tmp_path / "weights", "ForMaskedLM")
    pipe: Any = transformers.pipeline("fill-mask", model=str(weights))
    mask = pipe.tokenizer.mask_token
    with served_system("m", assemble(weights, tmp_path / "models")) as system:

        def other_form(*rows: str | list[int]) -> list[dict[str, Any]]:
            encoded = [
                row.encode() if isinstance(row, str) else TOKEN_IDS + np.array(row, "<i4").tobytes() for row in rows
            ]
            values = np.array(encoded, np.object_).reshape(-1, 1)
            (answer,) = answers(system.models["m_encoder"], [InferenceRequest({"input_text": values}, ["tokenized"])])
            return [json.loads(value) for value in answer.tensors["tokenized"].ravel()]

        text, masked = other_form(f"Rome (the old) is in {mask}  and it's big .", mask)
        before, after = masked["special"]
        ids, hole = text["ids"][before:-after], masked["ids"][-after - 1]
        for word in pipe(f"Rome (the old) is in {mask}  and it's big ."):
            (filled,) = other_form([word["token"] if id == hole else id for id in ids])
            assert filled["text"] == word["sequence"]


# --- entities: those of transformers' pipeline, with each aggregation_strategy ----------------------------------------

# E-LOC and X-Y-Z have dashes that are not B- or I-.
LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "E-LOC", "X-Y-Z", "MISC"]


def set_parameter(config: Path, name: str, value: str) -> None:
    text = re.sub(rf'({name}"\n.*\n.*: )"\w+"', rf'\1"{value}"', config.read_text())
    assert f'"{value}"' in text
    config.write_text(text)


@pytest.mark.parametrize("save", [encoders.save_bert, encoders.save_roberta], ids=["wordpiece", "byte-level"])
def test_entities_equal_pipeline_with_each_strategy(tmp_path, save):
    weights = save(tmp_path / "weights", "ForTokenClassification", **encoders.labels(LABELS))
    folder = assemble(weights, tmp_path / "models", "python")
    for strategy in ("none", "simple", "first", "average", "max"):
        set_parameter(folder / "m/config.pbtxt", "aggregation_strategy", strategy)
        expected = expect(finds_entities(weights, strategy), {"input_text": NAMES})
        (answer,) = ask(folder, request(NAMES))
        check(answer, expected)
        assert sum(len(entities["label"]) for entities in expected) > len(NAMES) / 2


# --- zero-shot classification, from the scores of a served NLI model (docs/models.md) ---------------------------------

CANDIDATES = ["travel", "cooking", "the weather"]
CONTRADICTION, ENTAILMENT = 0, 2


def softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def test_zero_shot_equals_pipeline(tmp_path):
    names = encoders.labels(["contradiction", "neutral", "entailment"])
    weights = encoders.save_bert(tmp_path / "weights", "ForSequenceClassification", **names)
    assert task_of(Checkpoint("m", weights)) == "text-classification"
    folder = assemble(weights, tmp_path / "models", "python")
    set_parameter(folder / "m_answers/config.pbtxt", "activation", "none")
    text = "one day I will see the rain in another country"
    hypotheses = [f"This example is {label}." for label in CANDIDATES]
    (answer,) = ask(folder, request([text] * len(CANDIDATES), text_pair=hypotheses))
    logits = answer["scores"]
    classify = transformers.pipeline("zero-shot-classification", str(weights), device="cpu")
    pairs = softmax(logits[:, [CONTRADICTION, ENTAILMENT]])
    for multi_label, scores in ((True, pairs[:, 1]), (False, softmax(logits[:, ENTAILMENT]))):
        expected = classify(text, CANDIDATES, multi_label=multi_label)
        served = dict(zip(CANDIDATES, scores, strict=True))
        np.testing.assert_allclose([served[label] for label in expected["labels"]], expected["scores"], atol=1e-5)
