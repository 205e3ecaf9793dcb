"""Backend `generation`: continues prompts, on the engine that the files of the model are made for."""

from __future__ import annotations

from serving.triton.backend import Backend, DelegatingBackend, new_backend
from serving.triton.parameters import parameter, weights_folder
from serving.triton.types import ConfigError, InstanceArgs, ModelConfig
from triton_transformers.engines import TEXT_ENGINES, engine_of_folder
from triton_transformers.protocol import ENGINE


class TritonPythonModel(DelegatingBackend):
    def chosen_backend(self, config: ModelConfig, args: InstanceArgs) -> Backend:
        if parameter(config, ENGINE):
            return new_backend("serving.generation.front", "GenerationFront")
        folder = weights_folder(config, args)
        if engine := engine_of_folder(folder):
            return new_backend(engine.module, engine.backend)
        files = ", ".join(file for engine in TEXT_ENGINES for file in engine.files)
        raise ConfigError(f"{folder} has none of {files}: run `make models`")
