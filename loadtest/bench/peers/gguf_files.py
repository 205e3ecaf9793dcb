"""Write a checkpoint as a GGUF file, as llama.cpp's converter does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type


def write_gguf(
    checkpoint: Path,
    file: Path,
    kind: Type = Type.F16,
    *,
    architecture: str = "",
    split: str = "gpt-2",
    keys: Mapping[str, float | str] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    without: str = "",
) -> Path:
    """Write the matrices in this type. `keys` and `tensors` are added, `without` is left out."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).float()  # exact in F16
    config = model.config
    architecture = architecture or config.model_type
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("a tiny model")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    for key, value in (keys or {}).items():
        add: Callable[[str, Any], None] = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"{architecture}.{key}", value)
    add_tokenizer(writer, checkpoint, split)
    for name, data in (converted(model) | dict(tensors or {})).items():
        stored = kind if data.ndim > 1 else Type.F32  # norms and biases
        if name != without:
            writer.add_tensor(name, gguf.quantize(data, stored), raw_dtype=stored)
    file.parent.mkdir(parents=True, exist_ok=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path, split: str) -> None:
    content = json.loads((checkpoint / "tokenizer.json").read_text())
    special = {token["id"] for token in content["added_tokens"]}
    tokens = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(tokens))]
    )
    # llama.cpp needs a merge also for a vocabulary of words, whose ids it can then turn to text.
    merges = content["model"].get("merges") or [tokens[:2]]
    writer.add_token_merges([" ".join(merge) for merge in merges])
    if "<s>" in tokens:
        writer.add_bos_token_id(tokens.index("<s>"))
        writer.add_eos_token_id(tokens.index("</s>"))
        writer.add_add_bos_token(True)


def converted(model: transformers.PreTrainedModel) -> dict[str, np.ndarray]:
    """Return the tensors by llama.cpp's names."""
    config = model.config
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    tensors = {}
    for name, tensor in model.state_dict().items():
        data = interleaved(name, tensor, config) if config.model_type == "llama" else tensor
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias")) or name] = data.numpy()
    if config.rope_parameters["rope_type"] == "llama3":
        angles = config.rope_parameters["rope_theta"] ** -np.arange(0, 1, 2 / config.head_dim)
        tensors["rope_freqs.weight"] = (angles / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    return tensors


def interleaved(name: str, tensor: torch.Tensor, config: transformers.PreTrainedConfig) -> torch.Tensor:
    """Order the rows of a Llama's queries and keys as llama.cpp rotates them: pairs side by side."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if not (count := next((count for part, count in heads.items() if part in name), 0)):
        return tensor
    return tensor.reshape(count, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape).contiguous()
