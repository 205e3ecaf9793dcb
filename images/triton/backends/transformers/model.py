"""Backend `transformers`: serves Hugging Face models on PyTorch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

sys.path.append(str(Path(__file__).resolve().parents[1]))

from shared.backend import TaskBackend


class TritonPythonModel(TaskBackend):
    tasks: ClassVar = {
        "text-generation": ("shared.batched_generation", "BatchedGeneration"),
        "text-encoder": ("shared.text_encoder", "TextEncoder"),
        "image-feature-extraction": ("shared.vision", "ImageTask"),
        "image-classification": ("shared.vision", "ImageTask"),
    }
    default_task = "text-generation"
