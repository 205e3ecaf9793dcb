"""Describe a model of sentence-transformers that is being assembled, so that it is served as encode() answers."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import transformers
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.model import BaseModel
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import Dropout, Normalize, Pooling
from sentence_transformers.sparse_encoder.modules import SpladePooling

from scripts.common.settings import UserError
from scripts.models.exporters.text_model import TextModel
from scripts.models.silence import quiet

PROMPT_INPUTS = ("prompt_name", "prompt")
POOLING_MASK = "pooling_mask"


class SentenceModel(TextModel):
    library: ClassVar[type[BaseModel]] = SentenceTransformer

    @cached_property
    def original(self) -> Any:
        """Return the model as the library loads it. Its texts must go through a tokenizer as they are."""
        with quiet():  # it warns about a default prompt
            model = self.library(
                str(self.job.weights),
                device="cpu",
                trust_remote_code=self.job.trust_remote_code,
                local_files_only=True,
                model_kwargs={"use_safetensors": True, "dtype": torch.float32, **self.attention},
                processor_kwargs=self.processor_options,
            )
        first = model[0]
        if not isinstance(first, Transformer):
            raise UserError(
                f"{self.job.system}: its first module is {type(first).__name__}, and only sentence-transformers that "
                "begin with a Transformer are served"
            )
        # Raises if weights are missing. In the type of the file, they need no memory.
        self.load(type(first.model), dtype="auto")
        return model.eval()

    @property
    def transformer(self) -> transformers.PreTrainedModel:
        return self.original[0].model

    def encode(self, texts: list[str], **prompt: str) -> np.ndarray:
        return self.original.encode(texts, **prompt)

    def load_tokenizer(self) -> Any:
        """Return the library's tokenizer, which may also put texts into lower case and knows the maximum length."""
        return self.original.tokenizer

    @property
    def processor_options(self) -> dict[str, Any]:
        """Return the options with which the library loads the tokenizer."""
        return {}

    @cached_property
    def max_length(self) -> int:
        options = self.original[0].processing_kwargs
        own = [options.get(name, {}).get("max_length") for name in ("common", "text", "chat_template")]
        return min([super().max_length, *filter(None, own)])

    @cached_property
    def chat(self) -> dict[str, Any] | None:
        """Return the fields of shared/embedding_prompts.py's Chat if the texts pass through a chat template."""
        first = self.original[0]
        if "message" not in first.modality_config:
            return None
        variables = dict(first.processing_kwargs.get("chat_template", {}))
        try:
            template = first.processor.get_chat_template(variables.pop("chat_template", None))
        except ValueError:
            raise UserError(
                f"{self.job.system}: its texts pass through a chat template, and its tokenizer has none: write it to "
                "chat_template.jinja, or remove message from the modality_config in sentence_bert_config.json"
            ) from None
        return {
            "template": template,
            "special_tokens": first.tokenizer.special_tokens_map,
            "roles": ["query", "document"] if self.takes_pairs else ["user"],
            "parts": first.input_formatter.message_format == "structured",
            "variables": variables,
        }

    @property
    def adds_special_tokens(self) -> bool:
        return not self.chat  # the template writes them

    @cached_property
    def pools_prompt(self) -> bool:
        return all(module.include_prompt for module in self.original if isinstance(module, Pooling))

    @cached_property
    def optional_inputs(self) -> tuple[str, ...]:
        """Return the inputs that choose a prompt, unless the model has none."""
        has_prompts = any(self.original.prompts.values()) or not self.pools_prompt or self.chat
        return PROMPT_INPUTS if has_prompts else ()

    @cached_property
    def token_inputs(self) -> list[str]:
        return ["input_ids", "attention_mask", *([] if self.pools_prompt else [POOLING_MASK])]

    @cached_property
    def width(self) -> int:
        return self.original.get_embedding_dimension() or super().width

    @cached_property
    def network(self) -> torch.nn.Module:
        return LibraryNetwork(self, "sentence_embedding")

    def save_prompts(self, version: Path) -> None:
        if not self.optional_inputs:
            return
        fields = {"default_prompt_name": self.original.default_prompt_name, "prompts": self.original.prompts}
        if self.chat:
            fields["chat"] = self.chat
        text = json.dumps(fields, ensure_ascii=False, indent=2)
        (version / "prompts.json").write_text(f"{text}\n", encoding="utf-8")

    @cached_property
    def dense(self) -> dict[str, Dense]:
        """Return the dense layers after the pooling, by the name of their folder."""
        layers = [module for module in self.original if isinstance(module, Dense)]
        return {f"{number}_Dense": layer for number, layer in enumerate(layers, start=2)}

    def save_layers(self, version: Path) -> None:
        _ = self.layers  # raises if they are not supported
        for name, layer in self.dense.items():
            (version / name).mkdir()
            layer.save(str(version / name))

    @cached_property
    def layers(self) -> dict[str, object]:
        transformer, *modules = self.original
        kinds = [type(module) for module in modules if not isinstance(module, Dropout)]
        supported = [Pooling, *[Dense] * len(self.dense), *[Normalize] * (Normalize in kinds)]
        if kinds != supported or not all(map(is_plain, self.dense.values())):
            names = ", ".join(kind.__name__ for kind in kinds)
            raise UserError(
                f"{self.job.system}: FORMAT=python does not support this sentence-transformer's modules after its "
                f"Transformer ({names}): set FORMAT=onnx"
            )
        modes: Any = modules[0].pooling_mode
        network: Any = transformer.model
        parameters: dict[str, object] = {
            # The library takes only the encoder of an encoder-decoder. Code of the model's own has no class here.
            "model_class": type(network).__name__ if hasattr(transformers, type(network).__name__) else "AutoModel",
            "dtype": str(network.dtype).removeprefix("torch."),
            "pooling": modes if isinstance(modes, str) else "+".join(modes),
            "dense": ",".join(self.dense),
            "normalize": int(Normalize in kinds),
            "dimensions": self.original.truncate_dim,
        }
        return {name: value for name, value in parameters.items() if value not in ("", None)}


