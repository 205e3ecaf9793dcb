"""Backend `generation`: continues prompts, on the engine that the files of the model are made for."""

from __future__ import annotations

from serving.triton.backend import Backend, DelegatingBackend, new_backend
from serving.triton.parameters import parameter, weights_folder
from serving.triton.types import ConfigError, InstanceArgs, ModelConfig

# A file of the weights' folder -> (module, class). The first of these files that the folder has decides.
ENGINES = {
    "openvino_model.xml": ("serving.generation.openvino.engine", "GenAIGeneration"),
    "model.json": ("serving.generation.vllm", "VllmGeneration"),
    "model.safetensors": ("serving.generation.batched", "BatchedGeneration"),
    "model.safetensors.index.json": ("serving.generation.batched", "BatchedGeneration"),
}


class TritonPythonModel(DelegatingBackend):
    def chosen_backend(self, config: ModelConfig, args: InstanceArgs) -> Backend:
        if parameter(config, "engine_model"):
            return new_backend("serving.generation.front", "GenerationFront")
        folder = weights_folder(config, args)
        for file, engine in ENGINES.items():
            if (folder / file).is_file():
                return new_backend(*engine)
        raise ConfigError(f"{folder} has none of {', '.join(ENGINES)}: run `make models`")
