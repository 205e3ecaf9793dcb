"""docs/architectures.md has every row, and its measure sees an answer that differs."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
from pathlib import Path

import pytest

from loadtest.bench.architectures.architectures import MARKER, PAGE, Result, all_models, prepared
from loadtest.bench.architectures.reference_answers import requests
from loadtest.bench.architectures.small_models import SMALL_MODELS, SmallModel, find_models, recorded_models
from triton_transformers.answers import Limits, largest_difference
from triton_transformers.settings import Settings

EXPECTED = [{"score": [0.5, -2.0], "label": ["cat"]}, {"score": [1.0, 1.0], "label": ["dog"]}]


def test_page_has_every_row():
    table = PAGE.read_text().partition(MARKER)[2]
    names = [" | ".join(Result(model, format).cells[:4]) for model in all_models() for format in model.formats]
    assert len(names) == len(set(names))
    assert len({model.architecture for model in SMALL_MODELS}) >= 120
    assert [name for name in names if f"| {name} |" not in table] == []


def test_models_of_the_hub_are_covered_by_rows_or_tests():
    table = PAGE.read_text().partition("## Models of the Hub")[2].partition("\n\nThe two others")[0]
    models = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if "/" in line[:60]]
    models = [cells for cells in models if len(cells) == 4]
    rows = {cells.partition(" | ")[0] for cells in map(" | ".join, (Result(row, "").cells for row in SMALL_MODELS))}
    assert len({name for name, *_ in models}) == 60
    for name, _, _, covered in models:
        file = re.fullmatch(r"\[.*\]\((.*)\)", covered)
        assert (PAGE.parent / file[1]).is_file() if file else covered in rows | {"not covered"}, name


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
    assert largest_difference(EXPECTED, answers, Limits()).size == difference


def test_result_is_right_within_the_tolerance_of_its_format():
    (model,) = find_models("ViTForImageClassification", "image-classification")
    assert Result(model, "onnx", (1e-5, 1e-4, 1e-4)).is_right
    assert not Result(model, "onnx", (1e-5, 1e-4, 1e-2)).is_right
    assert Result(model, "onnx-int8", (1e-2, 1e-2, 1e-2)).is_right
    assert not Result(model, "onnx", (math.inf, 0, 0)).is_right
    assert Result(model, "onnx-int8", refusal="int8 costs this model too much accuracy").is_right


def test_every_model_has_requests():
    for model in all_models():
        assert len(requests(model)) > 5


@pytest.mark.parametrize("model", recorded_models("4.57"), ids=lambda model: model.system)
def test_checkpoint_of_transformers_4_loads_whole(tmp_path, model):
    network = model.network_class
    _, report = network.from_pretrained(model.save(tmp_path), output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]


class CrashingModel(SmallModel):
    def save(self, folder: Path) -> Path:
        os._exit(9)


def test_crash_of_a_library_costs_one_row(tmp_path, monkeypatch):
    fork = multiprocessing.get_context("fork")  # the usual way imports everything again in each process
    monkeypatch.setattr("loadtest.bench.architectures.architectures.multiprocessing.get_context", lambda _: fork)
    row = (CrashingModel("BertModel", "feature-extraction"), "onnx")
    settings = Settings.load().replace(MODEL_REPOSITORY=str(tmp_path / "models"))
    assert list(prepared([row, row], tmp_path, settings)) == [(row, ("a library crashed", []))] * 2
