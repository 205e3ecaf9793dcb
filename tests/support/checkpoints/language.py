"""Save causal language models with their real architectures and tokenizers, small enough to build in a second.

Their weights vary more than for training, so that the generated text depends on the whole prompt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import ByteLevelBPETokenizer
from tokenizers.processors import TemplateProcessing

CONTEXT = 256
RANKED = 400  # tokens of a reranker, whose template has some 250 of them
SPREAD = 0.5
SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": CONTEXT}

LINES = """\
I am going to the market with my brother, and then we go home.
Which battery fits the small torch? The second one, she said.
It was raining when the train left the station at half past nine.
Dynamic batching serves many requests together, each with its own answer.
비 그친 뒤 골목에 빵 굽는 냄새가 퍼진다. 날씨가 좋다.
Grüße aus München: schönes Wetter, süße Brötchen! ☀ 🥖
"""


def save_falcon(folder: Path, context: int = CONTEXT) -> Path:
    tokenizer = byte_level_bpe("<|endoftext|>")
    config = transformers.FalconConfig(
        **SIZE | {"max_position_embeddings": context},
        **vocabulary(tokenizer),
        initializer_range=SPREAD,
        alibi=False,
        multi_query=True,
        parallel_attn=True,
        new_decoder_architecture=False,
        bias=False,
    )
    return save(folder, transformers.FalconForCausalLM, config, tokenizer)


def save_mistral(folder: Path, context: int = CONTEXT) -> Path:
    tokenizer = byte_level_bpe("</s>", bos="<s>")
    config = transformers.MistralConfig(
        **SIZE | {"max_position_embeddings": context},
        **vocabulary(tokenizer),
        initializer_range=SPREAD,
        intermediate_size=64,
        num_key_value_heads=2,
    )
    return save(folder, transformers.MistralForCausalLM, config, tokenizer)


def save_persimmon(folder: Path, context: int = CONTEXT) -> Path:
    tokenizer = byte_level_bpe("|ENDOFTEXT|", bos="<s>")
    config = transformers.PersimmonConfig(
        **SIZE | {"max_position_embeddings": context},
        **vocabulary(tokenizer),
        initializer_range=SPREAD,
        intermediate_size=64,
        tie_word_embeddings=False,
    )
    return save(folder, transformers.PersimmonForCausalLM, config, tokenizer)


def save_llama(folder: Path, **options: Any) -> Path:
    return save_decoder(
        folder, transformers.LlamaConfig, transformers.LlamaForCausalLM, num_key_value_heads=2, **options
    )


def save_qwen2(folder: Path) -> Path:
    return save_decoder(folder, transformers.Qwen2Config, transformers.Qwen2ForCausalLM, num_key_value_heads=2)


def save_gemma(folder: Path) -> Path:
    return save_decoder(
        folder, transformers.GemmaConfig, transformers.GemmaForCausalLM, num_key_value_heads=2, head_dim=8
    )


def save_gpt_neox(folder: Path) -> Path:
    return save_decoder(folder, transformers.GPTNeoXConfig, transformers.GPTNeoXForCausalLM)


def save_bloom(folder: Path) -> Path:
    tokenizer = byte_level_bpe("</s>", bos="<s>")
    config = transformers.BloomConfig(
        **vocabulary(tokenizer), hidden_size=32, n_layer=2, n_head=4, initializer_range=SPREAD
    )
    return save(folder, transformers.BloomForCausalLM, config, tokenizer)


def save_decoder(folder: Path, config_class: type, model_class: type, **options: Any) -> Path:
    tokenizer = byte_level_bpe("</s>", bos="<s>")
    config = config_class(**SIZE, **vocabulary(tokenizer), initializer_range=SPREAD, intermediate_size=64, **options)
    return save(folder, model_class, config, tokenizer)


# The architectures of 2025 and 2026, by model_type. The windows are shorter than the tests' texts.
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODERN: dict[str, dict[str, object]] = {
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "qwen3_5_text": {
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    },
    "gemma2": {"head_dim": 8, **WINDOWS},
    "gemma3_text": {"head_dim": 8, **WINDOWS},
    "gemma4_text": {"head_dim": 8, "global_head_dim": 16, "vocab_size_per_layer_input": 400, **WINDOWS},
    "gpt_oss": {"head_dim": 8, **WINDOWS, **EXPERTS},
    "granite": {"attention_multiplier": 0.3, "logits_scaling": 2.0},
    "llama4_text": {"head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 2, "attention_chunk_size": 8},
    "ministral": {"head_dim": 8, **WINDOWS},
    "ministral3": {"head_dim": 8},
    "phi3": {"sliding_window": 8},
    "smollm3": {},
}


def save_modern(folder: Path, kind: str) -> Path:
    tokenizer = byte_level_bpe("</s>", bos="<s>")
    options = SIZE | vocabulary(tokenizer) | {"num_key_value_heads": 2, "intermediate_size": 64, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(kind, **options | MODERN[kind], initializer_range=SPREAD)
    architecture = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return save(folder, architecture, config, tokenizer)


def save_longrope(folder: Path) -> Path:
    """Save a Phi-3 whose positions turn in another way after 64 tokens."""
    save_modern(folder, "phi3")
    path = folder / "config.json"
    original = {"original_max_position_embeddings": 64}
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "factor": 4.0}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0} | original | factors
    path.write_text(json.dumps(json.loads(path.read_text()) | original | {"rope_parameters": rope}))
    return folder


def save_llama_classifier(folder: Path, labels: int = 3, pad: bool = True) -> Path:
    """Save a decoder that classifies a text by its last token, which it finds by the id of the padding token."""
    tokenizer = byte_level_bpe("</s>", bos="<s>")
    config = transformers.LlamaConfig(
        **SIZE | {"max_position_embeddings": 64},
        **vocabulary(tokenizer),
        initializer_range=SPREAD,
        intermediate_size=64,
        num_labels=labels,
        pad_token_id=tokenizer.eos_token_id if pad else None,
    )
    return save(folder, transformers.LlamaForSequenceClassification, config, tokenizer)


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
    size = {"max_position_embeddings": RANKED, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
    config = transformers.Qwen3Config(**SIZE | size, **vocabulary(tokenizer), initializer_range=SPREAD)
    return save(folder, transformers.Qwen3ForCausalLM, config, tokenizer)


def save_llama_for_questions(folder: Path) -> Path:
    tokenizer = byte_level_bpe("</s>", bos="<s>")
    size = SIZE | {"max_position_embeddings": 64}
    config = transformers.LlamaConfig(**size, **vocabulary(tokenizer), initializer_range=SPREAD, intermediate_size=64)
    return save(folder, transformers.LlamaForQuestionAnswering, config, tokenizer)


def save_gpt2(folder: Path, context: int = CONTEXT, width: int = 32, layers: int = 2, heads: int = 4) -> Path:
    tokenizer = byte_level_bpe("<|endoftext|>", transformers.GPT2TokenizerFast)
    config = transformers.GPT2Config(
        **vocabulary(tokenizer),
        initializer_range=SPREAD,
        n_positions=context,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
    )
    return save(folder, transformers.GPT2LMHeadModel, config, tokenizer)


def byte_level_bpe(
    eos: str, kind: type = transformers.PreTrainedTokenizerFast, bos: str | None = None
) -> transformers.PreTrainedTokenizerFast:
    """Train a tokenizer on LINES. With `bos`, every text begins with that token, as for Llama and Mistral."""
    tokenizer = ByteLevelBPETokenizer()
    special = [eos] if bos is None else [bos, eos]
    tokenizer.train_from_iterator(LINES.splitlines(), vocab_size=400, special_tokens=special, show_progress=False)
    if bos:
        pair = (bos, tokenizer.token_to_id(bos))
        tokenizer._tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[pair])
    return kind(tokenizer_object=tokenizer._tokenizer, bos_token=bos or eos, eos_token=eos, unk_token=eos)


def vocabulary(tokenizer: transformers.PreTrainedTokenizerFast) -> dict[str, int]:
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def save(
    folder: Path,
    architecture: type,
    config: transformers.PretrainedConfig,
    tokenizer: transformers.PreTrainedTokenizerFast,
) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = architecture(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
