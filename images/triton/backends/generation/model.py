"""Backend `generation`: continues prompts, on the engine that the files of the model are made for."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from shared.backend import Backend, DelegatingBackend, new_backend
from shared.parameters import parameter, weights_folder
from shared.types import ConfigError, InstanceArgs, ModelConfig

# A file of the weights' folder -> (module, class). The first of these files that the folder has decides.
ENGINES = {
    "openvino_model.xml": ("shared.genai_engine", "GenAIGeneration"),
    "model.json": ("shared.vllm_engine", "VllmGeneration"),
    "model.safetensors": ("shared.batched_generation", "BatchedGeneration"),
    "model.safetensors.index.json": ("shared.batched_generation", "BatchedGeneration"),
}


class TritonPythonModel(DelegatingBackend):
    def chosen_backend(self, config: ModelConfig, args: InstanceArgs) -> Backend:
        if parameter(config, "engine_model"):
            return new_backend("shared.generation_front", "GenerationFront")
        folder = weights_folder(config, args)
        for file, engine in ENGINES.items():
            if (folder / file).is_file():
                return new_backend(*engine)
        raise ConfigError(f"{folder} has none of {', '.join(ENGINES)}: run `make models`")
