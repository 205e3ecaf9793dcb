"""Save vision-language models with their real architectures, processors and templates' forms, built in a second.

Their weights vary more than for training, so that the generated text depends on the whole chat and its images.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.checkpoints.language import byte_level_bpe

CONTEXT = 512
TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": CONTEXT, "initializer_range": 0.3,
}  # fmt: skip
EYES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8, "initializer_range": 0.3,
}  # fmt: skip
QWEN_EYES = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 8,
    "initializer_range": 0.3,
}  # fmt: skip
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}

# The forms of templates: how they write the roles, an image, and a content that is one text.
CHATML = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
GEMMA = """\
{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}<start_of_image>{% else %}{{ part['text'] | trim }}{% endif %}{% endfor %}{% endif %}\
<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
# These two know contents of parts only.
IDEFICS = """\
<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}\
{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}{% for part in message['content'] %}\
{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}\
<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""
LLAVA = """\
{% for message in messages %}{{ message['role'] | upper }}: \
{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}<image>
{% endfor %}{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }} {% endfor %}\
{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"""

QWEN_TOKENS = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
GEMMA_TOKENS = ["<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"]
IDEFICS_TOKENS = ["<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>"]
# Family -> the classes of the model and of its processor.
FAMILIES = {
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", "Qwen2VLProcessor"),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLProcessor"),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "Qwen3VLProcessor"),
    "gemma3": ("Gemma3ForConditionalGeneration", "Gemma3Processor"),
    "smolvlm": ("SmolVLMForConditionalGeneration", "SmolVLMProcessor"),
    "idefics3": ("Idefics3ForConditionalGeneration", "Idefics3Processor"),
    "llava": ("LlavaForConditionalGeneration", "LlavaProcessor"),
}


def save_vision_language(folder: Path, family: str, **fields: Any) -> Path:
    """Save a model of this family. `fields` are those of its language model's configuration."""
    tokenizer, config, image_processor, template, settings = globals()[f"_{family}"]()
    config["text_config"] |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id} | fields
    architecture, processor = FAMILIES[family]
    network = getattr(transformers, architecture)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = network(network.config_class(**config))
        for weight in model.parameters():  # some initializations are too narrow to see the images
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.3)
    ends = tokenizer.eos_token_id
    model.generation_config = transformers.GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    # save_pretrained() writes these files for a processor of images and texts. The processors of Qwen and SmolVLM
    # have a part for videos too, which takes torchvision.
    (folder / "preprocessor_config.json").write_text(json.dumps(image_processor))
    (folder / "processor_config.json").write_text(json.dumps(settings | {"processor_class": processor}))
    return folder


def _tokenizer(eos: str, tokens: list[str], bos: str | None = None, **names: str) -> Any:
    tokenizer = byte_level_bpe(eos, bos)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": tokens} | ({} if tokenizer.pad_token else {"pad_token": eos})
    )
    if names:
        tokenizer._set_model_specific_special_tokens(names)
    tokenizer.padding_side = "left"
    return tokenizer


def _qwen(vision: dict[str, Any], processor: str = "Qwen2VLImageProcessor", **own: Any) -> tuple[Any, ...]:
    tokenizer = _tokenizer("<|im_end|>", QWEN_TOKENS)
    ids = dict(zip(QWEN_TOKENS, tokenizer.convert_tokens_to_ids(QWEN_TOKENS), strict=True))
    config = {
        "text_config": TEXT | MROPE,
        "vision_config": vision,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
    pixels = {"size": {"shortest_edge": 256, "longest_edge": 4096}, "patch_size": 8, "merge_size": 2}
    return tokenizer, config, pixels | {"image_processor_type": processor, "temporal_patch_size": 2}, CHATML, {}


def _qwen2_vl() -> tuple[Any, ...]:
    return _qwen({"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 8, "mlp_ratio": 2})


def _qwen2_5_vl() -> tuple[Any, ...]:
    return _qwen(QWEN_EYES | {"window_size": 32, "fullatt_block_indexes": [1], "out_hidden_size": 32})


def _qwen3_vl() -> tuple[Any, ...]:
    own = {"deepstack_visual_indexes": [0], "out_hidden_size": 32, "num_position_embeddings": 64}
    return _qwen(QWEN_EYES | own)


def _gemma3() -> tuple[Any, ...]:
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = _tokenizer("<end_of_turn>", GEMMA_TOKENS, "<bos>", **names)
    config = {
        "text_config": TEXT | {"sliding_window": 16, "query_pre_attn_scalar": 8},
        "vision_config": EYES | {"vision_use_head": False},
        "mm_tokens_per_image": 4,
        "tie_word_embeddings": False,  # with tied ones, a text of random weights repeats its last token
        "boi_token_index": tokenizer.boi_token_id,
        "eoi_token_index": tokenizer.eoi_token_id,
        "image_token_index": tokenizer.image_token_id,
        "image_token_id": tokenizer.image_token_id,
    }
    pixels = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}}
    return tokenizer, config, pixels, GEMMA, {"image_seq_length": 4}


def _smolvlm(kind: str = "SmolVLM") -> tuple[Any, ...]:
    rows = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    tokenizer = _tokenizer("<end_of_utterance>", [*IDEFICS_TOKENS, *rows], "<|im_start|>")
    config = {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": EYES,
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "scale_factor": 2,
    }
    pixels = {
        "image_processor_type": f"{kind}ImageProcessor",
        "size": {"longest_edge": 64},
        "max_image_size": {"longest_edge": 32},
        "do_image_splitting": True,
        "do_pad": True,
    }
    return tokenizer, config, pixels, IDEFICS, {"image_seq_len": 4}


def _idefics3() -> tuple[Any, ...]:
    return _smolvlm("Idefics3")


def _llava() -> tuple[Any, ...]:
    tokenizer = _tokenizer("</s>", ["<image>"], "<s>")
    config = {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": EYES | {"model_type": "clip_vision_model"},
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "image_seq_length": 16,
    }
    pixels = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 32},
        "crop_size": {"height": 32, "width": 32},
    }
    settings = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return tokenizer, config, pixels, LLAVA, settings
