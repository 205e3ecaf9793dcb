"""Models of Hugging Face transformers on PyTorch, whole: what goes in and what comes out is the task's."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from shared.config import choice_parameter

# Parameter `task` -> the module and class that serve it. Imported only when asked for: torch takes seconds.
TASKS = {
    "text-generation": ("shared.generation", "TextGeneration"),
    "text-encoder": ("shared.encoder", "TextEncoder"),
    "image-feature-extraction": ("shared.vision", "ImageTask"),
    "image-classification": ("shared.vision", "ImageTask"),
}


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        return auto_complete_model_config

    def initialize(self, args):
        os.environ["HF_HUB_OFFLINE"] = "1"  # what is served lies in the model repository
        task = choice_parameter(json.loads(args["model_config"]), "task", tuple(TASKS), "text-generation")
        module, name = TASKS[task]
        self.task = getattr(importlib.import_module(module), name)(args)

    def execute(self, requests):
        return self.task.execute(requests)

    def finalize(self):
        self.task.close()
