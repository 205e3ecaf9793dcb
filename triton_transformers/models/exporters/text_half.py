"""Describe the half of a model of texts and images that takes texts, or that half alone, or an encoder of DPR."""

from __future__ import annotations

import inspect
from functools import cached_property
from typing import Any

import numpy as np
import torch
import transformers

from triton_transformers.models.exporters.siglip_tokenizer import fast_tokenizer
from triton_transformers.models.exporters.text_model import TextModel
from triton_transformers.models.purposes import TEXT_FEATURES, encodes_texts_and_images

# SigLIP was trained on texts that are padded to this length, and reads the padding. transformers' own pipeline, too,
# knows such models by the name of their type.
FILLED_TYPE, FILLED_LENGTH = "siglip", 64


class TextHalf(TextModel):
    @cached_property
    def original(self) -> Any:
        """Return the model. AutoModel would load a half without its projection, and only DPR's encoder of questions."""
        return self.load(getattr(transformers, self.whole_config.architectures[0]))

    @cached_property
    def own_tokenizer(self) -> Any:
        return self.load_tokenizer()

    @cached_property
    def hugging_face_tokenizer(self) -> transformers.PreTrainedTokenizerFast:
        if isinstance(self.own_tokenizer, transformers.SiglipTokenizer):
            return fast_tokenizer(self.own_tokenizer)
        return super().hugging_face_tokenizer

    @property
    def special_token(self) -> str:
        return super().special_token if self.own_tokenizer.is_fast else ""  # siglip_tokenizer.py tells why

    @property
    def method(self) -> str:
        return TEXT_FEATURES if encodes_texts_and_images(type(self.original).__name__) else "forward"

    @property
    def vector(self) -> str:
        """Return the name of the vector in transformers."""
        return "text_embeds" if type(self.original).__name__.endswith("WithProjection") else "pooler_output"

    @cached_property
    def width(self) -> int:
        return self.encode(["a"]).shape[1]

    @cached_property
    def fills_rows(self) -> bool:
        return FILLED_TYPE in self.whole_config.model_type

    @cached_property
    def reads_padding(self) -> bool:
        return self.fills_rows and "attention_mask" not in self.hugging_face_tokenizer.model_input_names

    @cached_property
    def max_length(self) -> int:
        return min(super().max_length, FILLED_LENGTH) if self.fills_rows else super().max_length

    @torch.inference_mode()
    def encode(self, texts: list[str], **prompt: str) -> np.ndarray:
        padding = {"padding": "max_length"} if self.fills_rows else {}
        tokens = self.own_tokenizer(texts, truncation=True, max_length=self.max_length, return_tensors="pt", **padding)
        return self.features(**tokens).numpy()

    def features(self, **tokens: torch.Tensor) -> torch.Tensor:
        call = getattr(self.original, self.method)
        accepted = inspect.signature(call).parameters
        return getattr(call(**{name: tensor for name, tensor in tokens.items() if name in accepted}), self.vector)

    @cached_property
    def network(self) -> torch.nn.Module:
        return HalfNetwork(self)

    @cached_property
    def layers(self) -> dict[str, object]:
        return {"model_class": type(self.original).__name__, "method": self.method, "vector": self.vector}


class HalfNetwork(torch.nn.Module):
    """The network from tokens to the vector, which shares its space with the vectors of images."""

    def __init__(self, half: TextHalf) -> None:
        super().__init__()
        self.original = half.original
        self.model = half

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.model.features(input_ids=input_ids, attention_mask=attention_mask),)
