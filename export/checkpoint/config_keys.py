"""Find the keys of a checkpoint's config.json that the installed transformers does not read.

The original and its export ignore such a key together, so comparing the two cannot show that both are wrong. Most such
keys change nothing: earlier releases, other programs and people wrote them. DECISIVE has those that change numbers.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from fnmatch import translate
from pathlib import Path
from typing import Any, NamedTuple

# Keys that cannot change what a loaded model computes, if its class does not read them.
HARMLESS = re.compile("|".join(map(translate, (
    # where it comes from, and what belongs to other programs
    "_*", "adapters", "architectures", "auto_map", "bert_model_name", "dtype", "finetuning_task", "is_llama_config",
    "finetuned", "language", "license", "matryoshka_dimensions", "model_type", "name", "name_or_path",
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
    "*attn_implementation", "*_in_fp32", "bias_dropout_fusion", "cache_implementation", "fuse_*", "fused_*",
    "inference_runner", "masked_softmax_fusion", "num_logits_to_keep", "pad_key_length", "pre_allocate_kv_cache",
    "pretraining_tp", "reference_compile", "skip_bias_add*", "slow_but_exact", "unpad_inputs", "use_cache",
    "use_flash_attention*", "use_flash_attn", "use_fused_*", "use_memory_efficient_attention", "use_xformers",
    "validate_runner_input", "xla_device",
    # ids of tokens that the network does not look for, and limits of length that it does not have
    "*_token_id", "*_token_ids", "*_token_index", "max_seq*", "model_max_length", "n_ctx", "n_positions", "seq_len*",
    # which layers of a backbone another model reads
    "apply_layernorm", "out_features", "out_indices", "reshape_hidden_states", "stage_names", "use_pretrained_backbone",
    # the head GPT2DoubleHeadsModel, and the programs that trained SmolVLM, Idefics3 and LLaVA
    "summary_*", "ignore_index", "neftune_noise_alpha", "perceiver_config", "pixel_shuffle_factor", "use_base_siglip",
    # what earlier releases wrote, and none reads any more
    "directionality", "down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks", "path_norm",
    "pooler_*", "sinusoidal_pos_embds", "tie_weights_",
))))  # fmt: skip
# Kinds of settings that change numbers -> their keys. A class must read such a key, unless the value asks for
# what the class does anyway. Sizes are not here: the names and shapes of the weights show them.
DECISIVE = {
    "positions": (
        r".*(rope|rotary|alibi).*|pos(ition)?_(embd|emb(ed(ding)?)?s?|encoding)(_type)?|static_pos\w*_embeddings"
        r"|.*logn_attn|use_dynamic_ntk|ntk_(alpha|factor)|yarn_factor"
    ),
    "attention": (
        r".*sliding_window.*|.*window(_sizes?)?|attention_(chunk_size|types|layers|mode)|layer_types"
        r"|.*causal.*|.*bidirectional.*|.*soft_?cap.*|.*logits?_cap.*|clip_qkv|attention_sinks"
    ),
    "scales": (
        r"(.*_)?(attn|attention|softmax|logits?|query|qk|residual|emb\w*|lm_head|key|output)"
        r"_(scale|scaling|multiplier)(_scale)?|query_pre_attn_scalar|scale_(attn|emb|logits|depth|decoder|qk).*|mup_.*"
        r"|(.*_)?(attention|softmax)_temperature|attn_temperature_tuning"
    ),
    "norms": (
        r".*qk_?(layer_?)?norms?|normalize_(before|embedding)|add_final_layer_norm|rms_?norm"
        r"|apply_residual_connection_post_layernorm|(use_)?parallel_(attn|residual)"
    ),
    "accuracy of norms": r"(.*_)?(layer_?|rms_?)?norm_eps(ilon)?",
    "activations": r"(mlp_)?hidden_act(ivation)?|activation(_function)?|act_fn|ff_activation|mlp_act\w*",
    "pooling": r"pool(ing)?_(mode|type|strategy)",
    "experts": r".*experts.*|shared_expert_intermediate_size",
    "other code": (
        r"mm_(vision_tower|projector_type)|glyph_.*|pinyin_.*|fusion_layer|add_type_embeddings|chronos_config"
        r"|load_trained_adapters|lora_adaptations|task_instructions"
    ),
}
# Flags among these keys -> the code of a class that does it always. A class without this code never does it.
ALWAYS = {
    "add_type_embeddings": "token_type_embeddings",
    "is_causal": "ForCausalLM",
    "scale_attn_weights|scale_decoder_outputs": "",
    "normalize_embedding": "layernorm_embedding",
    "normalize_before|add_final_layer_norm": r"residual = hidden_states\s+hidden_states = self\.self_attn_layer_norm",
    "rms_?norm": "RMSNorm",
    "(use_)?(rope|rotary(_pos_emb)?)": "rotary_pos_emb",
    "static_position_embeddings": "Sinusoidal",
    ".*qk_?(layer_?)?norms?": r"\b(q|k|query|key)_(layer)?norm",
}
# Values of other such keys that ask for nothing else, for all types of models or for one.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_mode": ("longformer",),
    "offset_alibi": (100,),
    "partial_rotary_factor": (1.0,),
    "pool_type": ("last",),  # of a decoder's classifier
    "position_embedding_type": ("absolute", "sans_pos"),  # ModernBERT's files have the second
    "bamba.attn_rotary_emb": (64,),
    "gemma3n_text.query_pre_attn_scalar": (256,),
    "gptj.window_size": (256,),  # GPT-Neo's default, in GPT-J's first files: only local layers have windows
}
# Names of gated activations -> those of the functions in the gates.
GATED = {"swiglu": "silu", "geglu": "gelu"}
SWITCHES = ("alibi", "use_sliding_window")  # without them, other such keys say nothing either
NOTHING = (0, 1, "full_attention", "global")
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


class Unread(NamedTuple):
    """A key that no code reads, with a dot before each nested part of its name."""

    name: str
    changes_numbers: bool


def unread_keys(config: dict[str, Any], config_class: Any, prefix: str = "", outer: Any = None) -> Iterator[Unread]:
    """Yield the keys that neither the class nor the code of its models reads.

    `outer` is the class of the configuration around this one: its models may read the keys of this one too.
    """
    known = parameters(config_class) | mentioned(config_class) | (mentioned(outer) if outer else set())
    if "text_config" not in config and TAKES_FLAT in source(config_class):
        known |= parameters(part_class(config_class, "text_config", {}))
    for key, value in config.items():
        if is_of_text(key, value, config):
            known -= {key} - parameters(config_class)
        is_read = isinstance(value, dict) and key in known  # such as `perceiver_config`, which Idefics reads
        if is_empty(value) or key in generation_keys() or (not is_read and is_harmless(key, value, config_class)):
            continue
        if key not in known:
            yield Unread(prefix + key, changes_numbers(key, value, config, config_class))
        elif isinstance(value, dict) and key not in FREE:
            yield from unread_in(value, key, config_class, f"{prefix}{key}.")


def unread_in(value: dict[str, Any], key: str, config_class: Any, prefix: str) -> Iterator[Unread]:
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
        elif name.isdigit() or name in words(config_class, scaling) or is_empty(content):
            continue
        elif not is_harmless(name, content, config_class):
            is_position = "rope" in prefix and (isinstance(content, bool) or not is_nothing(content))
            yield Unread(prefix + name, is_position or changes_numbers(name, content, value, config_class))


def changes_numbers(key: str, value: Any, config: dict[str, Any], config_class: Any) -> bool:
    """Return whether a network that reads this key of the configuration computes something else than the class does."""
    pattern = next((keys for keys in DECISIVE.values() if re.fullmatch(keys, key)), None)
    if pattern is None:
        return False
    for flags, always in ALWAYS.items():
        if isinstance(value, bool) and re.fullmatch(flags, key):
            return value != bool(re.search(always, code(config_class)))
    if isinstance(value, str) and value.startswith(("rope", "rotary")):
        return "rope_parameters" not in parameters(config_class)
    layers = {*re.findall(r'"(\w+)"', json.dumps(value))} if isinstance(value, list) else ()
    if is_nothing(value) or (layers and layers <= {*NOTHING}):
        is_position = pattern == DECISIVE["positions"]
        # A class without such positions does not have the whole of them either.
        return value == 1 and is_position and not re.search("rope_param|rotary|alibi", code(config_class))
    if any(switch.removeprefix("use_") in key and config.get(switch) is False for switch in SWITCHES):
        return False
    known = parameters(config_class) | mentioned(config_class) | {key}
    settings = settings_of(config_class, {name: value for name, value in config.items() if name in known})
    same_kind = [other for name, other in settings if re.fullmatch(pattern, name)]
    if same_kind and not isinstance(value, bool):  # under another name, or in a part that the class hands it to
        return value not in same_kind and (not isinstance(value, str) or GATED.get(value) not in same_kind)
    if isinstance(value, str):  # the code names the only function, such as gelu, that a class without such a key has
        return not re.search(rf"\b{re.escape(value)}\b", code(config_class))
    return pattern != DECISIVE["accuracy of norms"]  # most norms of classes without such a key have no other number


def settings_of(config_class: Any, keys: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the settings, at any depth, that the class reads from these keys or sets itself."""
    try:
        settings = config_class.from_dict(keys).to_dict()
    except Exception:  # a broken file makes a class raise anything
        return []
    return [*flat({key: value for key, value in settings.items() if key in parameters(config_class)}, config_class)]


