"""docs/architectures.csv has every row, and its measure sees an answer that differs."""

from __future__ import annotations

import csv
import math
import multiprocessing
import os
from collections import Counter
from pathlib import Path

import pytest

from loadtest.bench.architectures.architectures import COLUMNS, TABLE, Result, all_models, prepared
from loadtest.bench.architectures.reference_answers import requests
from loadtest.bench.architectures.small_models import SMALL_MODELS, SmallModel, find_models, recorded_models
from triton_transformers.answers import Limits, largest_difference
from triton_transformers.settings import ROOT, Settings

EXPECTED = [{"score": [0.5, -2.0], "label": ["cat"]}, {"score": [1.0, 1.0], "label": ["dog"]}]


def table() -> list[list[str]]:
    return list(csv.reader(TABLE.read_text().splitlines()))


def test_table_has_every_row():
    header, *rows = table()
    assert header == list(COLUMNS)
    measured = [tuple(row[:4]) for row in rows]
    expected = [tuple(Result(model, format).cells[:4]) for model in all_models() for format in model.formats]
    assert len(measured) == len(set(measured))
    assert len({model.architecture for model in SMALL_MODELS}) >= 120
    assert set(expected) <= set(measured)


def test_docs_count_the_rows():
    rows = table()[1:]
    results = Counter(row[-1].partition(":")[0] for row in rows)
    architectures = len({row[0].partition(",")[0] for row in rows})
    names = {"equal": "equal", "refused": "refused", "differs": "different", "not measured": "not measured"}
    counts = ", ".join(f"{results[result]} {name}" for result, name in names.items())
    page = " ".join((ROOT / "docs/models.md").read_text().split())
    assert f"{len(rows)} rows of {architectures} architectures: {counts}." in page


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
