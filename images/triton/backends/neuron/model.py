"""Models compiled for AWS Neuron. What goes in and what comes out is the task's."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from shared.config import choice_parameter

# Parameter `task` -> the module and class that serve it. Each is a TritonPythonModel by itself, too: the model.py that
# gen_triton_model.py writes is a subclass of one of them.
TASKS = {
    "tensors": ("neuron.tensors", "TensorModel"),
    "text-encoder": ("neuron.text", "TextEncoder"),
    "text-generation": ("neuron.language", "LanguageModel"),
}


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        return auto_complete_model_config

    def initialize(self, args):
        task = choice_parameter(json.loads(args["model_config"]), "task", tuple(TASKS), "tensors")
        module, name = TASKS[task]
        self.task = getattr(importlib.import_module(module), name)()
        self.task.initialize(args)

    def execute(self, requests):
        return self.task.execute(requests)

    def finalize(self):
        self.task.finalize()
