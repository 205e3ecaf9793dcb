"""The text half of CLIP in every format: what is served equals CLIPModel.get_text_features()."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from scripts.common.corpus import MIXED
from scripts.models.assemble import run_recipe
from scripts.models.catalogue import RECIPES, Job
from scripts.models.exporters.served import served_system
from tests.support.checkpoints import vision

pytestmark = pytest.mark.usefixtures("few_parity_texts")

TASK = "sentence-similarity"
TEXTS = [*MIXED.texts[:8], "a", "", "word " * 100, "<|endoftext|> after the end"]


@pytest.mark.parametrize(
    ("form", "legacy"), [("onnx", False), ("python", True), pytest.param("onnx", True, marks=pytest.mark.slow)]
)
@torch.inference_mode()
def test_text_features_equal_clip(tmp_path, form, legacy):
    weights = vision.save_clip(tmp_path / "weights", legacy)
    run_recipe(RECIPES[TASK], Job("words", TASK, form, weights, movable=False, folder=tmp_path), "words")
    requests = [{"input_text": np.array([[text.encode()]], np.object_)} for text in TEXTS]
    with served_system("words", tmp_path) as system:
        alone, together = system.alone(requests), system.together(requests)
    clip = transformers.CLIPModel.from_pretrained(weights)
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    for n, text in enumerate(TEXTS):
        expected = clip.get_text_features(**tokenizer(text, truncation=True, return_tensors="pt")).pooler_output.numpy()
        assert np.abs(expected).max() > 1e-3
        for answer in (alone[n], together[n]):
            np.testing.assert_allclose(answer["sentence_embedding"], expected, atol=1e-4)
