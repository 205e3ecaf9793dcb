"""Vectors of a decoder's tokens in ONNX equal transformers': the graph numbers the tokens itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from scripts.common.corpus import MIXED
from scripts.models.assemble import run_recipe
from scripts.models.catalogue import RECIPES, Job
from scripts.models.exporters.served import served_system
from tests.support.checkpoints import encoders

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