def flat(settings: dict[str, Any], config_class: Any) -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        yield str(key), value
        if isinstance(value, dict):
            part = part_class(config_class, str(key), value)
            # The base class also puts settings of RoPE there that no code of this class reads.
            read = value if part else {name: value[name] for name in value.keys() & words(config_class, scaling=False)}
            yield from flat(read, part or config_class)


def is_nothing(value: Any) -> bool:
    return not isinstance(value, list | dict) and value is not True and value in NOTHING


def is_of_text(key: str, value: Any, config: dict[str, Any]) -> bool:
    """Return whether a key beside text_config is one that models of texts read there, and has another value there."""
    text, kinds = config.get("text_config"), ("positions", "attention", "scales")
    is_decisive = any(re.fullmatch(DECISIVE[kind], key) for kind in kinds)
    return is_decisive and isinstance(text, dict) and text.get(key) != value


def is_empty(value: Any) -> bool:
    """Return whether a value sets nothing: null, or a list or an object of such values."""
    if isinstance(value, dict | list):
        return all(is_empty(item) for item in (value.values() if isinstance(value, dict) else value))
    return value is None or value == ""


def is_harmless(key: str, value: Any, config_class: Any) -> bool:
    neutral = (*NEUTRAL.get(key, ()), *NEUTRAL.get(f"{config_class.model_type}.{key}", ()))
    return value in neutral or bool(HARMLESS.match(key))


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
    names = {*keys_read(code(config_class))}
    for base in own_bases(config_class):
        names |= {*SETS.findall(source(base))}
    return frozenset(names.union(*(part.init_kwargs for part in config_class.sub_configs_defaults.values())))


@functools.cache
def keys_read(text: str) -> frozenset[str]:
    """Return the keys that code reads. The classes of one folder have the same code."""
    return frozenset(name for groups in READS.findall(text) for name in groups if name)


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
    import transformers

    folders = {Path(inspect.getfile(base)).parent for base in own_bases(config_class)}
    files = sorted(file for folder in folders for file in folder.glob("*.py") if not file.name.startswith(ASIDE))
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    library = Path(transformers.__file__).parent
    shared = [(library / f"{module}.py", names) for module, names in SHARED.findall(text)]
    imported = {(file, name) for file, names in shared for name in re.findall(r"\w+", names)}
    return "\n".join([text, *(definitions(file).get(name, "") for file, name in sorted(imported))])


def source(config_class: Any) -> str:
    """Return the text of the class. inspect.getsource() would parse the whole file for each call."""
    return definitions(Path(inspect.getfile(config_class))).get(config_class.__name__, "")


@functools.cache
def definitions(file: Path) -> dict[str, str]:
    """Return the text of each function and class of a module."""
    text = file.read_text(encoding="utf-8")
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {node.name: "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno]) for node in found}
