"""Computes the embeddings of images with the vision part of a model for chats, whose language part OpenVINO runs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from serving.engines.lean_transformers import transformers
from serving.engines.pretrained import copy_weights, silence_transformers, size, stored_weights
from serving.generation.openvino.image_rows import AXES, NOWHERE, TABLE, Rows
from serving.vision.chat import PER_TOKEN

if TYPE_CHECKING:
    from serving.vision.chat import Inputs

FOLDER = "vision"  # beside the language part


def memory_needed(folder: Path) -> int:
    return size(stored_weights(folder / FOLDER), torch.float32)


class VisionPart:
    """The part of the model that reads images, in float32. Threads may share it."""

    def __init__(self, folder: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        silence_transformers()
        self.model = transformers.AutoModel.from_pretrained(
            folder / FOLDER, dtype=torch.float32, use_safetensors=True, local_files_only=True
        ).eval()
        copy_weights(self.model)

    def rows(self, tokens: Sequence[int], inputs: Inputs) -> Rows:
        """Return the rows of a chat's tokens up to its last image."""
        ids = torch.tensor([list(tokens)])
        is_image = ids[0] == self.model.config.image_token_id
        count = int(is_image.nonzero()[-1]) + 1
        digest = hashlib.sha256(ids[0, :count].numpy().tobytes())
        for name in sorted(inputs):
            digest.update(inputs[name].contiguous().numpy().tobytes())
        content = digest.digest()
        return TABLE.find(content) or TABLE.add(content, self.computed(ids, is_image[:count], inputs))

    @torch.inference_mode()
    def computed(self, ids: torch.Tensor, is_image: torch.Tensor, inputs: Inputs) -> Rows:
        pixels = {name: value for name, value in inputs.items() if name not in PER_TOKEN}
        output = self.model.get_image_features(**pixels, return_dict=True)
        layers = [output.pooler_output, *getattr(output, "deepstack_features", ())]
        parts = [torch.cat(tuple(layer)) if isinstance(layer, list | tuple) else layer for layer in layers]
        features = torch.cat([part.flatten(0, -2) for part in parts], -1)
        count = len(is_image)
        embeddings = np.zeros((count, features.shape[-1] + 1), np.float32)
        embeddings[is_image.numpy(), :-1] = features.numpy()
        embeddings[:, -1] = is_image.numpy()
        places = np.full((AXES, count), NOWHERE)
        if hasattr(self.model, "get_rope_index"):
            positions, offset = self.model.get_rope_index(
                ids, **{name: value for name, value in inputs.items() if name != "pixel_values"}
            )
            # The positions count, and not their differences: so the text after the images keeps those of its length.
            places = (positions[:, 0, :count] - offset[0]).numpy()
        return Rows(ids[0, :count].numpy(), embeddings, places)
