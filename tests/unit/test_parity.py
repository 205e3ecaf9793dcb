"""Parity of exported models: the comparison with the original, and the accuracy that int8 costs."""

from __future__ import annotations

import numpy as np
import pytest

from scripts.common.settings import UserError
from scripts.models.exporters import onnx_export
from scripts.models.exporters.onnx_export import quantize_and_compare
from scripts.models.exporters.parity import check_parity

ORIGINAL = [np.array([1.0, 0.0]), np.array([1.0, 1.0])]


@pytest.fixture
def quantized(tmp_path, monkeypatch):
    """Return a function that quantizes a model, whose int8 answers are given."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"4444")
    monkeypatch.setattr(onnx_export, "quantize", lambda path: path.write_bytes(b"1"))

    def run(int8_answers: list[np.ndarray]):
        return quantize_and_compare(path, lambda: ORIGINAL if path.stat().st_size > 1 else int8_answers)

    return run


def test_int8_that_loses_accuracy_recommends_fp32(quantized):
    with pytest.raises(UserError) as error:
        quantized([ORIGINAL[0], np.array([1.0, -0.5])])
    message = str(error.value)
    assert "int8 costs this model too much accuracy" in message
    assert "0.316 on example 1, at least 0.9 is required. Set FORMAT=onnx" in message


def test_int8_reports_size_and_agreement(quantized):
    outcome = quantized([ORIGINAL[0], np.array([1.0, 0.9])])
    assert "cosine with fp32 at least 0.999" in outcome.summary
    assert (outcome.facts["int8_bytes"], outcome.facts["fp32_bytes"]) == (1, 4)


@pytest.mark.parametrize(
    ("exported", "reason"),
    [
        ([ORIGINAL[0], np.array([0.0, 1.0])], "cosine 0.707107 on example 1, at least 0.99 is required"),
        ([ORIGINAL[0], np.array([1.0])], r"\(1,\) instead of \(2,\)"),
        ([ORIGINAL[0], np.array([np.nan, 1.0])], "cosine -1.000000 on example 1"),
    ],
)
def test_different_export_is_refused(exported, reason):
    with pytest.raises(UserError, match=f"the exported model answers differently from the original: {reason}"):
        check_parity(ORIGINAL, exported, 0.99)


def test_equal_export_passes():
    assert check_parity(ORIGINAL, ORIGINAL, 0.99) == pytest.approx(1)
