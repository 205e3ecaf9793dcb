"""A few rows of docs/architectures.csv: models whose answers once depended on what else was in their batch."""

from __future__ import annotations

import pytest

from loadtest.bench.architectures.architectures import measure
from loadtest.bench.architectures.small_models import SmallModel, find_models, recorded_models

pytestmark = pytest.mark.slow

ROWS = [
    # Finds the last token by the padding token.
    *find_models("LlamaForSequenceClassification", "text-classification", ("onnx", "python")),
    *find_models(
        "ConvBertForSequenceClassification", "text-classification", ("onnx",)
    ),  # mixes neighbours, padding too
    *[model for model in recorded_models("4.57") if model.architecture == "MPNetModel"],
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Compare as `make bench BENCH=architectures` does, which starts a server of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_STATE", str(tmp_path_factory.mktemp("state")))
        return {(result.model, result.format): result for result in measure(ROWS)}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param((model, format), id=f"{model.architecture}-{model.note}-{format}")
        for model in ROWS
        for format in model.formats
    ],
)
def test_answers_equal_the_library(results, row: tuple[SmallModel, str]):
    result = results[row]
    assert not result.refusal
    assert max(result.differences) < 1e-3, result.cells
