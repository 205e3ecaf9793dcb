"""Shrink the configuration of any architecture of transformers, by the names of its fields."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from typing import Any

POSITIONS = 64
SIDE = 32  # of an image
WIDTH = 32
SPREAD = 0.3  # wide enough that an answer depends on the whole input
# The names of a field -> its value. A window is shorter than the texts, so that it cuts them.
SIZES: tuple[tuple[str, float], ...] = (
    (r"(num_)?(hidden_|encoder_|decoder_|n_)?layers?|n_layers?|num_(hidden|encoder|decoder)_layers", 2),
    (r".*(key_value|kv)_heads|multi_query_group_num", 2),
    (r"n_heads?|num_heads|(num_|encoder_|decoder_)?attention_heads|num_attention_heads", 4),
    (r".*head_dim|d_kv|rotary_dim", 8),
    (r"q_lora_rank|kv_lora_rank", 16),
    (r"hidden_size|d_model|n_embd|dim|emb(ed(ding)?)?_(dim|size)|word_embed_proj_dim|.*_embed_dim", WIDTH),
    (r"projection_dim", 16),
    (r"(\w+_)?intermediate_size|d_ff|(\w+_)?ffn_dim|n_inner|hidden_dim|d_inner|ffn_hidden_size", 64),
    # Some architectures count positions from the padding token's id.
    (r"max_position_embeddings|n_positions|n_ctx|max_seq(uence)?_len(gth)?|(tpu_short_)?seq_length", POSITIONS + 2),
    (r"(num|n|moe_num|num_local|n_routed)_?(local_|routed_)?experts", 4),
    (r"num_experts_per_tok(en)?|moe_(top_?)?k", 2),
    (r"(n|num)_(group|expert_group)|topk_group|first_k_dense_replace", 1),
    (r"sliding_window|local_attention|attention_chunk_size|window_size", 16),
    (r"hidden_size_per_layer_input|hash_\w+", 8),
    (r"initializer_range|init_std", SPREAD),
    (r"image_size", SIDE),
    (r"patch_size", 8),
)  # fmt: skip
STAGES = {"depths": [1, 1], "hidden_sizes": [16, 32]}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
LATENT = {"num_key_value_heads": 4}  # latent attention shares one key among all heads
# The type of a model -> the values of fields that depend on one another.
NEEDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "minicpm3", "mistral4"), LATENT),
    **dict.fromkeys(("qwen3_5_text", "qwen3_next"), HYBRID),
    "bit": STAGES | {"embedding_size": 16, "layer_type": "preactivation", "num_groups": 4},
    "convnext": STAGES | {"num_stages": 2},
    "convnextv2": STAGES | {"num_stages": 2},
    "dinov3_convnext": STAGES,
    "esmc": {"num_key_value_heads": None},
    "focalnet": {"depths": [1, 1], "embed_dim": 16, "hidden_sizes": [16, 32]},
    "funnel": {"block_sizes": [1, 1]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "regnet": STAGES | {"embedding_size": 16, "groups_width": 8},
    "resnet": STAGES | {"embedding_size": 16},
    "swin": {"depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "embed_dim": 16},
    "swinv2": {"depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "embed_dim": 16},
}


def small_config(config_class: Any, ids: dict[str, int | None], **fields_of_row: Any) -> Any:
    """Return a configuration of the class with small sizes, and with these ids of the tokenizer."""
    return config_class(**small_fields(config_class, ids) | fields_of_row)


def small_fields(config_class: Any, ids: dict[str, int | None]) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    for field in fields(config_class):
        default = None if field.default is MISSING else field.default
        if field.name in ids:
            sizes[field.name] = ids[field.name]
        elif not isinstance(default, bool | tuple | list | dict | str):
            size = next((size for names, size in SIZES if re.fullmatch(names, field.name)), None)
            sizes |= {field.name: size} if size is not None else {}
    for name, part in config_class.sub_configs_defaults.items():
        if hasattr(part.config_class, "attribute_map"):
            sizes[name] = small_fields(part.config_class, ids) | {"model_type": part.model_type}
    return sizes | NEEDS.get(config_class.model_type, {})
