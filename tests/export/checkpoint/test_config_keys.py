"""A checkpoint is refused if transformers would ignore a part of its config.json, and only then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import logging
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.config_keys import unread_keys
from export.checkpoint.unsupported import check_keys, check_model
from triton_transformers.settings import UserError

THETA = {"rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}}
LLAMA3 = {
    "rope_theta": 500000.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
TWO_THETAS = {
    "full_attention": {"rope_theta": 160000.0, "rope_type": "default"},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}  # fmt: skip
# The keys that transformers 4.57 writes with the defaults of its classes. `common` are those of every configuration.
RECORDED = json.loads((Path(__file__).parent / "recorded/config_keys_4.57.json").read_text())
# Models that are not served. Their keys are for other libraries, or do nothing.
OTHERS = {
    "edgetam", "edgetam_vision_model", "fast_vlm", "gemma4_assistant", "layoutlmv2", "layoutxlm", "nougat",
    "omdet-turbo", "pp_doclayout_v2", "pp_doclayout_v3", "rf_detr",
}  # fmt: skip
# Keys that earlier releases of transformers, sentence-transformers and others wrote into checkpoints on the Hub.
STRAYS = {
    "bert": {"_name_or_path": "bert-base-multilingual-cased", "directionality": "bidi", "gradient_checkpointing": False,
        "output_past": True, "pooler_fc_size": 768, "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3,
        "pooler_size_per_head": 128, "pooler_type": "first_token_transform", "position_embedding_type": "absolute",
        "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1.0"},
        "torch_dtype": "float32"},
    "distilbert": {"output_past": True, "sinusoidal_pos_embds": False, "tie_weights_": True,
        "finetuning_task": "sst-2"},
    "deberta-v2": {"position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True, "legacy": True},
    "modernbert": {"position_embedding_type": "absolute", "layer_norm_eps": 1e-05, "gradient_checkpointing": False},
    "gpt2": {"n_ctx": 1024, "predict_special_tokens": True, "task_specific_params": {"text-generation": {"x": 1}}},
    "starcoder2": {"activation_function": "gelu_pytorch_tanh", "mlp_type": "default", "norm_type": "layer_norm"},
    "t5": {"n_positions": 512, "output_past": True},
    "llama": {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"},
        "unsloth_fixed": True, "use_mrope": False, "adapters": {"adapters": {}, "config_map": {}},
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "layer_types": None},
    "falcon": {"auto_map": {"AutoConfig": "configuration_falcon.FalconConfig"}, "alibi": False,
        "apply_residual_connection_post_layernorm": False},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096,
        "sliding_window_size": 4096},
    "gpt_bigcode": {"inference_runner": 0, "pad_key_length": True, "pre_allocate_kv_cache": False,
        "validate_runner_input": True},
    "gptj": {"rotary": True, "scale_attn_weights": True, "summary_proj_to_labels": True, "summary_type": "cls_index",
        "summary_use_proj": True},
    "longformer": {"attention_mode": "longformer", "ignore_attention_mask": False},
    "phi3": {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False},
    "roberta": {"language": "english", "name": "Roberta"},
    "persimmon": {"num_key_value_heads": 64, "num_attention_heads": 64},
    "swin": {"path_norm": True},
    "clip": {"text_config": {"model_type": "clip_text_model", "bad_words_ids": None, "top_k": 50,
        "tf_legacy_loss": False}, "text_config_dict": None},
    "llava": {"ignore_index": -100},
    "qwen2_vl": {"vision_config": {"in_chans": 3, "patch_size": 14, "spatial_patch_size": 14}},
    "smolvlm": {"text_config": {"model_type": "llama", "perceiver_config": {"resampler_depth": 6},
        "pixel_shuffle_factor": 4, "qk_layer_norms": False, "neftune_noise_alpha": 0.0, "use_resampler": False}},
}  # fmt: skip


def names(saved: dict, kind: str) -> list[str]:
    return [key.name for key in unread_keys(saved, CONFIG_MAPPING[kind])]


def decisive(saved: dict, kind: str) -> list[str]:
    return [key.name for key in unread_keys(saved, CONFIG_MAPPING[kind]) if key.changes_numbers]


@pytest.mark.parametrize(
    ("kind", "keys", "unread"),
    [
        ("llama", THETA, []),
        ("llama", {"rope_parameters": LLAMA3}, []),
        ("modernbert", {"rope_parameters": TWO_THETAS}, []),
        ("bert", THETA, ["rope_parameters"]),
        ("bert", {"rope_theta": 1000000.0}, ["rope_theta"]),
        ("bert", {"rope_scaling": LLAMA3}, ["rope_scaling"]),
        ("bert", {"layer_types": ["full_attention"]}, []),
        ("bert", {"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types"]),
        ("modernbert", {"layer_types": ["full_attention"]}, []),
        ("llama", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ("qwen3", {"is_causal": False}, []),  # the masks that it imports from masking_utils read it
        ("bloom", {"is_causal": True}, []),
        ("gpt_neo", {"sliding_window": 64}, ["sliding_window"]),
        ("llama", {"rope_scaling": {"rope_type": "default", "newest_factor": 2}}, ["rope_scaling.newest_factor"]),
        ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ("gpt_neox", {"partial_rotary_factor": 0.5}, []),
        (
            "modernbert",
            {"rope_parameters": {"full_attention": {"rope_type": "default", "newest": 2}}},
            ["rope_parameters.full_attention.newest"],
        ),
        ("gemma4_text", {"per_layer_config": {"3": {"scale_attn": 2}}}, ["per_layer_config.3.scale_attn"]),
        ("siglip", {"vision_config": {"model_type": "siglip_vision_model"} | THETA}, ["vision_config.rope_parameters"]),
        ("clip", {"text_config": THETA}, ["text_config.rope_parameters"]),
        ("clip", {"text_config": {"model_type": ["clip_text_model"]} | THETA}, ["text_config.rope_parameters"]),
        ("bert", {"position_embedding_type": "relative_key"}, ["position_embedding_type"]),
        ("modernbert", {"position_embedding_type": "relative_key"}, ["position_embedding_type"]),
        ("modernbert", {"layer_norm_eps": 1e-3}, ["layer_norm_eps"]),
        ("gemma2", {"sliding_window_size": 1024}, ["sliding_window_size"]),
        ("falcon", {"apply_residual_connection_post_layernorm": True}, ["apply_residual_connection_post_layernorm"]),
        # Each family has a value of BART's old keys, which its class always takes.
        ("bart", {"normalize_before": False, "normalize_embedding": True, "static_position_embeddings": False}, []),
        ("bart", {"normalize_embedding": False}, ["normalize_embedding"]),
        ("bart", {"static_position_embeddings": True}, ["static_position_embeddings"]),
        ("mbart", {"normalize_before": True, "add_final_layer_norm": True, "normalize_embedding": True}, []),
        ("mbart", {"normalize_before": False}, ["normalize_before"]),
        ("pegasus", {"normalize_before": True, "static_position_embeddings": True, "normalize_embedding": False}, []),
        ("marian", {"normalize_before": False, "static_position_embeddings": True, "add_bias_logits": False}, []),
        ("marian", {"add_final_layer_norm": True}, ["add_final_layer_norm"]),
        ("bert", {"add_type_embeddings": False}, ["add_type_embeddings"]),
        ("bert", {"fusion_layer": 6}, ["fusion_layer"]),
        ("bert", {"use_qk_norm": True}, ["use_qk_norm"]),
        ("minimax_m2", {"use_qk_norm": True}, []),
        ("gpt2", {"pos_embd": "rope"}, ["pos_embd"]),
        ("gptj", {"rotary": True, "attention_types": [[["global"], 28]], "window_size": 256}, []),
        ("gptj", {"rotary": False}, ["rotary"]),
        ("gptj", {"attention_layers": ["global", "local"]}, ["attention_layers"]),
        ("olmo", {"rope": False}, ["rope"]),
        ("t5", {"rope_theta": 1e6}, ["rope_theta"]),
        ("t5", {"chronos_config": {"context_length": 512}}, ["chronos_config"]),
        ("llama", {"num_experts": 32}, ["num_experts"]),
        ("llama", {"sliding_window": 4096, "attention_chunk_size": 128}, ["sliding_window", "attention_chunk_size"]),
        ("llama", {"final_logit_softcapping": 30.0, "attn_logit_softcapping": None}, ["final_logit_softcapping"]),
        (
            "llama",
            {"attention_multiplier": 0.5, "embedding_multiplier": 12.0, "logits_scaling": 8.0},
            ["attention_multiplier", "embedding_multiplier", "logits_scaling"],
        ),
        ("llama", {"query_pre_attn_scalar": 256, "scale_emb": 12}, ["query_pre_attn_scalar", "scale_emb"]),
        ("esm", {"hidden_act": "gelu"}, []),
        ("esm", {"hidden_act": "swish"}, ["hidden_act"]),
        ("qwen2", {"rotary_emb_base": 10000.0}, []),
        ("qwen2", {"rotary_emb_base": 1000000.0}, ["rotary_emb_base"]),
        ("fuyu", {"text_config": None, "rope_theta": 30000.0, "partial_rotary_factor": 0.5}, []),
        ("glm4v", {"partial_rotary_factor": 0.25}, ["partial_rotary_factor"]),
        ("qwen3_moe", {"max_window_layers": 48}, []),
        ("detr", {"scale_embedding": False, "max_position_embeddings": 1024, "hidden_act": "relu"}, []),
        ("modernbert", {"position_embedding_type": "sans_pos", "is_causal": False}, []),
        ("nomic_bert", {"activation_function": "swiglu"}, []),
        ("gemma3n_text", {"query_pre_attn_scalar": 256}, []),
        ("gpt2", {"position_embedding": "alibi", "mup_scale_emb": 12}, ["position_embedding", "mup_scale_emb"]),
        ("gpt2", {"embeddings_scale": 10.0, "scale_qk_dot_by_d": True}, ["embeddings_scale", "scale_qk_dot_by_d"]),
        ("llama", {"clip_qkv": 8, "local_window_size": 64}, ["clip_qkv", "local_window_size"]),
        ("llama", {"softmax_temperature": 2.0, "use_logn_attn": True}, ["softmax_temperature", "use_logn_attn"]),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 2.0, "interleaved": True}},
            ["rope_scaling.interleaved"],
        ),
        ("bert", {"rotary_pct": 1.0}, ["rotary_pct"]),
        ("gemma3", {"rope_theta": 5e5, "text_config": {"model_type": "gemma3_text"}}, ["rope_theta"]),
        ("gemma3", {"sliding_window": 64, "text_config": {"model_type": "gemma3_text", "sliding_window": 64}}, []),
        ("whisper", {"feature_size": 1, "non_speech_tokens": [1, 2]}, []),
    ],
)
def test_keys_that_the_class_ignores_are_found(kind, keys, unread):
    saved = json.loads(CONFIG_MAPPING[kind]().to_json_string()) | keys
    assert decisive(saved, kind) == unread


@pytest.mark.parametrize("kind", STRAYS)
def test_harmless_keys_of_older_checkpoints_are_accepted(kind):
    saved = json.loads(CONFIG_MAPPING[kind]().to_json_string()) | STRAYS[kind]
    assert not decisive(saved, kind)


def test_keys_of_the_language_model_may_be_at_the_outer_level():
    flat = {"model_type": "qwen2_vl", "hidden_size": 32, "max_window_layers": 28, "use_sliding_window": False}
    assert names(flat | {"newest": 2}, "qwen2_vl") == ["newest"]
    assert names(flat, "llava") == ["max_window_layers", "use_sliding_window"]


@pytest.mark.slow  # imports 400 modules of transformers: 17 s of CPU time
def test_what_the_installed_release_saves_is_read():
    """Every class of transformers reads the keys that it writes, and no class reads a key that nobody defined."""
    logging.set_verbosity_error()
    for kind in set(CONFIG_MAPPING) - OTHERS:
        saved = json.loads(CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
        assert names(saved, kind) == [], kind
        assert names(with_unknown_keys(saved), kind) == unknown_keys(saved), kind


def test_what_transformers_4_saved_is_read():
    for kind in RECORDED.keys() - {"common"}:
        assert decisive(RECORDED["common"] | RECORDED[kind], kind) == [], kind


def with_unknown_keys(saved: dict) -> dict:
    """Return a configuration with a key that nobody reads, and one in each configuration inside."""
    parts = {key: with_unknown_keys(value) for key, value in saved.items() if is_configuration(value)}
    return {"newest_twist": 3} | saved | parts


def unknown_keys(saved: dict, prefix: str = "") -> list[str]:
    parts = {key: value for key, value in saved.items() if is_configuration(value)}
    inner = [name for key, value in parts.items() for name in unknown_keys(value, f"{prefix}{key}.")]
    return [f"{prefix}newest_twist", *inner]


def is_configuration(value: object) -> bool:
    return isinstance(value, dict) and "model_type" in value


def ignored(folder: Path, **config: object) -> list[str]:
    """Return the keys of a Llama's config.json that are ignored without harm."""
    (folder / "config.json").write_text(json.dumps(config))
    return check_keys(Checkpoint("x", folder), CONFIG_MAPPING["llama"])


