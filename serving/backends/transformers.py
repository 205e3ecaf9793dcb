"""Backend `transformers`: serves Hugging Face models on PyTorch."""

from __future__ import annotations

from typing import ClassVar

from serving.triton.backend import TaskBackend


class TritonPythonModel(TaskBackend):
    tasks: ClassVar = {
        "text-generation": ("serving.generation.batched", "BatchedGeneration"),
        "text-encoder": ("serving.encoders.on_torch", "TextEncoder"),
        "image-feature-extraction": ("serving.vision.tasks", "ImageTask"),
        "image-classification": ("serving.vision.tasks", "ImageTask"),
    }
    default_task = "text-generation"
