"""Task `text-encoder` on PyTorch: the same tensors as the ONNX graph of the same model, without an export."""

from __future__ import annotations

import numpy as np
import torch
import transformers
from transformers.utils import ModelOutput

from shared import pretrained
from shared.errors import ConfigError
from shared.packed_encoder import Encoder, PackedEncoder
from shared.parameters import choice_parameter, int_parameter, parameter
from shared.types import Array, InstanceArgs, ModelConfig, Tensors


class TextEncoder(PackedEncoder):
    def load_encoder(self, config: ModelConfig, args: InstanceArgs) -> Encoder:
        name = parameter(config, "model_class", "AutoModel")
        if not hasattr(transformers, name):
            raise ConfigError(f"parameter 'model_class': transformers {transformers.__version__} has no class '{name}'")
        self.model = pretrained.load(getattr(transformers, name), config, args)
        if (pad := self.pad_values["input_ids"]) < 0:
            # No token has this id, so the model finds the last token of any text; the embedding must not look it up.
            self.model.config.pad_token_id = pad
            self.model.get_input_embeddings().register_forward_pre_hook(lambda _, ids: (ids[0].clamp(min=0),))
        self.pooling = choice_parameter(config, "pooling", ("mean", "cls"), "mean")
        self.normalize = choice_parameter(config, "normalize", ("0", "1"), "0") == "1"
        self.mask_token_id = int_parameter(config, "mask_token_id", -1)
        return Encoder(
            inputs={tensor["name"]: np.int64 for tensor in config["input"]},
            outputs=[tensor["name"] for tensor in config["output"]],
            per_token={tensor["name"] for tensor in config["output"] if int(tensor["dims"][0]) == -1},
            run=self.forward,
            parallel_runs=1,  # PyTorch spreads one run over its threads
        )

    @torch.inference_mode()
    def forward(self, names: list[str] | None, feed: Tensors) -> list[Array]:
        tensors = {name: torch.from_numpy(array).to(self.model.device) for name, array in feed.items()}
        outputs = self.model(**tensors)
        names = names or self.encoder.outputs
        return [self.output(name, outputs, tensors).float().cpu().numpy() for name in names]

    def output(self, name: str, outputs: ModelOutput, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        if name == "mask_logits":
            positions = (tensors["input_ids"] == self.mask_token_id).int().argmax(dim=1)
            logits: torch.Tensor = outputs["logits"]
            return logits[torch.arange(len(positions)), positions]
        if name == "sentence_embedding":
            return self.pool(outputs["last_hidden_state"], tensors["attention_mask"])
        output: torch.Tensor = outputs[name]
        return output

    def pool(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        weights = mask[..., None].to(tokens.dtype)
        vectors = tokens[:, 0] if self.pooling == "cls" else (tokens * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(vectors, dim=1) if self.normalize else vectors
