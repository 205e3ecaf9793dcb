"""Backend `pipeline`: serves whatever transformers' pipelines run, one Triton model for each."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from shared.backend import Backend, DelegatingBackend, new_backend
from shared.types import InstanceArgs, ModelConfig


class TritonPythonModel(DelegatingBackend):
    def chosen_backend(self, config: ModelConfig, args: InstanceArgs) -> Backend:
        return new_backend("shared.pipeline_backend", "PipelineBackend")
