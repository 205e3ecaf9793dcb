"""Find the keys of a checkpoint's config.json that the installed transformers does not read.

The original and its export ignore such a key together, so comparing the two cannot show that both are wrong.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

# Keys that cannot change what a loaded model computes, if its class does not read them.
HARMLESS = (
    # where it comes from, and what belongs to other programs
    "_*", "adapters", "architectures", "auto_map", "bert_model_name", "dtype", "finetuning_task", "is_llama_config",
    "language", "license", "matryoshka_dimensions", "model_type", "name", "name_or_path",
    "sbert_ce_default_activation_function", "sentence_transformers", "tags", "task_specific_params", "tokenizer_class",
    "torch_dtype", "total_flos", "transformers.js_config", "transformers_version", "trust_remote_code", "unsloth_*",
    "verbose",
    # how the weights are stored, which unsupported.py and the exporter of language models read
    "quantization_config",
    # training: dropout, weights at its start, losses, masks, gradients
    "*dropout*", "*drop_path*", "*_drop", "*_pdrop", "*_init_scale", "*_init_std", "*_init_value", "*_jitter*",
    "*_loss", "*_loss_*", "freeze_*", "gradient_checkpointing", "init_*", "initializer_*", "label_smoothing",
    "mask_feature_*", "mask_time_*", "output_past", "output_router_logits", "predict_special_tokens",
    "repad_logits_with_grad", "seq_aux", "train_*", "training_*",
    # speed, memory, and the accuracy of intermediate results
    "*attn_implementation", "*_in_fp32", "bias_dropout_fusion", "cache_implementation", "fused_*", "inference_runner",
    "masked_softmax_fusion", "num_logits_to_keep", "pad_key_length", "pre_allocate_kv_cache", "pretraining_tp",
    "reference_compile", "skip_bias_add*", "slow_but_exact", "unpad_inputs", "use_cache", "use_flash_attention*",
    "use_flash_attn", "use_fused_*", "use_memory_efficient_attention", "use_xformers", "validate_runner_input",
    "xla_device",
    # ids of tokens that the network does not look for, and limits of length that it does not have
    "*_token_id", "*_token_ids", "*_token_index", "max_seq*", "model_max_length", "n_ctx", "n_positions", "seq_len*",
    # which layers of a backbone another model reads
    "apply_layernorm", "out_features", "out_indices", "reshape_hidden_states", "stage_names",
    # the head GPT2DoubleHeadsModel
    "summary_*",
    # the programs that trained SmolVLM, Idefics3 and LLaVA: the models read scale_factor
    "ignore_index", "neftune_noise_alpha", "perceiver_config", "pixel_shuffle_factor", "use_base_siglip",
    # what earlier releases wrote, and none reads any more
    "directionality", "down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks",
    "offset_alibi", "path_norm", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
    "pooler_size_per_head", "pooler_type", "sinusoidal_pos_embds", "tie_weights_",
)  # fmt: skip
# Keys and their default value, in a class that does not read them: Falcon, Longformer, Phi-4 and GPT-J
# have such keys, for example.
NEUTRAL = {
    "*_bias": False,
    "alibi": False,
    "apply_residual_connection_post_layernorm": False,
    "attention_mode": "longformer",
    "full_attn_mod": 1,
    "in_chans": 3,
    "ignore_attention_mask": False,
    "interpolate_factor": 1,
    "mlp_type": "default",
    "norm_type": "layer_norm",
    "position_embedding_type": "absolute",
    "qk_layer_norms": False,
    "rms_norm": True,
    "rope_interleaved": False,
    "rotary": True,
    "scale_attn_weights": True,
    "scale_decoder_outputs": True,
    "use_*": False,
    # transformers 4 wrote these into every configuration.
    "add_cross_attention": False,
    "is_decoder": False,
    "is_causal": True,
    "partial_rotary_factor": 1.0,
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
    "torchscript": False,
    "untie_r": True,
}
# Keys that are harmless if they repeat the value of one of these, which the class reads.
REPEATED = {
    "activation_function": ("hidden_act",),
    "hidden_act": ("hidden_activation",),
    "layer_norm_eps": ("norm_eps", "layer_norm_epsilon", "rms_norm_eps"),
    "num_key_value_heads": ("num_attention_heads",),
    "sliding_window_size": ("sliding_window",),
    "spatial_patch_size": ("patch_size",),
}
# Keys whose content belongs to the model's author.
FREE = ("id2label", "label2id", "pruned_heads", "task_specific_params")
# Keys that the base classes read for every model, and keys that they read only for a class with `rope_parameters`.
BASE = (
    "attn_implementation", "experts_implementation", "num_labels", "output_attentions", "per_layer_config",
    "tie_word_embeddings",
)  # fmt: skip
ROPE = ("rope_scaling", "rope_theta")
# How the code of models names a key: config.key, getattr(config, "key"), kwargs.pop("key"), "key" in kwargs.
READS = re.compile(
    r"config\.(\w+)|(?:getattr|hasattr)\([\w.]*config,\s*[\"'](\w+)"
    r"|(?:kwargs|config_dict)(?:\.(?:get|pop)\(|\[)\s*[\"'](\w+)|[\"'](\w+)[\"'] (?:not )?in kwargs"
)
# Assignments by which a configuration sets a key itself, also in a part of it.
SETS = re.compile(r"self\.(?:\w+\.)?(\w+) = ")
# The imports of a model's code from the modules that many models share, without the modules of the base classes: these
# name keys of which most models read none.
SHARED = re.compile(r"^from \.\.\.(masking_utils|modeling_layers) import (\([^)]*\)|.*)$", re.MULTILINE)
# How a configuration takes the keys of its text_config from its own level, where Qwen2-VL's checkpoints have them.
TAKES_FLAT = '["text_config"].config_class.__init__'
# Files beside a model's code that never run with it.
ASIDE = ("convert_", "modular_")


def unread_keys(config: dict[str, Any], config_class: Any, prefix: str = "", outer: Any = None) -> Iterator[str]:
    """Yield the keys that neither the class nor the code of its models reads, with a dot before nested ones.

    `outer` is the class of the configuration around this one: its models may read the keys of this one too.
    """
    known = parameters(config_class) | mentioned(config_class) | (mentioned(outer) if outer else set())
    if "text_config" not in config and TAKES_FLAT in inspect.getsource(config_class):
        known |= parameters(part_class(config_class, "text_config", {}))
    for key, value in config.items():
        is_read = isinstance(value, dict) and key in known  # such as `perceiver_config`, which Idefics reads
        if is_empty(value) or key in generation_keys() or (not is_read and is_harmless(key)):
            continue
        if key not in known:
            is_rotary = value in ("rope", "rotary") and "rope_parameters" in known
            repeats_base = key == "rotary_emb_base" and value == getattr(config_class, "default_theta", None)
            if not (is_neutral(key, value, config) or is_rotary or repeats_base):
                yield prefix + key
        elif isinstance(value, dict) and key not in FREE:
            yield from unread_in(value, key, config_class, f"{prefix}{key}.")


def unread_in(value: dict[str, Any], key: str, config_class: Any, prefix: str) -> Iterator[str]:
    """Yield the unread keys of an object: a configuration, several by layer, or options such as `rope_scaling`."""
    if part := part_class(config_class, key, value):
        yield from unread_keys(value, part, prefix, config_class)
        return
    scaling = value.get("rope_type", value.get("type", "default")) != "default"
    for name, content in value.items():
        if name.isdigit() and isinstance(content, dict):
            yield from unread_keys(content, config_class, f"{prefix}{name}.")
        elif isinstance(content, dict):
            yield from unread_in(content, name, config_class, f"{prefix}{name}.")
        elif not name.isdigit() and name not in words(config_class, scaling) and not is_neutral(name, content, value):
            yield prefix + name


def is_empty(value: Any) -> bool:
    """Return whether a value sets nothing: null, or a list or an object of such values."""
    if isinstance(value, dict | list):
        return all(is_empty(item) for item in (value.values() if isinstance(value, dict) else value))
    return value is None or value == ""


def is_harmless(key: str) -> bool:
    return any(fnmatch(key, pattern) for pattern in HARMLESS)


def is_neutral(key: str, value: Any, config: dict[str, Any]) -> bool:
    """Return whether the value asks a model that does not read the key for nothing else."""
    if any(fnmatch(key, pattern) and value == neutral for pattern, neutral in NEUTRAL.items()):
        return True
    return any(value == config.get(other) for other in REPEATED.get(key, ()))


def part_class(config_class: Any, key: str, value: dict[str, Any]) -> Any:
    """Return the class of a configuration inside another, such as text_config, or None."""
    from transformers import PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    name = key.removesuffix("_dict")
    part, default = config_class.sub_configs.get(name), config_class.sub_configs_defaults.get(name)
    if part and issubclass(part, PretrainedConfig):
        return part
    kind = value.get("model_type") or (default and default.model_type)
    return CONFIG_MAPPING[kind] if isinstance(kind, str) and kind in CONFIG_MAPPING else None


@functools.cache
def generation_keys() -> frozenset[str]:
    """Return the keys that set how to generate: networks do not read them."""
    from transformers import GenerationConfig

    return frozenset(GenerationConfig().to_dict())


@functools.cache
def parameters(config_class: Any) -> frozenset[str]:
    """Return the keys that the class takes by name, computes itself, or leaves to the base classes."""
    names = {*BASE, *(field.name for field in fields(config_class))}
    if "rope_parameters" in names:
        names |= {*ROPE, *({"partial_rotary_factor"} & words(config_class, scaling=False))}
    for base in own_bases(config_class):
        if "__init__" in vars(base):
            names |= inspect.signature(base.__init__).parameters.keys()
        names |= {name for name, value in vars(base).items() if isinstance(value, property)}
    return frozenset(names.union(*config_class.attribute_map.items()))


@functools.cache
def mentioned(config_class: Any) -> frozenset[str]:
    """Return the keys that the code of the class's models reads or sets, also in a configuration inside this one."""
    names = {name for groups in READS.findall(code(config_class)) for name in groups if name}
    for base in own_bases(config_class):
        names |= {*SETS.findall(inspect.getsource(base))}
    return frozenset(names.union(*(part.init_kwargs for part in config_class.sub_configs_defaults.values())))


