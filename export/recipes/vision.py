"""Export vision models: an ensemble of image processor, ONNX and, for classifiers, labels; or one model on PyTorch.

A model of texts and images becomes a system for each half, and a front for both.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from export.catalogue import Job, Outcome
from export.check.parity import measure_parity, of_format
from export.check.served import Tensors, backend_config
from export.checkpoint.silence import quiet
from export.checkpoint.tasks import (
    IMAGE_FEATURES,
    TEXT_IMAGE,
    activation,
    encodes_texts_and_images,
    save_labels,
)
from export.recipes.config_writer import Config, batched, ensemble, ragged, tensor, write_config
from export.recipes.onnx_export import (
    Network,
    attention,
    compare_int8_batches,
    export,
    load_original,
    quantize_and_compare,
)
from export.record import is_in_git
from triton_transformers.settings import UserError
from triton_transformers.tasks.requests import path_of

MAX_BATCH = 32
HALVES = ("text", "image")
POOLED = "pooler_output"
FEATURES = ("last_hidden_state", POOLED, "image_embeds")
# The output of the image half of a system of texts and images. In transformers it has another name.
VECTOR = "sentence_embedding"
PIXELS = "pixel_values"
# The systems whose configurations are in git, and the formats that these describe.
PUBLISHED = {"python_vit": ("python",), "vit_ensemble": ("onnx", "onnx-int8")}
# The names that the published guides use for the parts of vit_ensemble.
PUBLISHED_PARTS = {"ensemble": "vit_ensemble", "processor": "preprocessing", "model": "vit"}
# The name that NVIDIA's tutorial uses for vit_ensemble. Its configuration is in git.
ALIAS = "ensemble_model"

IMAGES = [tensor("image", "FP32", [-1, -1, 3], optional=True), tensor("image_bytes", "STRING", [1], optional=True)]
PIXEL_VALUES = tensor(PIXELS, "FP32", [-1, -1, -1])


@dataclass
class VisionModel:
    """The model of a job, and the Triton models it becomes."""

    job: Job

    @property
    def classifies(self) -> bool:
        return self.job.task == "image-classification"

    @cached_property
    def original(self) -> Any:
        return self._loaded[0]

    @cached_property
    def outputs(self) -> dict[str, str]:
        """Return the outputs to serve, each with its name in transformers.

        Leave out a pooler that the weights lack: its numbers would be random.
        """
        if self.classifies:
            return {"logits": "logits"}
        return {name: name for name in self.answers[0] if name in FEATURES and name not in self._loaded[1]}

    @cached_property
    def model_class(self) -> str:
        """Return the class of transformers that loads the weights."""
        if self.classifies:
            return "AutoModelForImageClassification"
        architecture = self.job.checkpoint.architecture
        # AutoModel would load a half without its projection.
        return architecture if architecture.endswith("ModelWithProjection") else "AutoModel"

    @cached_property
    def method(self) -> str:
        """Return the method of the model that takes images: of a model of texts and images, that of its image half."""
        return IMAGE_FEATURES if encodes_texts_and_images(type(self.original).__name__) else "forward"

    @cached_property
    def _loaded(self) -> tuple[transformers.PreTrainedModel, list[str]]:
        """Return the original, and the names of its outputs that depend on missing weights."""
        model, poolers = load_original(self.job, getattr(transformers, self.model_class))
        return model, [POOLED] if poolers else []

    @cached_property
    def answers(self) -> list[Mapping[str, torch.Tensor]]:
        """Return the original's outputs for each image, by their names in transformers."""
        with torch.inference_mode():
            return [self.forward(torch.from_numpy(pixels)) for pixels in self.examples]

    def forward(self, pixels: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return getattr(self.original, self.method)(pixel_values=pixels)

    def served(self, pixels: torch.Tensor) -> list[torch.Tensor]:
        outputs = self.forward(pixels)
        return [outputs[name] for name in self.outputs.values()]

    @cached_property
    def processor(self) -> transformers.BaseImageProcessor:
        return transformers.AutoImageProcessor.from_pretrained(self.job.weights, backend="pil", local_files_only=True)

    @cached_property
    def images(self) -> list[np.ndarray]:
        """Return a few images: plain, noise, blocks and waves, in different sizes."""
        random = np.random.default_rng(0)
        rows, columns = np.mgrid[0:300, 0:200]
        waves = np.stack([np.sin(rows / 9), np.sin(columns / 7), np.sin((rows + columns) / 23)], axis=-1)
        return [
            np.full((64, 64, 3), 127, np.uint8),
            random.integers(0, 256, (48, 96, 3), np.uint8),
            random.integers(0, 256, (10, 10, 3), np.uint8).repeat(40, axis=0).repeat(40, axis=1),
            ((waves + 1) * 127).astype(np.uint8),
        ]

    @cached_property
    def examples(self) -> list[np.ndarray]:
        """Return the pixel_values of the images."""
        pixels = [self.processor(image, return_tensors="np")[PIXELS].astype(np.float32) for image in self.images]
        shapes = {array.shape for array in pixels}
        reason = ""
        if pixels[0].ndim != 4:
            reason = "cuts images into patches and keeps their proportions"
        elif len(shapes) > 1:
            shown = " and ".join(map(str, sorted(shapes)))
            reason = f"returns tensors of shape {shown} for images of different sizes"
        if reason:
            raise UserError(
                f"{self.job.system}: its {type(self.processor).__name__} {reason}, and only models that take all "
                "images in one size are served"
            )
        return pixels

    @property
    def labels(self) -> list[str]:
        return [label for _, label in sorted((self.original.config.id2label or {}).items())]

    def part(self, name: str) -> Path:
        """Return the folder of one of the Triton models."""
        own = self.job.system if name == "ensemble" else f"{self.job.system}_{name}"
        return self.job.folder / (PUBLISHED_PARTS[name] if self.job.system == "vit_ensemble" else own)


def assemble(job: Job) -> Outcome:
    return assemble_halves(job) if job.task == TEXT_IMAGE else assemble_model(VisionModel(job))


def assemble_model(model: VisionModel) -> Outcome:
    os.environ["HF_HUB_OFFLINE"] = "1"
    job = model.job
    with quiet():
        check_published(model)
        expected = reference(model)
        if job.format == "python":
            save_python(model)
        else:
            save_ensemble(model)
        requests = [{"image": image[None].astype(np.float32)} for image in model.images]
        with of_format(job.format):
            parity = measure_parity(job, requests, expected)
            parity.check()
        outcome = parity.outcome("images")
        return outcome.join(convert_to_int8(model, requests)) if job.format == "onnx-int8" else outcome


def check_published(model: VisionModel) -> None:
    """Raise if the configurations in git do not describe these weights in this format."""
    job = model.job
    formats = PUBLISHED.get(job.system)
    if formats is None:
        return
    if job.format not in formats or model.classifies:
        other = f"TASK={job.task}" if model.classifies else f"FORMAT={job.format}"
        raise UserError(
            f"{job.system} is image-feature-extraction, FORMAT={formats[0]}: choose another name in SYSTEMS for {other}"
        )
    if job.system == "vit_ensemble" and POOLED not in model.outputs:
        raise UserError(
            f"vit_ensemble returns {POOLED}, but {job.weights} has no pooler: choose another name in SYSTEMS, which is "
            "then served without"
        )


# --- in PyTorch -------------------------------------------------------------------------------------------------------


def save_python(model: VisionModel) -> None:
    job = model.job
    outputs = labelled(model) if model.classifies else features(model)
    version = job.folder / job.system / "1"
    version.mkdir(parents=True)
    job.take_model(version)
    model.processor.save_pretrained(version)
    if job.system not in PUBLISHED:
        parameters: dict[str, object] = {"task": job.task, "model_class": model.model_class}
        if model.classifies:
            parameters |= last_step(model)
        else:
            parameters |= {"method": model.method} if model.method != "forward" else {}
            parameters |= {"output": model.outputs[VECTOR]} if VECTOR in model.outputs else {}
        if job.trust_remote_code:
            parameters["trust_remote_code"] = 1
        write(model, "ensemble", batched("transformers", MAX_BATCH, ragged(IMAGES), outputs, "KIND_AUTO"), parameters)


def features(model: VisionModel) -> list[Config]:
    """Return the outputs of the original. All images have one size, so their shapes are known."""
    return [tensor(name, "FP32", list(model.answers[0][own].shape[1:])) for name, own in model.outputs.items()]


# --- as an ensemble ---------------------------------------------------------------------------------------------------


def save_ensemble(model: VisionModel) -> None:
    for part in ("ensemble", "processor", "model", *(["answers"] if model.classifies else [])):
        (model.part(part) / "1").mkdir(parents=True)
    if model.job.system == "vit_ensemble":
        (model.job.folder / ALIAS / "1").mkdir(parents=True)  # Triton requires a version of each model
    model.processor.save_pretrained(model.part("processor") / "1")
    save_onnx(model, model.part("model") / "1/model.onnx")
    if model.classifies:
        save_labels(model.part("answers") / "1", model.labels)
    if model.job.system not in PUBLISHED:
        write_configs(model)


def save_onnx(model: VisionModel, target: Path) -> None:
    """Export. The exporters see only the first example, and would take a batch of one for the size of all batches."""
    batches = [np.concatenate(model.examples[:2]), np.concatenate(model.examples[:3]), model.examples[3]]
    rows = {0: "images"}
    outputs = dict.fromkeys(model.outputs, rows)
    export(
        Network(model.original, model.served), {PIXELS: rows}, outputs, [{PIXELS: batch} for batch in batches], target
    )


def convert_to_int8(model: VisionModel, requests: list[Tensors]) -> Outcome:
    feeds = [{PIXELS: example} for example in model.examples]
    int8 = quantize_and_compare(model.part("model") / "1/model.onnx", feeds)
    return int8.join(compare_int8_batches(model.job, requests, model.outputs))


def write_configs(model: VisionModel) -> None:
    outputs = features(model)
    parts = {
        "processor": batched("image_processor", MAX_BATCH, ragged(IMAGES), [PIXEL_VALUES], "KIND_CPU"),
        "model": batched("onnxruntime", MAX_BATCH, [PIXEL_VALUES], outputs, "KIND_AUTO"),
    }
    if model.classifies:
        parts["answers"] = batched("postprocessor", MAX_BATCH, outputs, labelled(model), "KIND_CPU")
    steps = {model.part(part).name: config for part, config in parts.items()}
    parts["ensemble"] = ensemble(steps, IMAGES, list(steps.values())[-1]["output"])
    for part, config in parts.items():
        write(model, part, config, last_step(model) if part == "answers" else {})


def write(model: VisionModel, part: str, config: Config, parameters: dict[str, object]) -> None:
    if part == "ensemble" and model.classifies:
        # The gateway's clients get the labels by their names.
        parameters = parameters | {"labels": json.dumps(model.labels, ensure_ascii=False)}
    write_config(model.part(part), f"{model.job.task}, written by `make models`", config, parameters)


def last_step(model: VisionModel) -> dict[str, object]:
    return {"task": model.job.task, "activation": activation(model.original.config)}


def labelled(model: VisionModel) -> list[Config]:
    return [tensor("label", "STRING", [1]), tensor("score", "FP32", [1]), tensor("scores", "FP32", [len(model.labels)])]


# --- parity with the original -----------------------------------------------------------------------------------------


def reference(model: VisionModel) -> list[Tensors]:
    """Return the original's outputs for each image, or the scores of a classifier, as the pipeline computes them."""
    if model.classifies:
        scores = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid, "none": lambda x: x}
        return [
            {"scores": scores[activation(model.original.config)](output["logits"]).numpy()} for output in model.answers
        ]
    return [{name: output[own].numpy() for name, own in model.outputs.items()} for output in model.answers]


