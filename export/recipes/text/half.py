"""Describe the half of a model of texts and images that takes texts, or that half alone, or an encoder of DPR."""

from __future__ import annotations

import inspect
import re
import string
from functools import cached_property
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Regex, normalizers, processors
from transformers.convert_slow_tokenizer import SpmConverter

from export.check.served import Tensors
from export.checkpoint.tasks import TEXT_FEATURES, encodes_texts_and_images
from export.recipes.onnx_export import Network
from export.recipes.text.network import TextModel

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
        return super().special_token if self.own_tokenizer.is_fast else ""  # fast_tokenizer() tells why

    @property
    def method(self) -> str:
        return TEXT_FEATURES if encodes_texts_and_images(type(self.original).__name__) else "forward"

    @property
    def vector(self) -> str:
        """Return the name of the vector in transformers."""
        return "text_embeds" if type(self.original).__name__.endswith("WithProjection") else "pooler_output"

    @cached_property
    def width(self) -> int:
        return self.reference(self.request("a"))["sentence_embedding"].shape[1]

    @cached_property
    def fills_rows(self) -> bool:  # type: ignore[override]
        return FILLED_TYPE in self.whole_config.model_type

    @cached_property
    def reads_padding(self) -> bool:  # type: ignore[override]
        return self.fills_rows and "attention_mask" not in self.hugging_face_tokenizer.model_input_names

    @cached_property
    def max_length(self) -> int:
        return min(super().max_length, FILLED_LENGTH) if self.fills_rows else super().max_length

    @torch.inference_mode()
    def reference(self, request: Tensors) -> Tensors:
        padding = {"padding": "max_length"} if self.fills_rows else {}
        options = {"truncation": True, "max_length": self.max_length, "return_tensors": "pt", **padding}
        return {"sentence_embedding": self.features(**self.own_tokenizer(self.texts_of(request), **options)).numpy()}

    def features(self, **tokens: torch.Tensor) -> torch.Tensor:
        call = getattr(self.original, self.method)
        accepted = inspect.signature(call).parameters
        return getattr(call(**{name: tensor for name, tensor in tokens.items() if name in accepted}), self.vector)

    @cached_property
    def network(self) -> torch.nn.Module:
        return Network(self.original, lambda ids, mask: [self.features(input_ids=ids, attention_mask=mask)])

    @cached_property
    def layers(self) -> dict[str, object]:
        return {"model_class": type(self.original).__name__, "method": self.method, "vector": self.vector}


# --- SigLIP's tokenizer, which transformers has only in Python --------------------------------------------------------


def fast_tokenizer(slow: Any) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer that makes the same tokens: of texts in lower case, without punctuation and further spaces.

    Only in texts with a special token, such as "</s>", it differs: it begins the next word as the first of a text.
    """
    tokenizer = SpmConverter(slow).converted()
    punctuation = f"[{re.escape(string.punctuation)}]"
    steps = [
        *([normalizers.Lowercase()] if slow.do_lower_case else []),
        normalizers.Replace(Regex(punctuation), ""),
        normalizers.Replace(Regex(r"\s+"), " "),
        normalizers.Strip(),
    ]
    tokenizer.normalizer = normalizers.Sequence([*steps, tokenizer.normalizer])
    end = slow.eos_token
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, slow.eos_token_id)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in slow.all_special_tokens])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end,
        pad_token=slow.pad_token,
        unk_token=slow.unk_token,
        model_max_length=slow.model_max_length,
        model_input_names=slow.model_input_names,
        padding_side=slow.padding_side,
        truncation_side=slow.truncation_side,
    )
