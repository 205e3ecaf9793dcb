"""Text encoders on PyTorch, in packed runs: the same tensors as the ONNX graph of the same model, without an export."""

from __future__ import annotations

import json

import numpy as np
import torch
import transformers

from shared import pretrained
from shared.config import choice_parameter, int_parameter, parameter
from shared.errors import ConfigError
from shared.packed import Encoder, PackedRuns


class TextEncoder(PackedRuns):
    """Parameter `model_class`: which of transformers' classes the weights are."""

    def __init__(self, args: dict) -> None:
        config = json.loads(args["model_config"])
        name = parameter(config, "model_class", "AutoModel")
        if not hasattr(transformers, name):
            raise ConfigError(f"parameter 'model_class': transformers has no class '{name}'")
        self.model = pretrained.load(getattr(transformers, name), config, args)
        self.pooling = choice_parameter(config, "pooling", ("mean", "cls"), "mean")
        self.normalize = choice_parameter(config, "normalize", ("0", "1"), "0") == "1"
        self.mask_token_id = int_parameter(config, "mask_token_id", -1)
        encoder = Encoder(
            inputs={tensor["name"]: np.int64 for tensor in config["input"]},
            outputs=[tensor["name"] for tensor in config["output"]],
            per_token={tensor["name"] for tensor in config["output"] if int(tensor["dims"][0]) == -1},
            run=self.forward,
        )
        # PyTorch spreads one run over its threads.
        super().__init__(args, config, encoder, at_once=1)

    @torch.inference_mode()
    def forward(self, wanted: list[str] | None, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        tensors = {name: torch.from_numpy(array).to(self.model.device) for name, array in feed.items()}
        found = self.model(**tensors)
        return [self.output(name, found, tensors).float().cpu().numpy() for name in wanted or self.encoder.outputs]

    def output(self, name: str, found, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        if name == "mask_logits":
            where = (tensors["input_ids"] == self.mask_token_id).int().argmax(dim=1)
            return found.logits[torch.arange(len(where)), where]
        if name == "sentence_embedding":
            return self.pool(found.last_hidden_state, tensors["attention_mask"])
        return found[name]

    def pool(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        weights = mask[..., None].to(tokens.dtype)
        vectors = tokens[:, 0] if self.pooling == "cls" else (tokens * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(vectors, dim=1) if self.normalize else vectors
