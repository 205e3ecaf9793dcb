"""docs/architectures.md has every row, and its measure sees an answer that differs."""

from __future__ import annotations

import math

import pytest

from scripts.bench.architectures import MARKER, PAGE, Result
from scripts.bench.reference_answers import largest_difference, requests
from scripts.bench.small_models import SMALL_MODELS, find_models

EXPECTED = [{"score": [0.5, -2.0], "label": ["cat"]}, {"score": [1.0, 1.0], "label": ["dog"]}]


def test_page_has_every_row():
    table = PAGE.read_text().partition(MARKER)[2]
    names = [" | ".join(Result(model, format).cells[:3]) for model in SMALL_MODELS for format in model.formats]
    assert len(names) == len(set(names)) >= 40
    assert [name for name in names if f"| {name} |" not in table] == []


@pytest.mark.parametrize(
    ("answers", "difference"),
    [
        (EXPECTED, 0),
        ([EXPECTED[0] | {"score": [0.5, -1.0]}, EXPECTED[1]], 0.5),
        ([EXPECTED[0] | {"score": [0.5, -2.0, 0.0]}, EXPECTED[1]], 0),  # padding of a request with longer rows
        ([EXPECTED[0] | {"score": [0.5, -2.0, 0.1]}, EXPECTED[1]], math.inf),
        ([EXPECTED[0] | {"label": ["cat", "dog"]}, EXPECTED[1]], math.inf),
        ([EXPECTED[0] | {"score": [0.5]}, EXPECTED[1]], math.inf),
        ([EXPECTED[0] | {"score": [0.5, math.nan]}, EXPECTED[1]], math.inf),
        ([EXPECTED[0] | {"label": ["dog"]}, EXPECTED[1]], math.inf),
    ],
)
def test_difference_is_the_largest_of_all_outputs(answers, difference):
    assert largest_difference(EXPECTED, answers) == difference


def test_result_is_right_within_the_tolerance_of_its_format():
    (model,) = find_models("ViT", "image-classification")
    assert Result(model, "onnx", (1e-5, 1e-4, 1e-4)).is_right
    assert not Result(model, "onnx", (1e-5, 1e-4, 1e-2)).is_right
    assert Result(model, "onnx-int8", (1e-2, 1e-2, 1e-2)).is_right
    assert not Result(model, "onnx", (math.inf, 0, 0)).is_right
    assert not Result(model, "onnx", refusal="the served model answers differently from the original").is_right
    assert Result(model, "onnx-int8", refusal="int8 costs this model too much accuracy").is_right


def test_every_model_has_requests():
    for model in SMALL_MODELS:
        assert len(requests(model)) > 5
