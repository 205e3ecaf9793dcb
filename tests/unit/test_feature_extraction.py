"""Encoders that transformers loads by a class of its own, and the vectors of a decoder's tokens."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.support.checkpoints import encoders
from triton_transformers.corpus import MIXED
from triton_transformers.models.assemble import run_recipe
from triton_transformers.models.catalogue import RECIPES, Job
from triton_transformers.models.exporters.served import served_system
from triton_transformers.models.tasks import task_of
from triton_transformers.models.unsupported import check_model, check_task

pytestmark = pytest.mark.usefixtures("few_parity_texts")

TASK = "feature-extraction"
TEXTS = ["a", *MIXED.texts[:6], "word " * 100]


@torch.inference_mode()
@pytest.mark.slow
def test_decoder_without_padding_token_equals_transformers(tmp_path):
    weights = encoders.save_gpt2(tmp_path / "weights", "Model")
    run_recipe(RECIPES[TASK], Job("gpt", TASK, "onnx", weights, movable=False, folder=tmp_path), "gpt")
    requests = [{"input_text": np.array([[text.encode()]], np.object_)} for text in TEXTS]
    with served_system("gpt", tmp_path) as system:
        alone, together = system.alone(requests), system.together(requests)
    model = transformers.AutoModel.from_pretrained(weights)
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    for n, text in enumerate(TEXTS):
        expected = model(**tokenizer(text, truncation=True, return_tensors="pt")).last_hidden_state.numpy()
        np.testing.assert_allclose(alone[n]["last_hidden_state"], expected, atol=1e-4)
        np.testing.assert_allclose(together[n]["last_hidden_state"], expected, atol=1e-4)


@pytest.mark.parametrize("form", ["onnx", pytest.param("python", marks=pytest.mark.slow)])
def test_encoder_of_t5_equals_transformers(tmp_path, form):
    weights = encoders.save_t5_encoder(tmp_path / "weights", "Model")
    assert task_of(weights) == "feature-extraction"
    served = answers(weights, tmp_path, "feature-extraction", form)
    model = transformers.T5EncoderModel.from_pretrained(weights)
    for expected, answer in zip(outputs(model, weights, "last_hidden_state"), served, strict=True):
        np.testing.assert_allclose(answer["last_hidden_state"][:, : expected.shape[1]], expected, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "form"),
    [("Question", "onnx"), ("Context", "python"), pytest.param("Context", "onnx", marks=pytest.mark.slow)],
)
def test_encoders_of_dpr_equal_transformers(tmp_path, kind, form):
    weights = encoders.save_dpr(tmp_path / "weights", f"{kind}Encoder", projection_dim=16)
    assert task_of(weights) == "sentence-similarity"
    served = answers(weights, tmp_path, "sentence-similarity", form)
    model = getattr(transformers, f"DPR{kind}Encoder").from_pretrained(weights)
    for expected, answer in zip(outputs(model, weights, "pooler_output"), served, strict=True):
        assert expected.shape == (1, 16)
        np.testing.assert_allclose(answer["sentence_embedding"], expected, atol=1e-4)


def answers(weights: Path, folder: Path, task: str, form: str) -> list[dict[str, np.ndarray]]:
    """Return the answers of the assembled model to all texts, which arrive at once."""
    check_model("m", weights, trust_remote_code=False)
    check_task("m", weights, task, trust_remote_code=False)
    run_recipe(RECIPES[task], Job("m", task, form, weights, movable=False, folder=folder), "m")
    with served_system("m", folder) as system:
        return system.together([{"input_text": np.array([[text.encode()]], np.object_)} for text in TEXTS])


@torch.inference_mode()
def outputs(model: transformers.PreTrainedModel, weights: Path, name: str) -> list[np.ndarray]:
    """Return what transformers computes of each text alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    accepted = inspect.signature(model.forward).parameters
    rows = [tokenizer(text, truncation=True, max_length=encoders.POSITIONS, return_tensors="pt") for text in TEXTS]
    return [model(**{key: row[key] for key in row if key in accepted})[name].numpy() for row in rows]
