"""Save causal language models with their real architectures and tokenizers, small enough to build in a second.

Their weights vary more than for training, so that the generated text depends on the whole prompt.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import ByteLevelBPETokenizer
from tokenizers.processors import TemplateProcessing
from transformers.models.auto import modeling_auto

from loadtest.bench.architectures.small_models import save_network

CONTEXT = 256
RANKED = 400  # tokens of a reranker, whose template has some 250 of them
SPREAD = 0.5

LINES = """\
I am going to the market with my brother, and then we go home.
Which battery fits the small torch? The second one, she said.
It was raining when the train left the station at half past nine.
Dynamic batching serves many requests together, each with its own answer.
비 그친 뒤 골목에 빵 굽는 냄새가 퍼진다. 날씨가 좋다.
Grüße aus München: schönes Wetter, süße Brötchen! ☀ 🥖
"""


WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
# The architectures of 2025 and 2026, by model_type: fields of their configs. The windows are shorter than the texts.
MODERN: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {"moe_intermediate_size": 16},
    "qwen3_5_text": dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    "gemma2": WINDOWS,
    "gemma3_text": WINDOWS,
    "gemma4_text": {
        "global_head_dim": 16,
        "vocab_size_per_layer_input": 400,
        "hidden_size_per_layer_input": 256,
        **WINDOWS,
    },
    "gpt_oss": WINDOWS,
    "granite": {"attention_multiplier": 0.3, "logits_scaling": 2.0},
    "llama4_text": {"num_local_experts": 2, "attention_chunk_size": 8},
    "ministral": WINDOWS,
    "ministral3": {},
    "phi3": {"sliding_window": 8},
    "smollm3": {},
}
OLDER: dict[str, dict[str, Any]] = {
    "bloom": {},
    "falcon": {"ffn_hidden_size": 128},
    "gemma": {"pad_token_id": 0},
    "gpt_neox": {},
    "llama": {},
    "mistral": {"sliding_window": 4096},
    "minimax": {"num_local_experts": 2, "block_size": 8, "layer_types": ["linear_attention", "full_attention"]},
    "mixtral": {"num_local_experts": 4},
    "persimmon": {"tie_word_embeddings": False},
    "qwen2": {},
    "recurrent_gemma": {},
    "roberta": {"is_decoder": True, "pad_token_id": 1, "type_vocab_size": 1},
    "rwkv": {"attention_hidden_size": 32},
    "xlnet": {"n_head": 4, "d_head": 8},
}
# The token that ends a text, and the one that begins it.
TOKENS = {"falcon": ("<|endoftext|>", None), "persimmon": ("|ENDOFTEXT|", "<s>")}


def save_decoder(folder: Path, kind: str, context: int = CONTEXT, head: str = "CAUSAL_LM", **options: Any) -> Path:
    """Save a decoder with this model_type."""
    tokenizer = byte_level_bpe(*TOKENS.get(kind, ("</s>", "<s>")))
    architecture = getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES")[kind]
    return save(folder, architecture, tokenizer, context, **(OLDER | MODERN)[kind] | options)


save_bloom = partial(save_decoder, kind="bloom")
save_falcon = partial(save_decoder, kind="falcon")
save_gemma = partial(save_decoder, kind="gemma")
save_gpt_neox = partial(save_decoder, kind="gpt_neox")
save_llama = partial(save_decoder, kind="llama")
save_mistral = partial(save_decoder, kind="mistral")
save_persimmon = partial(save_decoder, kind="persimmon")
save_qwen2 = partial(save_decoder, kind="qwen2")


def save_longrope(folder: Path) -> Path:
    """Save a Phi-3 whose positions turn in another way after 64 tokens."""
    save_decoder(folder, "phi3")
    path = folder / "config.json"
    original = {"original_max_position_embeddings": 64}
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "factor": 4.0}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0} | original | factors
    path.write_text(json.dumps(json.loads(path.read_text()) | original | {"rope_parameters": rope}))
    return folder


def save_llama_classifier(folder: Path, labels: int = 3, pad: bool = True) -> Path:
    """Save a decoder that classifies a text by its last token, which it finds by the id of the padding token."""
    ids = {"pad_token_id": 1 if pad else None}  # </s>
    return save_llama(
        folder, context=64, head="SEQUENCE_CLASSIFICATION", num_labels=labels, num_key_value_heads=4, **ids
    )


def save_qwen3_reranker(folder: Path) -> Path:
    """Save what Qwen3-Reranker was published as: a language model, whose tokenizer has the chat template of Qwen3."""
    tokenizer = byte_level_bpe("<|endoftext|>")
    tokenizer.add_tokens(["yes", "no", "<think>", "</think>"])
    tokenizer.add_special_tokens(
        {"pad_token": "<|endoftext|>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    )
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message.role == 'user' %}"
        "<|im_start|>user\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    )
    return save(folder, "Qwen3ForCausalLM", tokenizer, RANKED, pad_token_id=None)


def save_llama_for_questions(folder: Path) -> Path:
    return save_llama(folder, context=64, head="QUESTION_ANSWERING", num_key_value_heads=4)


def save_gpt2(folder: Path, context: int = CONTEXT, width: int = 32, layers: int = 2, heads: int = 4) -> Path:
    tokenizer = byte_level_bpe("<|endoftext|>", kind=transformers.GPT2TokenizerFast)
    size = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_inner": None}
    return save(folder, "GPT2LMHeadModel", tokenizer, context, **size)


def byte_level_bpe(eos: str, bos: str | None = None, kind: type = transformers.PreTrainedTokenizerFast) -> Any:
    """Train a tokenizer on LINES. With `bos`, every text begins with that token, as for Llama and Mistral."""
    tokenizer = ByteLevelBPETokenizer()
    special = [eos] if bos is None else [bos, eos]
    tokenizer.train_from_iterator(LINES.splitlines(), vocab_size=400, special_tokens=special, show_progress=False)
    if bos:
        pair = (bos, tokenizer.token_to_id(bos))
        tokenizer._tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[pair])
    return kind(tokenizer_object=tokenizer._tokenizer, bos_token=bos or eos, eos_token=eos, unk_token=eos)


def save(folder: Path, architecture: str, tokenizer: Any, context: int, **options: Any) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return save_network(folder, architecture, tokenizer, context, initializer_range=SPREAD, **options)
