"""Models of sentence-transformers: what their systems are made of, and what is refused.

tests/conformance/tasks compares their answers with those of the library.
"""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from export.check.served import backend_config, served_system
from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.unsupported import check_task
from export.recipes.text.sentences import PROMPT_INPUTS, SentenceModel
from tests.conformance.tasks.references import encodes
from tests.conformance.tasks.rows import PROMPTS, TEXTS, last_token, pooled
from tests.conformance.tasks.run import check, expect, tensors
from tests.support.checkpoints import encoders
from tests.support.served import assemble
from triton_transformers.settings import UserError

pytestmark = pytest.mark.usefixtures("stored")

save_router = partial(encoders.save_router, is_sparse=True)
save_prompted = last_token(save_plain=encoders.save_qwen3, **PROMPTS)


@pytest.mark.parametrize(
    ("save", "inputs"),
    [
        (save_prompted, PROMPT_INPUTS),
        (save_router, PROMPT_INPUTS),
        (pooled(), ["spans"]),  # only the mean of a text's tokens has parts that are means of spans
        (pooled(**PROMPTS), [*PROMPT_INPUTS, "spans"]),
        (pooled(pooling="cls"), []),
    ],
)
def test_system_has_the_inputs_that_its_model_reads(tmp_path, save, inputs):
    config = backend_config(assemble(save(tmp_path / "source"), tmp_path / "models") / "m/config.pbtxt")
    assert {tensor["name"] for tensor in config["input"]} == {"input_text", *inputs}


@pytest.mark.slow
def test_int8_keeps_prompts(tmp_path):
    source = save_prompted(tmp_path / "source")
    with served_system("m", assemble(source, tmp_path / "models", "onnx-int8")) as system:
        columns = {"input_text": TEXTS, "prompt_name": ["document"] * len(TEXTS)}
        (answer,) = system.together([tensors(columns)])
    vectors = [own["sentence_embedding"] for own in expect(encodes(source), columns)]
    assert (answer["sentence_embedding"] * vectors).sum(1).min() > 0.98


def test_rows_of_a_request_have_their_own_prompts(tmp_path):
    source = save_prompted(tmp_path / "source")
    with served_system("m", assemble(source, tmp_path / "models", "python")) as system:
        columns = {"input_text": TEXTS[:3], "prompt_name": ["", "query", "passage"]}
        (answer,) = system.together([tensors(columns)])
    check(answer, expect(encodes(source), columns))


def test_lost_prompt_is_refused(tmp_path, anew, monkeypatch):
    """Parity is checked against encode() itself, not against the bare transformer."""

    def save_without_default(self: SentenceModel, version: Path) -> None:
        (version / "prompts.json").write_text(json.dumps({"prompts": self.original.prompts}))

    monkeypatch.setattr(SentenceModel, "save_prompts", save_without_default)
    with pytest.raises(UserError, match="the served model answers differently from the original"):
        assemble(save_prompted(tmp_path / "source"), tmp_path / "models", "python")


@pytest.mark.parametrize(
    ("save", "error"),
    [
        (pooled(layers=["LayerNorm"]), r"FORMAT=python does not support .* \(Pooling, LayerNorm\): set FORMAT=onnx"),
        (save_router, r"m: FORMAT=python serves .* Router.*: set FORMAT=onnx"),
        (encoders.save_router, r"m: FORMAT=python serves .* Router.*: set FORMAT=onnx"),
    ],
)
def test_layers_that_only_a_graph_has_name_the_other_format(tmp_path, save, error):
    with pytest.raises(UserError, match=error):
        assemble(save(tmp_path / "source"), tmp_path / "models", "python")


def test_router_is_refused_for_another_task(tmp_path):
    with pytest.raises(UserError, match=r"m is for TASK=s.* and not for TASK=fill-mask"):
        check_task(Checkpoint("m", save_router(tmp_path / "source")), "fill-mask")


def test_weights_in_bfloat16_are_served_in_float32_like_encode(tmp_path):
    source = encoders.save_sentence_transformer(tmp_path / "source")
    weights = {name: tensor.bfloat16() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    assemble(source, tmp_path / "models", "python")  # raises if the answers differ
    config = (tmp_path / "models/m_encoder/config.pbtxt").read_text()
    assert re.search(r'"dtype"\s+value \{\s+string_value: "float32"', config)
    assert not (tmp_path / "models/m_encoder/1/prompts.json").exists()
