"""Quantized language models: served as they are by vLLM, and dequantized for the engines of a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.checkpoints import language
from triton_transformers.models.catalogue import Job, Outcome
from triton_transformers.models.exporters import quantized
from triton_transformers.models.exporters.generation import assemble
from triton_transformers.settings import UserError

pytestmark = pytest.mark.usefixtures("one_thread")

Tensors = dict[str, torch.Tensor]
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FP4 = torch.cat([FP4, -FP4])


def fp8(name: str, weight: torch.Tensor) -> tuple[Tensors, Tensors]:
    scale = weight.abs().amax() / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return {name: stored, f"{name}_scale_inv": scale.reshape(1, 1)}, {name: stored.float() * scale}


def int4(name: str, weight: torch.Tensor) -> tuple[Tensors, Tensors]:
    """Pack eight numbers of four bits into each integer, as llm-compressor does."""
    rows, columns = weight.shape
    groups = weight.reshape(rows, -1, 16)
    scale = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16().float()
    stored = (groups / scale).round().clamp(-8, 7)
    digits = stored.reshape(rows, columns // 8, 8).int() + 8
    packed = sum(digits[..., i] << 4 * i for i in range(8)).int()
    tensors = {"packed": packed, "scale": scale[..., 0].bfloat16(), "shape": torch.tensor([rows, columns])}
    expected = (stored * scale).reshape(rows, columns)
    return {f"{name}_{key}": value for key, value in tensors.items()}, {name: expected}


def mxfp4(name: str, weight: torch.Tensor) -> tuple[Tensors, Tensors]:
    """Store experts in blocks of 32 numbers, two to a byte, which share a power of two."""
    experts, rows, columns = weight.shape
    digits = torch.randint(16, (experts, columns, rows // 32, 32), generator=torch.Generator().manual_seed(1))
    blocks = (digits[..., ::2] | digits[..., 1::2] << 4).to(torch.uint8)
    scales = torch.full((experts, columns, rows // 32), 126, dtype=torch.uint8)
    expected = (FP4[digits] / 2).reshape(experts, columns, rows).transpose(1, 2)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, {name: expected}


LLM_COMPRESSOR = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True},
        }
    },
}
METHODS: dict[str, tuple[str, dict, Callable]] = {
    "fp8": ("llama", {"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8),
    "compressed-tensors": ("llama", LLM_COMPRESSOR, int4),
    "mxfp4": ("gpt_oss", {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4),
}


def checkpoint(folder: Path, method: str) -> tuple[Path, Tensors]:
    """Return a quantized checkpoint, and the weights that it stands for."""
    architecture, settings, quantize = METHODS[method]
    if architecture == "llama":
        language.save_llama(folder)
    else:
        language.save_decoder(folder, architecture)
    stored, expected = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        is_expert = name.endswith(("gate_up_proj", "down_proj"))
        if is_expert if method == "mxfp4" else name.endswith("proj.weight"):
            tensors, values = quantize(name, weight)
        else:
            tensors = values = {name: weight.bfloat16()}
        stored |= {key: tensor.contiguous() for key, tensor in tensors.items()}
        expected |= values
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return mark(folder, settings), expected


def mark(folder: Path, settings: dict[str, object]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings, "dtype": "bfloat16"}))
    return folder


def made(tmp_path: Path, weights: Path, form: str) -> tuple[Outcome, Path]:
    folder = tmp_path / "made"
    folder.mkdir()
    outcome = assemble(Job("mine", "text-generation", form, weights, False, folder))
    assert sorted(path.name for path in folder.iterdir()) == ["mine", "mine_stream"]
    return outcome, folder / "mine/1"


@pytest.mark.parametrize("method", METHODS)
def test_transformers_gets_the_weights_in_16_bits(tmp_path, method):
    weights, expected = checkpoint(tmp_path / "weights", method)
    outcome, folder = made(tmp_path, weights, "python")
    assert f"weights in 16 bits, dequantized from {method}" in outcome.summary
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight.float(), expected[name].float(), rtol=0.01, atol=1e-3)


def test_openvino_gets_the_weights_in_16_bits(tmp_path):
    outcome, folder = made(tmp_path, checkpoint(tmp_path / "weights", "compressed-tensors")[0], "openvino")
    assert "weights in 16 bits, dequantized from compressed-tensors" in outcome.summary
    assert (folder / "openvino_model.bin").exists()


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8"])
def test_vllm_gets_the_weights_as_they_are(tmp_path, method):
    weights = mark(language.save_llama(tmp_path / "weights"), {"quant_method": method, "bits": 4})
    _, folder = made(tmp_path, weights, "vllm")
    assert (folder / "model.safetensors").read_bytes() == (weights / "model.safetensors").read_bytes()
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == method
    assert json.loads((folder / "model.json").read_text())["dtype"] == "bfloat16"


def test_method_that_only_vllm_reads_is_refused_elsewhere(tmp_path):
    weights = mark(language.save_llama(tmp_path / "weights"), {"quant_method": "gptq", "bits": 4})
    with pytest.raises(UserError, match=r"is quantized \(gptq\), which only vLLM reads: set PROFILE=cuda"):
        made(tmp_path, weights, "python")


def test_model_that_memory_cannot_hold_in_16_bits_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(quantized, "MEMORY", 1e9)
    with pytest.raises(UserError, match=r"in 16 bits it takes about .* GB of memory"):
        made(tmp_path, checkpoint(tmp_path / "weights", "fp8")[0], "python")
