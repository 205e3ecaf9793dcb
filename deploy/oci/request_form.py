"""Read from config.pbtxt which requests a model takes: a deployment has no endpoint that describes its models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from triton_transformers.model_config import ModelConfig, find_config, read_config
from triton_transformers.settings import UserError


@dataclass(frozen=True)
class RequestForm:
    config: ModelConfig

    @classmethod
    def read(cls, model: str, repository: Path) -> RequestForm:
        path = find_config(model, repository)
        if not path:
            raise UserError(
                f"SYSTEM={model}: {repository} has no {model}/config.pbtxt, which describes the model's inputs. "
                "Check the name, or set MODEL_REPOSITORY"
            )
        return cls(read_config(path))

    @property
    def inputs(self) -> set[str]:
        return {tensor.name for tensor in self.config.inputs}

    @property
    def generates_text(self) -> bool:
        takes_prompt = bool(self.inputs & {"TEXT", "prompt"})
        return takes_prompt and any(tensor.data_type == "STRING" for tensor in self.config.outputs)

    def fill_in(self, text: str) -> dict | None:
        """Return a request with one text, or None if the model requires other inputs."""
        required = [tensor for tensor in self.config.inputs if not tensor.optional]
        if [tensor.data_type for tensor in required] != ["STRING"]:
            return None
        shape = [1] * (len(required[0].dims) + bool(self.config.max_batch_size))
        return {"inputs": [{"name": required[0].name, "shape": shape, "datatype": "BYTES", "data": [text]}]}
