"""Save vision models with their real architectures and image processors, small enough to build in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.checkpoints import encoders

SIDE = 32
SIZE = {
    "image_size": SIDE,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "initializer_range": 0.5,  # wider than for training, so that the output depends on the image
}
LABELS = ("cat", "dog", "우산", "bird")


def save_vit(folder: Path, pooler: bool = True) -> Path:
    config = transformers.ViTConfig(**SIZE)
    return save(folder, lambda: transformers.ViTModel(config, add_pooling_layer=pooler), vit_processor())


def save_vit_classifier(folder: Path) -> Path:
    labels = dict(enumerate(LABELS))
    config = transformers.ViTConfig(**SIZE, id2label=labels, label2id={label: i for i, label in labels.items()})
    return save(folder, lambda: transformers.ViTForImageClassification(config), vit_processor())


def save_dinov2(folder: Path) -> Path:
    """Save a model whose processor resizes the shorter edge and crops the centre."""
    config = transformers.Dinov2Config(**{key: value for key, value in SIZE.items() if key != "intermediate_size"})
    processor = transformers.BitImageProcessor(
        size={"shortest_edge": SIDE + 4}, crop_size={"height": SIDE, "width": SIDE}
    )
    return save(folder, lambda: transformers.Dinov2Model(config), processor)


def save_clip(folder: Path, legacy: bool = False) -> Path:
    """Save CLIP with its tokenizer. Legacy configurations have a wrong eos_token_id."""
    tokenizer = encoders.clip_bpe()
    text = {
        **tower(SIZE),
        "vocab_size": len(tokenizer),
        "max_position_embeddings": encoders.POSITIONS,
        "bos_token_id": 0 if legacy else tokenizer.bos_token_id,
        "eos_token_id": 2 if legacy else tokenizer.eos_token_id,
    }
    config = transformers.CLIPConfig(text_config=text, vision_config=tower(SIZE), projection_dim=24)
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    tokenizer.save_pretrained(folder)
    return save(folder, lambda: transformers.CLIPModel(config), processor)


def save_siglip(folder: Path, has_mask: bool = False, own_tokenizer: bool = False) -> Path:
    """Save SigLIP, whose tokenizer returns no mask unless it is saved with one: its own, or one of another model."""
    tokenizer: Any = encoders.siglip_unigram() if own_tokenizer else encoders.byte_level()
    tokenizer.model_input_names = ["input_ids", *(["attention_mask"] if has_mask else [])]
    text = {**SIZE, "vocab_size": len(tokenizer), "max_position_embeddings": encoders.POSITIONS}
    for unread in ("image_size", "patch_size"):
        del text[unread]
    config = transformers.SiglipConfig(text_config=text, vision_config=SIZE)
    processor = transformers.SiglipImageProcessor(size={"height": SIDE, "width": SIDE})
    tokenizer.save_pretrained(folder)
    return save(folder, lambda: transformers.SiglipModel(config), processor)


def tower(fields: dict) -> dict:
    # CLIP multiplies initializer_range by factors of its own.
    return {**fields, "initializer_range": 0.1, "projection_dim": 24}


def vit_processor() -> transformers.ViTImageProcessor:
    return transformers.ViTImageProcessor(size={"height": SIDE, "width": SIDE})


def save(folder: Path, make, processor: transformers.BaseImageProcessor) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)  # images get different labels
        make().save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
