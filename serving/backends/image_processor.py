"""Backend `image_processor`: turns images into a vision model's pixel_values with the model's own image processor."""

from __future__ import annotations

import os
from pathlib import Path

import triton_python_backend_utils as pb_utils

# Without PyTorch, transformers starts in one second instead of four and takes a fifth of the memory, but warns.
os.environ |= {"USE_TORCH": "0", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}

from serving.triton.backend import BatchBackend
from serving.triton.types import ConfigError, InstanceArgs, ModelConfig, Tensors

try:
    from serving.vision import processor
except ImportError as error:
    raise ConfigError(
        f"the Python package {error.name} is missing where Triton runs: build the image with "
        "TRITON_SOURCE=pypi-transformers"
    ) from None


class TritonPythonModel(BatchBackend):
    counters = ("images",)

    def set_up(self, config: ModelConfig, args: InstanceArgs) -> None:
        (self.output,) = [tensor["name"] for tensor in config["output"]]
        self.processor = processor.ImageProcessor(config, Path(args["model_repository"]) / args["model_version"])

    def prepare(self, request: pb_utils.InferenceRequest) -> list[processor.InputImage]:
        return processor.input_images({tensor.name(): tensor.as_numpy() for tensor in request.inputs()})

    def run_batch(self, jobs: list[list[processor.InputImage]]) -> list[Tensors | Exception]:
        self.metrics.add(images=sum(map(len, jobs)))
        processed = self.processor(jobs)
        return [pixels if isinstance(pixels, Exception) else {self.output: pixels} for pixels in processed]
