"""Parity of assembled systems: the comparison with the original, alone and in a batch, and what int8 costs."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from export.catalogue import Job, Outcome
from export.check.parity import Difference, largest_difference, padded_batches
from export.recipes import onnx_export
from export.recipes.onnx_export import compare_int8_batches, quantize_and_compare
from export.recipes.text import recipe
from export.recipes.text.network import TextModel
from loadtest.bench.architectures.architectures import one_thread
from tests.support.checkpoints import encoders, language, vision
from triton_transformers.settings import UserError

ORIGINAL = [np.array([1.0, 0.0]), np.array([1.0, 1.0])]


def assemble(weights: Path, folder: Path, task: str = "text-classification", format: str = "python") -> Outcome:
    return recipe.assemble(Job("system", task, format, weights, movable=False, folder=folder))


@pytest.fixture(scope="module", autouse=True)
def few_threads():
    """PyTorch's threads take longer to meet than to compute a small model."""
    with one_thread():
        yield


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Path:
    return language.save_llama_classifier(tmp_path_factory.mktemp("decoder"))


@pytest.mark.parametrize(
    ("labels", "pad", "format"),
    [
        (3, True, "onnx"),
        (1, False, "python"),
        pytest.param(3, True, "python", marks=pytest.mark.slow),
        pytest.param(3, False, "python", marks=pytest.mark.slow),
    ],
)
def test_decoder_with_and_without_a_padding_token_answers_alike_in_a_batch(tmp_path, labels, pad, format):
    weights = language.save_llama_classifier(tmp_path / "weights", labels, pad=pad)
    facts = assemble(weights, tmp_path / "models", format=format).facts
    assert facts["difference_alone"] < facts["tolerance"] == 1e-3
    assert facts["difference_together"] < facts["tolerance"]
    assert 'key: "padding"' not in (tmp_path / "models/system_encoder/config.pbtxt").read_text()


def test_texts_share_a_run_only_if_padding_changes_no_answer(decoder, tmp_path, monkeypatch):
    monkeypatch.setattr(TextModel, "pad_token_id", 0)  # not the one by which the model finds the last token
    outcome = assemble(decoder, tmp_path)
    assert "padding changes its answers, so only texts of equal length share a run" in outcome.summary
    assert outcome.facts["difference_together"] < outcome.facts["tolerance"]
    assert 'key: "padding"' in (tmp_path / "system_encoder/config.pbtxt").read_text()


def test_padding_token_outside_the_vocabulary_is_refused(decoder, tmp_path):
    job = Job("system", "text-classification", "onnx", decoder, movable=False, folder=tmp_path)
    model = TextModel(job)
    model.config.pad_token_id = model.config.vocab_size
    with pytest.raises(UserError, match=r"config\.json sets pad_token_id=(\d+), but the model has only \1 tokens"):
        _ = model.pad_token_id


def test_system_that_answers_differently_is_refused(tmp_path, monkeypatch):
    weights = encoders.save_bert(tmp_path / "weights", "ForSequenceClassification")
    monkeypatch.setattr(TextModel, "reference", lambda *_: {"logits": np.ones((1, 2), "f")})
    with pytest.raises(UserError, match="the served model answers differently from the original to a request alone"):
        assemble(weights, tmp_path / "models")


@pytest.mark.parametrize(
    ("system", "task", "form", "save"),
    [
        ("pets", "image-classification", "python", vision.save_vit_classifier),
        # Triton completes the configuration of `vit`, and requires a version of each model.
        ("vit_ensemble", "image-feature-extraction", "onnx", vision.save_vit),
    ],
)
def test_images_in_a_batch_equal_images_alone(tmp_path, system, task, form, save):
    from export.recipes.vision import assemble

    job = Job(system, task, form, save(tmp_path / "weights"), movable=False, folder=tmp_path / "models")
    facts = assemble(job).facts
    assert facts["difference_together"] < facts["tolerance"]
    assert (tmp_path / "models/ensemble_model/1").is_dir() == (system == "vit_ensemble")


# --- the measure ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actual", "difference"),
    [
        ([{"x": np.array([4.0])}, {"x": np.array([-1.0])}], Difference(0.0)),
        ([{"x": np.array([4.0])}, {"x": np.array([1.0])}], Difference(0.5, 1, "x")),
        ([{"x": np.array([np.nan])}, {"x": np.array([-1.0])}], Difference(np.inf, 0, "x")),
        ([{"x": np.array([4.0, 4.0])}, {"x": np.array([-1.0])}], Difference(np.inf, 0, "x")),
    ],
)
def test_difference_is_relative_to_the_largest_value(actual, difference):
    assert largest_difference([{"x": np.array([4.0])}, {"x": np.array([-1.0])}], actual) == difference


def test_difference_above_the_tolerance_is_an_error():
    Difference(1e-4).check(1e-3, "alone")
    with pytest.raises(UserError, match=r"in a batch: 'x' of example 3 differs by 5.0e-01 .* at most 1e-03 is allowed"):
        Difference(0.5, 3, "x").check(1e-3, "in a batch")
    with pytest.raises(UserError):
        Difference(np.nan).check(1e-3, "alone")


def test_every_batch_pads_short_texts_to_a_long_one():
    batches = padded_batches([10, 500, 20, 900, 1500])
    assert batches == [[3, 0], [1, 2]]  # 1500 tokens run only alone


# --- int8 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("int8", "refusal"),
    [
        ([ORIGINAL[0], np.array([1.0, 0.9])], ""),
        ([ORIGINAL[0], np.array([1.0, -0.5])], r"fp32 is 0\.316 on example 1, at least 0\.9 .*\. Set FORMAT=onnx"),
    ],
)
def test_int8_reports_size_and_agreement_or_recommends_fp32(tmp_path, monkeypatch, int8, refusal):
    runs = iter([(4, ORIGINAL, 2.0), (1, int8, 1.0)])
    monkeypatch.setattr(onnx_export, "quantize", lambda _: None)
    monkeypatch.setattr(onnx_export, "measured", lambda *_: next(runs))
    with pytest.raises(UserError, match=refusal) if refusal else contextlib.nullcontext():
        outcome = quantize_and_compare(tmp_path / "model.onnx", [{}, {}])
        assert outcome.summary.endswith("instead of 0.0, 2.0 times as fast one by one, cosine with fp32 at least 0.999")
        assert (outcome.facts["int8_bytes"], outcome.facts["fp32_bytes"]) == (1, 4)


def test_int8_that_differs_in_a_batch_is_refused(monkeypatch):
    alone = [{"x": answer} for answer in ORIGINAL]
    answers = alone, [(1, {"x": np.array([1.0, -0.5])}), (0, alone[0])], "float32"
    monkeypatch.setattr(onnx_export, "serve", lambda job, requests, outputs: answers)
    with pytest.raises(UserError, match=r"in a batch with those to a request alone is 0\.316 on example 1"):
        compare_int8_batches(None, [], ["x"])


def test_cosine_of_single_numbers_compares_all_examples():
    scores = [np.array([0.2]), np.array([0.9])]
    assert onnx_export.accepted_cosine(scores, scores, "", [0, 1]) == pytest.approx(1)
    with pytest.raises(UserError, match=r"is 0\.424 on example 0"):
        onnx_export.accepted_cosine(scores, scores[::-1], "", [0, 1])
