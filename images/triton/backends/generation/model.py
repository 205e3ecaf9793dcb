"""Backend `generation`: continues prompts, on the engine that the files of the model are made for."""

from __future__ import annotations

import importlib
import json
import locale
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.append(str(Path(__file__).resolve().parents[1]))

from shared.backend import Backend
from shared.errors import ConfigError
from shared.parameters import weights_folder
from shared.types import InstanceArgs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import triton_python_backend_utils as pb_utils

# A file of the weights' folder -> (module, class). The first of these files that the folder has decides.
ENGINES = {
    "openvino_model.xml": ("shared.genai_engine", "GenAIGeneration"),
    "model.json": ("shared.vllm_engine", "VllmGeneration"),
    "model.safetensors": ("shared.batched_generation", "BatchedGeneration"),
    "model.safetensors.index.json": ("shared.batched_generation", "BatchedGeneration"),
}


class TritonPythonModel:
    auto_complete_config = staticmethod(Backend.auto_complete_config)

    def initialize(self, args: InstanceArgs) -> None:
        # docs/triton-faults.md#locale-and-pythonpath
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
        os.environ["HF_HUB_OFFLINE"] = "1"  # every file that is served is in the model repository
        folder = weights_folder(json.loads(args["model_config"]), args)
        file = next((file for file in ENGINES if (folder / file).is_file()), None)
        if file is None:
            raise ConfigError(f"{folder} has none of {', '.join(ENGINES)}: run `make models`")
        module, name = ENGINES[file]
        self.backend: Backend = getattr(importlib.import_module(module), name)()
        self.backend.initialize(args)

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> None:
        self.backend.execute(requests)

    def finalize(self) -> None:
        self.backend.finalize()
