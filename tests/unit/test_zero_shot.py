"""Zero-shot classification from the scores of a served NLI model equals transformers' pipeline."""

from __future__ import annotations

import re

import numpy as np
import pytest
import transformers

from tests.support.checkpoints import encoders
from triton_transformers.models.assemble import run_recipe
from triton_transformers.models.catalogue import RECIPES, Job
from triton_transformers.models.exporters.served import served_system

pytestmark = pytest.mark.usefixtures("few_parity_texts")

TASK = "text-classification"
CANDIDATES = ["travel", "cooking", "the weather"]
TEXT = "one day I will see the rain in another country"
CONTRADICTION, ENTAILMENT = 0, 2


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    names = ["contradiction", "neutral", "entailment"]
    return encoders.save_bert(tmp_path_factory.mktemp("nli"), "ForSequenceClassification", **encoders.labels(names))


@pytest.fixture(scope="module")
def logits(weights, tmp_path_factory) -> np.ndarray:
    """Return the logits of each candidate's hypothesis, as docs/models.md has them served."""
    folder = tmp_path_factory.mktemp("models")
    run_recipe(RECIPES[TASK], Job("nli", TASK, "python", weights, movable=False, folder=folder), "nli")
    config = folder / "nli_answers/config.pbtxt"
    config.write_text(re.sub(r'(activation"\n.*\n.*: )"\w+"', r'\1"none"', config.read_text()))
    hypotheses = [[f"This example is {label}.".encode()] for label in CANDIDATES]
    with served_system("nli", folder) as system:
        texts = np.array([[TEXT.encode()]] * len(CANDIDATES), np.object_)
        (answer,) = system.together([{"input_text": texts, "text_pair": np.array(hypotheses, np.object_)}])
    return answer["scores"]


def softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("multi_label", [False, True])
def test_zero_shot_equals_pipeline(weights, logits, multi_label):
    classify = transformers.pipeline("zero-shot-classification", str(weights), device="cpu")
    expected = classify(TEXT, CANDIDATES, multi_label=multi_label)
    pairs = softmax(logits[:, [CONTRADICTION, ENTAILMENT]])
    scores = pairs[:, 1] if multi_label else softmax(logits[:, ENTAILMENT])
    served = dict(zip(CANDIDATES, scores, strict=True))
    np.testing.assert_allclose([served[label] for label in expected["labels"]], expected["scores"], atol=1e-5)
