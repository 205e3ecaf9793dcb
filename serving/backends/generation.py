"""Backend `generation`: continues prompts, on the engine that the files of the model are made for."""

from __future__ import annotations

from pathlib import Path

import triton_python_backend_utils as pb_utils

from serving.text.chat_template import MESSAGES, TEMPLATE
from serving.triton.backend import Backend, DelegatingBackend, new_backend
from serving.triton.parameters import parameter, weights_folder
from serving.triton.types import ConfigError, InstanceArgs, ModelConfig
from triton_transformers.engines import TEXT_ENGINES, engine_of_folder
from triton_transformers.protocol import ENGINE


class TritonPythonModel(DelegatingBackend):
    @staticmethod
    def auto_complete_config(auto_complete_model_config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        """Add the input for chats if the checkpoint has a template for them: clients read there whether it chats."""
        config = auto_complete_model_config.as_dict()
        folder = Path(pb_utils.get_model_dir())  # the version's
        weights = folder.parent.with_name(parameter(config, "weights", folder.parent.name)) / folder.name
        declared = [tensor["name"] for tensor in config["input"]]
        if MESSAGES not in declared and (weights / TEMPLATE).is_file():
            chat = {"name": MESSAGES, "data_type": "TYPE_STRING", "dims": [1], "optional": True}
            auto_complete_model_config.add_input(chat)
        return auto_complete_model_config

    def chosen_backend(self, config: ModelConfig, args: InstanceArgs) -> Backend:
        if parameter(config, ENGINE):
            return new_backend("serving.generation.front", "GenerationFront")
        folder = weights_folder(config, args)
        if engine := engine_of_folder(folder):
            return new_backend(engine.module, engine.backend)
        files = ", ".join(file for engine in TEXT_ENGINES for file in engine.files)
        raise ConfigError(f"{folder} has none of {files}: run `make models`")
