"""Backend `pipeline`: serves whatever transformers' pipelines run, one Triton model for each."""

from __future__ import annotations

from serving.triton.backend import Backend, DelegatingBackend, new_backend
from serving.triton.types import InstanceArgs, ModelConfig


class TritonPythonModel(DelegatingBackend):
    def chosen_backend(self, config: ModelConfig, args: InstanceArgs) -> Backend:
        return new_backend("serving.pipelines.backend", "PipelineBackend")
