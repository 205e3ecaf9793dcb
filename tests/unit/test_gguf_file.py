"""GGUF files: served like the checkpoint that transformers reads from the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.checkpoints import language, llama_cpp
from triton_transformers.corpus import MIXED
from triton_transformers.models.assemble import assemble_all
from triton_transformers.models.exporters import quantized
from triton_transformers.models.exporters.quantized import convert
from triton_transformers.models.record import read_record
from triton_transformers.settings import Settings, UserError

pytestmark = pytest.mark.usefixtures("one_thread")

SAVES = {"llama": language.save_llama, "qwen2": language.save_qwen2}
PROMPTS = ("I am going to", "Grüße  aus 1234 München, don't!")


def generated(folder: Path, tokenizer_folder: Path, **options: object) -> list[str]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, **options)
    inputs = [tokenizer(prompt, return_tensors="pt") for prompt in PROMPTS]
    texts = [model.generate(**tokens, do_sample=False, max_new_tokens=16)[0] for tokens in inputs]
    return [tokenizer.decode(text) for text in texts]


def written(tmp_path: Path, kind: Type = Type.F16, save: Callable = language.save_llama, **more) -> Path:
    return llama_cpp.write_gguf(save(tmp_path / "original"), tmp_path / "stored/model.gguf", kind, **more)


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
    assemble_all(Settings.load().replace(**{"MODEL_REPOSITORY": str(repository)} | chosen))
    assert "weights in 16 bits, dequantized from GGUF (Q8_0)" in " ".join(capsys.readouterr().out.split())
    assert read_record("mine", repository).task == "text-generation"
    expected = generated(file.parent, file.parent, gguf_file=file.name)
    assert generated(repository / "mine/1", repository / "mine/1") == expected
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert not list(repository.glob(".assembling-*"))


def test_rope_of_llama_3_is_recognized_by_its_factors(tmp_path):
    settings = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0}
    settings |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    file = written(tmp_path, save=lambda folder: language.save_llama(folder, rope_parameters=settings))
    convert(file, tmp_path / "converted")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "converted").config.rope_parameters == settings


def refusal(file: Path, folder: Path) -> str:
    with pytest.raises(UserError) as error:
        convert(file, folder)
    return str(error.value)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"keys": {"rope.scaling.type": "yarn"}}, "sets llama.rope.scaling.type, which transformers does not read"),
        ({"keys": {"attention.sliding_window": 64.0}}, "sets llama.attention.sliding_window, which"),
        ({"split": "smollm"}, "sets tokenizer.ggml.pre (smollm), which transformers does not read"),
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
