"""The perplexity of the original of a language model that is exported to OpenVINO."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from export.recipes.language.openvino import torch_perplexity
from tests.support.checkpoints import language

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = [[5, 9, 2, 7], [3, 8, 4, 6, 1]]


def test_model_in_16_bits_is_measured_in_32_and_stays_as_it_was(tmp_path):
    folder = language.save_llama(tmp_path / "weights")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    dtypes = []
    model.lm_head.register_forward_pre_hook(lambda _, inputs: dtypes.append(inputs[0].dtype))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    measured = torch_perplexity(model, TEXTS)
    assert set(dtypes) == {torch.float32}
    assert model.dtype == torch.bfloat16
    for name, value in model.state_dict().items():
        assert value.dtype == before[name].dtype and torch.equal(value, before[name])
    assert measured == pytest.approx(torch_perplexity(model.float(), TEXTS), rel=1e-6)
