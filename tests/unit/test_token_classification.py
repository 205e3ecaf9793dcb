"""Entities of token classifiers equal those of transformers' pipeline, with each aggregation_strategy."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import transformers

from tests.support.checkpoints import encoders
from triton_transformers.corpus import MIXED
from triton_transformers.models.assemble import run_recipe
from triton_transformers.models.catalogue import RECIPES, Job
from triton_transformers.models.exporters.served import served_system

pytestmark = pytest.mark.usefixtures("few_parity_texts")

# The corpus, and words that BERT's tokenizer splits, does not know, or finds beside punctuation.
TEXTS = [*MIXED.texts[:12], "Zwölfzylinder-Motor, O'Neill's xylophones 🦜🦜x (antidisestablishmentarianism)", "a", ""]
# E-LOC and X-Y-Z have dashes that are not B- or I-.
LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "E-LOC", "X-Y-Z", "MISC"]


@pytest.fixture(scope="module", params=[encoders.save_bert, encoders.save_roberta], ids=["wordpiece", "byte-level"])
def weights(tmp_path_factory, request) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    return request.param(folder, "ForTokenClassification", **encoders.labels(LABELS))


@pytest.fixture(scope="module")
def folder(weights, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    job = Job("entities", "token-classification", "python", weights, movable=False, folder=folder)
    run_recipe(RECIPES[job.task], job, "entities")
    return folder


def entities(answer: dict[str, np.ndarray], row: int) -> list[tuple]:
    columns = zip(*(answer[name][row] for name in ("label", "start", "end", "score")), strict=True)
    return [(label.decode(), int(start), int(end), score) for label, start, end, score in columns if label]


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
def test_entities_equal_pipeline(folder, weights, strategy):
    config = folder / "entities_answers/config.pbtxt"
    text = re.sub(r'(aggregation_strategy"\n.*\n.*: )"\w+"', rf'\1"{strategy}"', config.read_text())
    config.write_text(text)
    classify = transformers.pipeline("token-classification", str(weights), aggregation_strategy=strategy, device="cpu")
    classify.tokenizer.model_max_length = encoders.POSITIONS
    with served_system("entities", folder) as system:
        (together,) = system.together([{"input_text": np.array([[text.encode()] for text in TEXTS], np.object_)}])
    count = 0
    for row, text in enumerate(TEXTS):
        expected = classify(text)
        served = entities(together, row)
        name = "entity" if strategy == "none" else "entity_group"
        assert [entity[:3] for entity in served] == [(e[name], e["start"], e["end"]) for e in expected]
        np.testing.assert_allclose([entity[3] for entity in served], [e["score"] for e in expected], atol=1e-5)
        count += len(served)
    assert count > len(TEXTS) / 2
