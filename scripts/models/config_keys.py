"""Find the keys of a checkpoint's config.json that the installed transformers does not read.

The original and its export ignore such a key together, so comparing the two cannot show that both are wrong.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

# Keys that cannot change what a loaded model computes, if its class does not read them.
HARMLESS = (
    # where it comes from, and what belongs to other programs
    "_*", "adapters", "architectures", "auto_map", "bert_model_name", "dtype", "is_llama_config", "language", "license",
    "model_type", "name", "name_or_path", "sbert_ce_default_activation_function", "sentence_transformers", "tags",
    "tokenizer_class", "torch_dtype", "total_flos", "transformers.js_config", "transformers_version", "unsloth_*",
    # training: dropout, weights at its start, losses, masks, gradients
    "*dropout*", "*drop_path*", "*_drop", "*_pdrop", "*_init_scale", "*_init_std", "*_init_value", "*_jitter*",
    "*_loss", "*_loss_*", "freeze_*", "gradient_checkpointing", "init_*", "initializer_*", "label_smoothing",
    "mask_feature_*", "mask_time_*", "output_past", "output_router_logits", "predict_special_tokens",
    "train_*", "training_*",
    # speed, memory, and the accuracy of intermediate results
    "*attn_implementation", "*_in_fp32", "bias_dropout_fusion", "cache_implementation", "fused_*", "inference_runner",
    "masked_softmax_fusion", "pad_key_length", "pre_allocate_kv_cache", "pretraining_tp", "skip_bias_add*",
    "slow_but_exact", "unpad_inputs", "use_cache", "use_flash_attention*", "use_flash_attn", "use_fused_*",
    "use_memory_efficient_attention", "use_xformers", "validate_runner_input", "xla_device",
    # ids of tokens that the network does not look for, and limits of length that it does not have
    "*_token_id", "*_token_ids", "*_token_index", "max_seq*", "model_max_length", "n_ctx", "n_positions", "seq_len*",
    # which layers of a backbone another model reads
    "apply_layernorm", "out_features", "out_indices", "reshape_hidden_states", "stage_names",
    # the head GPT2DoubleHeadsModel
    "summary_*",
    # what earlier releases wrote, and none reads any more
    "directionality", "down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks",
    "offset_alibi", "path_norm", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
    "pooler_size_per_head", "pooler_type", "sinusoidal_pos_embds", "tie_weights_",
)  # fmt: skip
# Keys and the value that asks for nothing else, in a class that does not read them: Falcon, Longformer, Phi-4 and GPT-J
# have such keys, for example.
NEUTRAL = {
    "*_bias": False,
    "alibi": False,
    "apply_residual_connection_post_layernorm": False,
    "attention_mode": "longformer",
    "full_attn_mod": 1,
    "ignore_attention_mask": False,
    "interpolate_factor": 1,
    "mlp_type": "default",
    "norm_type": "layer_norm",
    "position_embedding_type": "absolute",
    "rope_interleaved": False,
    "rotary": True,
    "scale_attn_weights": True,
    "scale_decoder_outputs": True,
    "use_*": False,
}
# Keys that are harmless if they repeat the value of one of these, which the class reads.
REPEATED = {
    "activation_function": ("hidden_act",),
    "hidden_act": ("hidden_activation",),
    "layer_norm_eps": ("norm_eps", "layer_norm_epsilon", "rms_norm_eps"),
    "num_key_value_heads": ("num_attention_heads",),
    "sliding_window_size": ("sliding_window",),
}
# Keys whose content belongs to the model's author.
FREE = ("id2label", "label2id", "pruned_heads", "task_specific_params")
# How the code of models names a key: config.key, getattr(config, "key"), kwargs.pop("key"), "key" in kwargs.
READS = re.compile(
    r"config\.(\w+)|(?:getattr|hasattr)\([\w.]*config,\s*[\"'](\w+)|kwargs(?:\.(?:get|pop)\(|\[)\s*[\"'](\w+)"
    r"|[\"'](\w+)[\"'] (?:not )?in kwargs"
)


def unread_keys(config: dict[str, Any], config_class: Any, prefix: str = "") -> Iterator[str]:
    """Yield the keys that neither the class nor the code of its models reads, with a dot before nested ones."""
    for key, value in config.items():
        if is_empty(value) or any(fnmatch(key, pattern) for pattern in HARMLESS):
            continue
        if key not in parameters(config_class) | mentioned(config_class):
            if not is_neutral(key, value, config):
                yield prefix + key
        elif isinstance(value, dict) and key not in FREE:
            if part := part_class(config_class, key, value):
                yield from unread_keys(value, part, f"{prefix}{key}.")
            else:
                yield from (f"{prefix}{key}.{name}" for name in value if name not in words(config_class))


def is_empty(value: Any) -> bool:
    """Return whether a value sets nothing: null, or a list or an object of such values."""
    if isinstance(value, dict | list):
        return all(is_empty(item) for item in (value.values() if isinstance(value, dict) else value))
    return value is None or value == ""


def is_neutral(key: str, value: Any, config: dict[str, Any]) -> bool:
    """Return whether the value asks a model that does not read the key for nothing else."""
    if any(fnmatch(key, pattern) and value == neutral for pattern, neutral in NEUTRAL.items()):
        return True
    return any(value == config.get(other) for other in REPEATED.get(key, ()))


def part_class(config_class: type[Any], key: str, value: dict[str, Any]) -> type[Any] | None:
    """Return the class of a configuration inside another, such as text_config."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = value.get("model_type")
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        return CONFIG_MAPPING[kind]
    parts = config_class.sub_configs
    part = parts.get(key.removesuffix("_dict")) if isinstance(parts, dict) else None  # else the instance chooses
    return part if hasattr(part, "attribute_map") else None


@functools.cache
def parameters(config_class: Any) -> frozenset[str]:
    """Return the keys that the class and its bases take by name, or compute themselves."""
    from transformers import PretrainedConfig

    names = {*config_class.attribute_map, *PretrainedConfig().to_dict()}
    for base in config_class.__mro__[:-1]:
        if "__init__" in vars(base):
            names |= inspect.signature(base.__init__).parameters.keys()
            names |= set(re.findall(r"self\.(\w+) = ", inspect.getsource(base)))
        names |= {name for name, value in vars(base).items() if isinstance(value, property)}
    return frozenset(names)


@functools.cache
def mentioned(config_class: Any) -> frozenset[str]:
    """Return the keys that the code of the class's models reads from a configuration, whatever set them."""
    return frozenset(name for groups in READS.findall(code(config_class)) for name in groups if name)


@functools.cache
def words(config_class: Any) -> frozenset[str]:
    """Return the quoted words in the code of the class's models, and in the code that reads their `rope_scaling`."""
    from transformers import modeling_rope_utils

    return frozenset(re.findall(r"[\"'](\w+)[\"']", code(config_class) + inspect.getsource(modeling_rope_utils)))


@functools.cache
def code(config_class: Any) -> str:
    """Return the code of the class and its bases, and of the models in the same folders."""
    from transformers import PretrainedConfig

    bases = config_class.__mro__[:-1]  # without object
    models = [base for base in bases if issubclass(base, PretrainedConfig) and base is not PretrainedConfig]
    folders = {Path(inspect.getfile(base)).parent for base in models}
    files = sorted(file for folder in folders for file in folder.glob("*.py") if not file.name.startswith("convert_"))
    return "\n".join([*map(inspect.getsource, bases), *(file.read_text(encoding="utf-8") for file in files)])
