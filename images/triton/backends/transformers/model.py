"""Backend `transformers`: serves Hugging Face models on PyTorch."""

from __future__ import annotations

import locale
import os
import sys
from pathlib import Path
from typing import ClassVar

sys.path.append(str(Path(__file__).resolve().parents[1]))

from shared.backend import TaskBackend
from shared.types import InstanceArgs


class TritonPythonModel(TaskBackend):
    tasks: ClassVar = {
        "text-generation": ("shared.batched_generation", "BatchedGeneration"),
        "text-encoder": ("shared.text_encoder", "TextEncoder"),
        "image-feature-extraction": ("shared.vision", "ImageTask"),
        "image-classification": ("shared.vision", "ImageTask"),
    }
    default_task = "text-generation"

    def initialize(self, args: InstanceArgs) -> None:
        # PyTorch's own files, which ModernBERT needs, are not ASCII: docs/triton-faults.md#locale-and-pythonpath.
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
        os.environ["HF_HUB_OFFLINE"] = "1"  # every file that is served is in the model repository
        super().initialize(args)
