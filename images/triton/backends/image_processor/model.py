"""Pictures in, a vision model's pixel_values out, by the model's own image processor."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

sys.path.append(str(Path(__file__).resolve().parents[1]))

# transformers without PyTorch starts in one second instead of four, in a fifth of the memory. It would warn of that.
os.environ |= {"USE_TORCH": "0", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}

from shared import serving
from shared.errors import ConfigError
from shared.metrics import Metrics

try:
    from shared import images
except ImportError as error:
    raise ConfigError(
        f"there is no {error.name} where Triton runs: TRITON_SOURCE=pypi-transformers builds an image that has it"
    ) from None


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        return auto_complete_model_config

    def initialize(self, args):
        config = json.loads(args["model_config"])
        (output,) = config["output"]
        self.output = output["name"]
        self.processor = images.ImageProcessor(config, Path(args["model_repository"]) / args["model_version"])
        self.metrics = Metrics(args, "images")

    def finalize(self):
        self.metrics.close()

    def execute(self, requests):
        return serving.serve(requests, self.prepare, self.run, self.reply)

    def prepare(self, request) -> list[images.Picture]:
        return images.pictures({tensor.name(): tensor.as_numpy() for tensor in request.inputs()})

    def run(self, batch: list[list[images.Picture]]) -> list[np.ndarray | Exception]:
        self.metrics.add(images=sum(map(len, batch)))
        return self.processor(batch)

    def reply(self, request, pixel_values: np.ndarray):
        return pb_utils.InferenceResponse([pb_utils.Tensor(self.output, pixel_values)])
