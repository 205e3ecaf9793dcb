"""Save vision models with their real architectures and image processors, small enough to build in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from loadtest.bench.architectures.small_models import SIDE, image_processor, small_config
from tests.support.checkpoints import encoders

SPREAD = 0.5  # wider than for training, so that the output depends on the image
TOWER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
CLIP = TOWER | {"initializer_range": 0.1, "projection_dim": 24}  # CLIP multiplies the range by factors of its own
SIGLIP = TOWER | {"initializer_range": SPREAD}
IMAGE = {"image_size": SIDE, "patch_size": 8}
LABELS = ("cat", "dog", "우산", "bird")
CROPPED = {"height": SIDE, "width": SIDE}


def save_vit(folder: Path, pooler: bool = True) -> Path:
    return save(folder, transformers.ViTModel, image_processor(), add_pooling_layer=pooler)


def save_vit_classifier(folder: Path) -> Path:
    labels = encoders.labels(LABELS)
    return save(folder, transformers.ViTForImageClassification, image_processor(), labels)


def save_dinov2(folder: Path) -> Path:
    """Save a model whose processor resizes the shorter edge and crops the centre."""
    processor = transformers.BitImageProcessor(size={"shortest_edge": SIDE + 4}, crop_size=CROPPED)
    return save(folder, transformers.Dinov2Model, processor)


def save_clip(folder: Path, legacy: bool = False) -> Path:
    """Save CLIP with its tokenizer. Legacy configurations have a wrong eos_token_id."""
    tokenizer = encoders.clip_bpe()
    text = {
        **CLIP,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": encoders.POSITIONS,
        "bos_token_id": 0 if legacy else tokenizer.bos_token_id,
        "eos_token_id": 2 if legacy else tokenizer.eos_token_id,
    }
    parts = {"text_config": text, "vision_config": CLIP | IMAGE, "projection_dim": 24}
    tokenizer.save_pretrained(folder)
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=CROPPED)
    return save(folder, transformers.CLIPModel, processor, parts)


def save_siglip(folder: Path, has_mask: bool = False, own_tokenizer: bool = False) -> Path:
    """Save SigLIP, whose tokenizer returns no mask unless it is saved with one: its own, or one of another model."""
    tokenizer: Any = encoders.siglip_unigram() if own_tokenizer else encoders.byte_level()
    tokenizer.model_input_names = ["input_ids", *(["attention_mask"] if has_mask else [])]
    text = {**SIGLIP, "vocab_size": len(tokenizer), "max_position_embeddings": encoders.POSITIONS}
    tokenizer.save_pretrained(folder)
    processor = transformers.SiglipImageProcessor(size=CROPPED)
    return save(folder, transformers.SiglipModel, processor, {"text_config": text, "vision_config": SIGLIP | IMAGE})


def save(folder: Path, network: Any, processor: Any, config: dict[str, Any] | None = None, **options: Any) -> Path:
    """Save the network, with these fields of its config and these options, and its image processor."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)  # images get different labels
        fields = small_config(network.config_class, {"initializer_range": SPREAD}, **config or {})
        network(fields, **options).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
