"""The conversion of language models to OpenVINO."""

from __future__ import annotations

import contextlib

import pytest
import torch
from transformers import AutoModelForCausalLM

from export.recipes.language.graph import Unsupported, convert
from tests.support.checkpoints import language


@pytest.mark.parametrize("is_supported", [True, False], ids=["converted", "refused"])
def test_conversion_leaves_products_to_other_models(tmp_path, monkeypatch, is_supported):
    """OpenVINO replaces torch.bmm while it traces a model in 16 bits."""
    model = AutoModelForCausalLM.from_pretrained(language.save_llama(tmp_path), dtype=torch.bfloat16)
    if not is_supported:
        monkeypatch.setattr("export.recipes.language.graph.attention", refuse)
    with contextlib.nullcontext() if is_supported else pytest.raises(Unsupported):
        convert(model)
    assert torch.bmm(torch.ones(1, 1, 2), torch.ones(1, 2, 1)).item() == 2


def refuse(*_: object, **__: object) -> None:
    raise Unsupported("of a test")
