"""Backend `neuron`: serves models that are compiled for AWS Neuron."""

from __future__ import annotations

from typing import ClassVar

from serving.triton.backend import TaskBackend


class TritonPythonModel(TaskBackend):
    # Each class is a TritonPythonModel by itself, too: gen_triton_model.py writes a model.py with a subclass of one.
    tasks: ClassVar = {
        "tensors": ("serving.neuron.tensors", "TensorModel"),
        "text-encoder": ("serving.neuron.text_encoder", "TextEncoder"),
        "text-generation": ("serving.neuron.language", "LanguageModel"),
    }
    default_task = "tensors"
