"""Export a model of texts and images: a system for each half, and one that sends each request to one of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from triton_transformers.model_config import CALLED, CONFIGS, find_config
from triton_transformers.models.catalogue import Job, Outcome
from triton_transformers.models.exporters import text, vision
from triton_transformers.models.exporters.config_writer import batched, ragged, tensor, write_config
from triton_transformers.models.exporters.served import backend_config
from triton_transformers.models.exporters.vision import IMAGES, POOLED, VECTOR, VisionModel
from triton_transformers.settings import UserError

MAX_BATCH = vision.MAX_BATCH
HALVES = ("text", "image")


@dataclass
class ImageHalf(VisionModel):
    """The half of the model that takes images."""

    @cached_property
    def outputs(self) -> dict[str, str]:
        return {VECTOR: POOLED}


class LibraryImageHalf(ImageHalf):
    """The image half of a model of sentence-transformers: its modules after the first serve texts and images alike."""

    @cached_property
    def original(self) -> Any:
        from sentence_transformers import SentenceTransformer

        if self.job.format == "python":
            raise UserError(
                f"{self.job.system}: FORMAT=python does not support this sentence-transformer of texts and images: set "
                "FORMAT=onnx"
            )
        options = {"use_safetensors": True, "dtype": torch.float32, "attn_implementation": vision.PLAIN_ATTENTION}
        return SentenceTransformer(
            str(self.job.weights), device="cpu", local_files_only=True, model_kwargs=options
        ).eval()

    def forward(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        features = self.original({vision.PIXELS: pixels, "modality": "image"})
        return {POOLED: features[VECTOR][:, : self.original.truncate_dim]}


def assemble(job: Job) -> Outcome:
    if find_config(job.system, CONFIGS):
        raise UserError(f"{job.system} has a configuration in git, for another task: choose another name in SYSTEMS")
    names = {half: f"{job.system}_{half}" for half in HALVES}
    kind = LibraryImageHalf if (job.weights / "modules.json").exists() else ImageHalf
    # The halves share the weights, so only the last one may take them.
    texts = text.assemble(replace(job, system=names["text"], task="sentence-similarity", movable=False))
    images = vision.assemble_model(kind(replace(job, system=names["image"], task="image-feature-extraction")))
    write_front(job, names)
    return Outcome(f"texts: {texts.summary}; images: {images.summary}", texts.facts | images.facts)


def write_front(job: Job, names: dict[str, str]) -> None:
    """Write the configuration of the model that clients call. Its outputs are those of the half that takes texts."""
    texts, images = (backend_config(job.folder / name / "config.pbtxt")["output"] for name in names.values())
    if images[0] not in texts:
        raise UserError(f"{job.system}: its vectors of texts and of images differ in width, and cannot be compared")
    inputs = ragged([tensor("input_text", "STRING", [1], optional=True), *IMAGES])
    config = batched("text_or_image", MAX_BATCH, inputs, texts, "KIND_CPU")
    (job.folder / job.system / "1").mkdir(parents=True)  # Triton requires a version of each model
    parameters: dict[str, object] = dict(zip(CALLED, names.values(), strict=True))
    write_config(job.folder / job.system, f"{job.task}, written by `make models`", config, parameters)
