"""Image tasks on PyTorch: images in, features or labels out, the whole pipeline in one process."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from safetensors import safe_open

from serving.encoders.answers import ACTIVATIONS, classify
from serving.engines import pretrained
from serving.engines.lean_transformers import transformers
from serving.triton import responses
from serving.triton.backend import BatchBackend
from serving.triton.parameters import choice_parameter, parameter, weights_folder
from serving.triton.types import Array, InstanceArgs, ModelConfig, Tensors
from serving.vision import processor

# Parameter `task` -> the class of transformers that loads the weights, unless the parameter `model_class` names one.
CLASSES = {
    "image-feature-extraction": "AutoModel",
    "image-classification": "AutoModelForImageClassification",
}
POOLED = "pooler_output"


@dataclass(frozen=True)
class Job:
    images: list[processor.InputImage]
    outputs: list[str]


class ImageTask(BatchBackend[Job]):
    counters = ("images", "runs")

    def set_up(self, config: ModelConfig, args: InstanceArgs) -> None:
        folder = weights_folder(config, args)
        self.processor = processor.ImageProcessor(config, folder)
        architecture = pretrained.model_class(config, CLASSES[parameter(config, "task")])
        self.model = pretrained.load(architecture, config, args)
        self.call = pretrained.method(self.model, config)
        self.labels = [label for _, label in sorted((self.model.config.id2label or {}).items())]
        self.activation = choice_parameter(config, "activation", ACTIVATIONS, "softmax")
        self.outputs = [tensor["name"] for tensor in config["output"]]
        # The name of the only output in transformers, if it has another one.
        self.own_name = parameter(config, "output")
        if POOLED in self.outputs and lacks_pooler(self.model, folder):
            self.outputs.remove(POOLED)
            pb_utils.Logger.log_warn(f"{args['model_name']}: no output '{POOLED}': the weights have no pooler")

    def prepare(self, request: pb_utils.InferenceRequest) -> Job:
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        return Job(processor.input_images(tensors), responses.requested_outputs(request, self.outputs))

    def run_batch(self, jobs: list[Job]) -> list[Tensors | Exception]:
        """Run the jobs with valid images at once; each other job gets its own error."""
        processed = self.processor([job.images for job in jobs])
        valid = [pixels for pixels in processed if not isinstance(pixels, Exception)]
        results = iter(self.forward(valid, {name for job in jobs for name in job.outputs}) if valid else ())
        return [pixels if isinstance(pixels, Exception) else next(results) for pixels in processed]

    @torch.inference_mode()
    def forward(self, requests: list[Array], names: set[str]) -> list[Tensors]:
        pixels = torch.from_numpy(np.concatenate(requests)).to(self.model.device, self.model.dtype)
        outputs = self.call(pixel_values=pixels)
        if self.own_name:
            outputs = {self.outputs[0]: outputs[self.own_name]}
        self.metrics.add(images=len(pixels), runs=1)
        tensors: Tensors = {name: outputs[name].float().cpu().numpy() for name in outputs if name in ("logits", *names)}
        if "logits" in tensors:
            tensors |= classify(tensors["logits"], self.labels, self.activation)
        cuts = np.cumsum([len(request) for request in requests])[:-1]
        parts = {name: np.split(tensors[name], cuts) for name in self.outputs if name in names & tensors.keys()}
        return [{name: part[i] for name, part in parts.items()} for i in range(len(requests))]


def lacks_pooler(model: transformers.PreTrainedModel, folder: Path) -> bool:
    """Return whether the model has a pooler that its files lack.

    transformers gives such a pooler random weights, and it would return outputs without any warning.
    """
    names = itertools.chain(*(safe_open(path, "numpy").keys() for path in pretrained.weight_files(folder)))
    return not any("pooler" in name for name in names) and any("pooler" in name for name, _ in model.named_parameters())
