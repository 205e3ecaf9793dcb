"""Quantized language models: served as they are by vLLM, and dequantized for the engines of a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, CohereTokenizer, GPTNeoXTokenizer

from export.assemble import assemble_all
from export.catalogue import Job, Outcome
from export.recipes.language import quantized
from export.recipes.language.quantized import DIGITS_APART, convert
from export.recipes.language.recipe import assemble
from export.record import read_record
from loadtest.bench.peers import gguf_files
from tests.support.checkpoints import language
from triton_transformers.corpus import MIXED
from triton_transformers.settings import Settings, UserError

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


def test_model_that_memory_cannot_hold_in_16_bits_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(quantized, "MEMORY", 1e9)
    with pytest.raises(UserError, match=r"in 16 bits it takes about .* GB of memory"):
        made(tmp_path, checkpoint(tmp_path / "weights", "fp8")[0], "python")


# --- GGUF files: served like the checkpoint that transformers reads from the file -------------------------------------

SAVES = {"llama": language.save_llama, "qwen2": language.save_qwen2}
PROMPTS = ("I am going to", "Grüße  aus 1234 München, don't!")


def generated(folder: Path, tokenizer_folder: Path, **options: object) -> list[str]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, **options)
    inputs = [tokenizer(prompt, return_tensors="pt") for prompt in PROMPTS]
    texts = [model.generate(**tokens, do_sample=False, max_new_tokens=16)[0] for tokens in inputs]
    return [tokenizer.decode(text) for text in texts]


def written(tmp_path: Path, kind: Type = Type.F16, save: Callable = language.save_llama, **more) -> Path:
    return gguf_files.write_gguf(save(tmp_path / "original"), tmp_path / "stored/model.gguf", kind, **more)


@pytest.mark.parametrize("kind", [Type.F16, Type.Q8_0], ids=["F16", "Q8_0"])
@pytest.mark.parametrize("architecture", SAVES)
def test_checkpoint_generates_what_transformers_generates_from_the_file(tmp_path, architecture, kind):
    split = "qwen2" if architecture == "qwen2" else "llama-bpe"
    file = written(tmp_path, kind, SAVES[architecture], split=split)
    assert convert(file, tmp_path / "converted") == [kind.name]
    expected = generated(file.parent, file.parent, gguf_file=file.name)
    assert generated(tmp_path / "converted", tmp_path / "converted") == expected
    if kind == Type.F16:
        assert generated(tmp_path / "original", tmp_path / "original") == expected
    saved = AutoTokenizer.from_pretrained(tmp_path / "converted")
    original = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    texts = [*MIXED.texts, *PROMPTS]
    assert saved(texts).input_ids == original(texts).input_ids


def test_system_of_a_gguf_file_is_assembled_and_prints_that(tmp_path, capsys):
    file = written(tmp_path, Type.Q8_0)
    chosen = {"SYSTEMS": "mine", "SOURCE": str(file.parent), "FORMAT": "python"}
    repository = tmp_path / "models"
    assemble_all(Settings.load().replace(MODEL_REPOSITORY=str(repository), **chosen))
    assert "weights in 16 bits, dequantized from GGUF (Q8_0)" in " ".join(capsys.readouterr().out.split())
    assert read_record("mine", repository).task == "text-generation"
    expected = generated(file.parent, file.parent, gguf_file=file.name)
    assert generated(repository / "mine/1", repository / "mine/1") == expected
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert not list(repository.glob(".assembling-*"))


def test_file_is_parsed_once(tmp_path, monkeypatch):
    file = written(tmp_path)
    parsed = []

    class Counting(gguf.GGUFReader):
        def __init__(self, path: str) -> None:
            parsed.append(path)
            super().__init__(path)

    monkeypatch.setattr(gguf, "GGUFReader", Counting)
    convert(file, tmp_path / "converted")
    assert parsed == [str(file)]


def test_rope_of_llama_3_is_recognized_by_its_factors(tmp_path):
    settings = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0}
    settings |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    file = written(tmp_path, save=lambda folder: language.save_llama(folder, rope_parameters=settings))
    convert(file, tmp_path / "converted")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "converted").config.rope_parameters == settings


@pytest.mark.parametrize(
    ("split", "original"),
    [*((name, CohereTokenizer) for name in DIGITS_APART), ("mpt", GPTNeoXTokenizer), ("olmo", GPTNeoXTokenizer)],
)
def test_texts_are_split_as_by_the_original_tokenizer(tmp_path, split, original):
    convert(written(tmp_path, split=split), tmp_path / "converted")
    rule, expected = (
        tokenizer.backend_tokenizer.pre_tokenizer
        for tokenizer in (AutoTokenizer.from_pretrained(tmp_path / "converted"), original())
    )
    for text in (*MIXED.texts, *PROMPTS, "room 12½, x², 2 026, ٣٤"):
        assert rule.pre_tokenize_str(text) == expected.pre_tokenize_str(text)


def refusal(file: Path, folder: Path) -> str:
    with pytest.raises(UserError) as error:
        convert(file, folder)
    return str(error.value)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"keys": {"rope.scaling.type": "yarn"}}, "sets llama.rope.scaling.type, which transformers does not read"),
        ({"keys": {"attention.sliding_window": 64.0}}, "sets llama.attention.sliding_window, which"),
        ({"split": "bloom"}, "sets tokenizer.ggml.pre (bloom), which transformers does not read"),
        ({"tensors": {"rope_freqs.weight": np.full(4, 3, np.float32)}}, "has other tensors than transformers reads"),
        ({"tensors": {"blk.0.attn_q.bias": np.ones(32, np.float32)}}, "has other tensors than transformers reads"),
        ({"without": "blk.1.ffn_up.weight"}, "has other tensors than transformers reads for a llama"),
        ({"tensors": {"blk.0.ffn_up.weight": np.ones((32, 32), np.float32)}}, "does not read it as a language model ("),
        ({"architecture": "rwkv7"}, "is a rwkv7, and transformers 5"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_file_that_transformers_would_misread_is_refused(tmp_path, more, sentence):
    assert sentence in refusal(written(tmp_path, **more), tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


def test_file_that_memory_cannot_hold_in_16_bits_or_that_is_cut_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(quantized, "MEMORY", 1e9)
    file = written(tmp_path)
    assert "in 16 bits it takes about" in refusal(file, tmp_path / "converted")
    file.write_bytes(file.read_bytes()[:5000])
    assert "is damaged, or no GGUF: download it again" in refusal(file, tmp_path / "converted")
