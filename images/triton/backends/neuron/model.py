"""Backend `neuron`: serves models that are compiled for AWS Neuron."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

sys.path.append(str(Path(__file__).resolve().parents[1]))

from shared.backend import TaskBackend


class TritonPythonModel(TaskBackend):
    # Each class is a TritonPythonModel by itself, too: gen_triton_model.py writes a model.py with a subclass of one.
    tasks: ClassVar = {
        "tensors": ("neuron.tensors", "TensorModel"),
        "text-encoder": ("neuron.text_encoder", "TextEncoder"),
        "text-generation": ("neuron.language", "LanguageModel"),
    }
    default_task = "tensors"