@functools.cache
def words(config_class: Any, scaling: bool) -> frozenset[str]:
    """Return the quoted words in the code of the class's models, with `scaling` also in that of scaled positions."""
    from transformers import modeling_rope_utils

    text = code(config_class) + (inspect.getsource(modeling_rope_utils) if scaling else "")
    return frozenset({"rope_theta", "rope_type", "type", *re.findall(r"[\"'](\w+)[\"']", text)})


def own_bases(config_class: Any) -> list[Any]:
    """Return the class and its bases, without those of every configuration."""
    from transformers import PretrainedConfig

    bases = [base for base in config_class.__mro__ if issubclass(base, PretrainedConfig)]
    return bases[: bases.index(PretrainedConfig)]


@functools.cache
def code(config_class: Any) -> str:
    """Return the code of the class, of its bases and their models, and the shared code that these import."""
    folders = {Path(inspect.getfile(base)).parent for base in own_bases(config_class)}
    files = sorted(file for folder in folders for file in folder.glob("*.py") if not file.name.startswith(ASIDE))
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    imported = {(module, name) for module, names in SHARED.findall(text) for name in re.findall(r"\w+", names)}
    return "\n".join([text, *(definitions(module).get(name, "") for module, name in sorted(imported))])


@functools.cache
def definitions(module: str) -> dict[str, str]:
    """Return the text of each function and class of one of transformers' modules."""
    import transformers

    text = (Path(transformers.__file__).parent / f"{module}.py").read_text(encoding="utf-8")
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {node.name: "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno]) for node in found}