# --- models of texts and images ---------------------------------------------------------------------------------------


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
        options = {"use_safetensors": True, "dtype": torch.float32, **attention(self.job)}
        return SentenceTransformer(
            str(self.job.weights), device="cpu", local_files_only=True, model_kwargs=options
        ).eval()

    def forward(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        features = self.original({PIXELS: pixels, "modality": "image"})
        return {POOLED: features[VECTOR][:, : self.original.truncate_dim]}


def assemble_halves(job: Job) -> Outcome:
    """Make a system for each half, and one that sends each request to one of them."""
    from export.recipes.text import recipe

    if is_in_git(job.system):
        raise UserError(f"{job.system} has a configuration in git, for another task: choose another name in SYSTEMS")
    names = {half: f"{job.system}_{half}" for half in HALVES}
    kind = LibraryImageHalf if (job.weights / "modules.json").exists() else ImageHalf
    # The halves share the weights, so only the last one may take them.
    texts = recipe.assemble(replace(job, system=names["text"], task="sentence-similarity", movable=False))
    images = assemble_model(kind(replace(job, system=names["image"], task="image-feature-extraction")))
    write_front(job, names)
    shutil.copy(path_of(job.folder / names["text"]), path_of(job.folder / job.system))
    return Outcome(f"texts: {texts.summary}; images: {images.summary}", texts.facts | images.facts)


def write_front(job: Job, names: dict[str, str]) -> None:
    """Write the configuration of the model that clients call. Its outputs are those of the half that takes texts."""
    texts, images = (backend_config(job.folder / name / "config.pbtxt")["output"] for name in names.values())
    if images[0] not in texts:
        raise UserError(f"{job.system}: its vectors of texts and of images differ in width, and cannot be compared")
    inputs = ragged([tensor("input_text", "STRING", [1], optional=True), *IMAGES])
    config = batched("text_or_image", MAX_BATCH, inputs, texts, "KIND_CPU")
    (job.folder / job.system / "1").mkdir(parents=True)  # Triton requires a version of each model
    parameters: dict[str, object] = {f"{half}_model": name for half, name in names.items()}
    write_config(job.folder / job.system, f"{job.task}, written by `make models`", config, parameters)