def test_refusal_names_the_keys_the_release_and_a_way_out(tmp_path):
    unread = {"newest_twist": 3, "rope": False}
    with pytest.raises(
        UserError, match=r"sets newest_twist, rope, which LlamaConfig of transformers 5\.\S+ .*wait for"
    ):
        ignored(tmp_path, **unread, transformers_version="6.0.0")
    with pytest.raises(UserError, match=r"sets rope, .* remove the key there"):
        ignored(tmp_path, **unread)


def test_keys_that_change_nothing_are_returned(tmp_path):
    assert ignored(tmp_path, newest_twist=3, directionality="bidi") == ["newest_twist"]


@pytest.mark.parametrize("name", ["AutoConfig", "AutoModel"])
def test_own_code_may_read_any_key_with_consent(tmp_path, name):
    """The library's class does not read the key. The model's own class does, or its own network may."""
    code = (
        "from transformers import PretrainedConfig\n\n\nclass Own(PretrainedConfig):\n    model_type = 'bert'\n\n"
        "    def __init__(self, rope=0, **kwargs):\n        super().__init__(**kwargs)\n        self.rope = rope\n"
    )
    (tmp_path / "own.py").write_text(code)
    config = {"model_type": "bert", "auto_map": {name: "own.Own"}, "rope": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"sets rope, and brings its own code, .*set TRUST_REMOTE_CODE=1"):
        check_model(Checkpoint("x", tmp_path))
    check_model(Checkpoint("x", tmp_path, trust_remote_code=True))