class SparseModel(SentenceModel):
    """A SparseEncoder with SPLADE's pooling: a vector with a weight for each token of the vocabulary."""

    library = SparseEncoder

    @cached_property
    def original(self) -> Any:
        model = super().original
        kinds = [type(module).__name__ for module in model]
        if not isinstance(model[-1], SpladePooling) or len(kinds) != 2:
            raise UserError(
                f"{self.job.system}: TASK={self.job.task} serves a masked language model with SPLADE's pooling, and "
                f"this is a sparse encoder of {', '.join(kinds)}"
            )
        return model

    def encode(self, texts: list[str], **prompt: str) -> np.ndarray:
        return self.original.encode(texts, convert_to_sparse_tensor=False, **prompt).float().numpy()

    @cached_property
    def layers(self) -> dict[str, object]:
        pooling = self.original[1]
        return {
            "model_class": self.task.model_class,
            "dtype": str(self.original[0].model.dtype).removeprefix("torch."),
            "splade_pooling": pooling.pooling_strategy,
            "splade_activation": pooling.activation_function,
        }


class LibraryNetwork(torch.nn.Module):
    """The modules of the library from the tensors of `token_inputs` to what they compute under this name."""

    def __init__(self, model: SentenceModel, name: str) -> None:
        super().__init__()
        self.original = model.original
        self.inputs = model.token_inputs
        self.modality = "message" if model.chat else "text"
        self.name = name
        for module in self.original:
            if isinstance(module, Pooling):
                module.register_forward_pre_hook(use_pooling_mask)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor]:
        features = dict(zip(self.inputs, tensors, strict=True)) | {"modality": self.modality}
        dimensions = getattr(self.original, "truncate_dim", None)  # only a SentenceTransformer has it
        return (self.original(features)[self.name][:, :dimensions],)


def use_pooling_mask(_: torch.nn.Module, args: tuple[dict[str, Any]]) -> None:
    if POOLING_MASK in args[0]:
        args[0]["attention_mask"] = args[0].pop(POOLING_MASK)


def is_plain(layer: Dense) -> bool:
    """Return whether a dense layer computes on the pooled vector, with an activation that torch.nn has."""
    names = layer.module_input_name, layer.module_output_name
    return names == ("sentence_embedding",) * 2 and hasattr(torch.nn, type(layer.activation_function).__name__)
