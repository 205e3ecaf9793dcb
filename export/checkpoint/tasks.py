"""Find a model's task from its files."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

from export.checkpoint.checkpoint import Checkpoint
from triton_transformers.settings import UserError
from triton_transformers.tasks.table import TASKS

LIST = "docs/models.md lists what is served"
# The heads of BGE-M3, beside the weights of its encoder.
HEADS = ("sparse_linear.safetensors", "colbert_linear.safetensors")
# The files that turn inputs into tensors.
TOKENIZER = ("tokenizer*.json", "vocab.*", "*.model", "*.tiktoken")
IMAGE_PROCESSOR = ("preprocessor_config.json", "processor_config.json")
# The task of a model that turns texts and images into vectors of one space, and the tasks that one half of it is for.
TEXT_IMAGE = "text-image-similarity"
HALF_TASKS = ("sentence-similarity", "image-feature-extraction")
# The methods of a model for texts and images that turn each kind into vectors of one space.
TEXT_FEATURES, IMAGE_FEATURES = "get_text_features", "get_image_features"
# The task of a model that answers chats with images.
IMAGE_TEXT = "image-text-to-text"


def task_of_architecture(name: str) -> str:
    """Return the task, or "" if the name has no known ending."""
    return next((task for task, row in TASKS.items() if row.heads and name.endswith(row.heads)), "")


def is_vision(task: str) -> bool:
    """Return whether the task's only inputs are images."""
    return task.startswith("image-") and task != IMAGE_TEXT


def processors_of(task: str) -> dict[str, tuple[str, ...]]:
    """Return the processors that turn the task's inputs into tensors, each with the names of its files."""
    processors: dict[str, tuple[str, ...]] = {"tokenizer": TOKENIZER} if not is_vision(task) else {}
    if is_vision(task) or task in (TEXT_IMAGE, IMAGE_TEXT):
        processors["image processor"] = IMAGE_PROCESSOR
    return processors


def has_files_for(task: str, checkpoint: Checkpoint) -> bool:
    """Return whether the folder has the files of all the task's processors."""
    return all(checkpoint.has(*patterns) for patterns in processors_of(task).values())


def needs_pipeline(task: str, checkpoint: Checkpoint) -> bool:
    """Return whether only transformers' pipeline serves the model for this task: faster formats take other models."""
    row = TASKS.get(task)
    if row is None or not row.is_faster_elsewhere:
        return row is not None and bool(row.fields)
    known = any(task_of_architecture(name) == task for name in checkpoint.architectures)
    return task in checkpoint.pipelines and (bool(checkpoint.config.get("is_encoder_decoder")) or not known)


def network_of(architecture: str) -> Any:
    """Return the class of transformers with this name, or None."""
    import transformers

    return getattr(transformers, architecture, None)


def type_of_architecture(name: str) -> str:
    """Return the model_type of an architecture of transformers, or "" for the name of another."""
    return getattr(getattr(network_of(name), "config_class", None), "model_type", "")


def encodes_texts_and_images(architecture: str) -> bool:
    """Return whether an architecture of transformers turns texts and images into vectors of one space."""
    network = network_of(architecture)
    return hasattr(network, TEXT_FEATURES) and hasattr(network, IMAGE_FEATURES)


def takes_images(architecture: str) -> bool:
    """Return whether an architecture of transformers takes images and no texts."""
    return getattr(network_of(architecture), "main_input_name", "") == "pixel_values"


def inputs_of(network: Any) -> set[str]:
    """Return the names of a network's inputs, or none if it is no class of transformers."""
    return set(inspect.signature(network.forward).parameters) if hasattr(network, "forward") else set()


def sees(architecture: str) -> bool:
    """Return whether an architecture of transformers takes images, perhaps beside texts."""
    return not inputs_of(network_of(architecture)).isdisjoint({"pixel_values", "image_patches"})


def task_of(checkpoint: Checkpoint) -> str:
    """Return the task of a model in a folder that save_pretrained wrote."""
    architectures = checkpoint.architectures
    if checkpoint.is_cross_encoder:  # one with several labels ranks nothing
        has_head = any(name.endswith("ForSequenceClassification") for name in architectures)
        return "text-classification" if has_head and checkpoint.label_count > 1 else "text-ranking"
    if any(map(encodes_texts_and_images, architectures)):
        return TEXT_IMAGE
    if all((checkpoint.folder / name).exists() for name in HEADS):
        return "hybrid-embedding"
    if checkpoint.is_multi_vector:
        return "multi-vector-embedding"
    if checkpoint.has_modules:
        return "sparse-embedding" if checkpoint.library_class == "SparseEncoder" else "sentence-similarity"
    likely = next(iter(checkpoint.pipelines), "")
    # GIT's name ends as that of a model of texts.
    if likely and (not TASKS[likely].is_faster_elsewhere or (likely == IMAGE_TEXT and any(map(sees, architectures)))):
        return likely
    if task := next(filter(None, map(task_of_architecture, architectures)), likely):
        return task
    name = checkpoint.name
    if checkpoint.has_two_halves:
        raise UserError(
            f"{name} is for texts and images together ({checkpoint.kind}), which is not served here ({LIST})"
        )
    has_images = any(map(takes_images, architectures)) or has_files_for("image-feature-extraction", checkpoint)
    for architecture in architectures:
        if architecture.endswith("ModelWithProjection"):  # one half of CLIP
            return "image-feature-extraction" if has_images else "sentence-similarity"
        if architecture.endswith("Model"):
            encodes = "sentence-similarity" if checkpoint.adapters else "feature-extraction"
            return "image-feature-extraction" if has_images else encodes
    named = f"is a {architectures[0]}, and no task is for its head" if architectures else "names no architecture"
    headless = ("feature-extraction", "image-feature-extraction")
    ways = [f"TASK={task}" for task in headless if has_files_for(task, checkpoint)]
    instead = f"set {' or '.join(ways)} to serve it without a head, or choose another model" if ways else LIST
    raise UserError(f"{name} {named}: {instead}")


def save_labels(version: Path, labels: list[str]) -> None:
    """Write the labels for the last step, in the order of the model's logits."""
    text = json.dumps(labels, ensure_ascii=False)
    (version / "labels.json").write_text(f"{text}\n", encoding="utf-8")


def activation(config: Any) -> str:
    """Return the function that turns a classifier's logits into scores, chosen as transformers' pipelines do."""
    if config.problem_type == "regression":
        return "none"
    multi_label = config.problem_type == "multi_label_classification" or config.num_labels == 1
    return "sigmoid" if multi_label else "softmax"
