"""Describe the text half of CLIP that is being assembled, so that it is served as get_text_features() answers."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
import transformers

from scripts.models.exporters.text_model import TextModel

# The types of config.json with a text tower: CLIP as a whole, and the tower alone.
TYPES = ("clip", "clip_text_model")


class TextTower(TextModel):
    @cached_property
    def config(self) -> Any:
        config = super().config
        return getattr(config, "text_config", config)

    @property
    def width(self) -> int:
        return self.config.projection_dim

    @cached_property
    def original(self) -> Any:
        return self.load(transformers.CLIPTextModelWithProjection)

    @cached_property
    def clip(self) -> Any:
        """Return the whole model, unless the weights are the tower alone."""
        return self.load(transformers.CLIPModel) if super().config.model_type == "clip" else None

    @torch.inference_mode()
    def encode(self, texts: list[str], **prompt: str) -> np.ndarray:
        tokens = self.hugging_face_tokenizer(texts, truncation=True, max_length=self.max_length, return_tensors="pt")
        if self.clip:
            return self.clip.get_text_features(**tokens).pooler_output.numpy()
        return self.original(**tokens).text_embeds.numpy()

    @cached_property
    def network(self) -> torch.nn.Module:
        return TowerNetwork(self.original)

    @cached_property
    def layers(self) -> dict[str, object]:
        return {"model_class": type(self.original).__name__}


class TowerNetwork(torch.nn.Module):
    """The network from tokens to the vector, which shares its space with the vectors of images."""

    def __init__(self, original: transformers.CLIPTextModelWithProjection) -> None:
        super().__init__()
        self.original = original
        self.config = original.config

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.original(input_ids=input_ids, attention_mask=attention_mask).text_embeds,)
