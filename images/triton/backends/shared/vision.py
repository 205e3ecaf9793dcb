"""Vision models on PyTorch: pictures in, features or labels out, the whole pipeline in one process."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
import triton_python_backend_utils as pb_utils
from safetensors import safe_open

from shared import images, pretrained, serving
from shared.answers import ACTIVATIONS, classify
from shared.config import choice_parameter, parameter
from shared.metrics import Metrics

# Parameter `task` -> the class of transformers that has the weights.
CLASSES = {
    "image-feature-extraction": "AutoModel",
    "image-classification": "AutoModelForImageClassification",
}
POOLED = "pooler_output"
Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Job:
    pictures: list[images.Picture]
    wanted: list[str]


class ImageTask:
    def __init__(self, args: dict) -> None:
        config = json.loads(args["model_config"])
        folder = pretrained.weights_folder(config, args)
        self.processor = images.ImageProcessor(config, folder)
        self.model = pretrained.load(getattr(transformers, CLASSES[parameter(config, "task")]), config, args)
        self.labels = [label for _, label in sorted(self.model.config.id2label.items())]
        self.activation = choice_parameter(config, "activation", ACTIVATIONS, "softmax")
        self.outputs = [tensor["name"] for tensor in config["output"]]
        if POOLED in self.outputs and lacks_pooler(self.model, folder):
            self.outputs.remove(POOLED)
            pb_utils.Logger.log_warn(f"{args['model_name']}: no '{POOLED}', for the weights have no pooler")
        self.metrics = Metrics(args, "images", "runs")

    def close(self) -> None:
        self.metrics.close()

    def execute(self, requests) -> list:
        return serving.serve(requests, self.prepare, self.run, self.reply)

    def prepare(self, request) -> Job:
        given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        return Job(images.pictures(given), serving.wanted_outputs(request, self.outputs))

    def run(self, batch: list[Job]) -> list[Tensors | Exception]:
        """One run for all whose pictures are sound; the others get what is wrong with theirs."""
        prepared = self.processor([job.pictures for job in batch])
        sound = [pixels for pixels in prepared if not isinstance(pixels, Exception)]
        answers = iter(self.forward(sound, {name for job in batch for name in job.wanted}) if sound else ())
        return [pixels if isinstance(pixels, Exception) else next(answers) for pixels in prepared]

    @torch.inference_mode()
    def forward(self, requests: list[np.ndarray], wanted: set[str]) -> list[Tensors]:
        pixels = torch.from_numpy(np.concatenate(requests)).to(self.model.device, self.model.dtype)
        found = self.model(pixel_values=pixels)
        self.metrics.add(images=len(pixels), runs=1)
        tensors = {name: found[name].float().cpu().numpy() for name in found if name in ("logits", *wanted)}
        if "logits" in tensors:
            tensors |= classify(tensors["logits"], self.labels, self.activation)
        cuts = np.cumsum([len(request) for request in requests])[:-1]
        parts = {name: np.split(tensors[name], cuts) for name in wanted if name in tensors}
        return [{name: part[i] for name, part in parts.items()} for i in range(len(requests))]

    def reply(self, request, tensors: Tensors):
        wanted = serving.wanted_outputs(request, tensors)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, tensors[name]) for name in wanted])


def lacks_pooler(model: transformers.PreTrainedModel, folder: Path) -> bool:
    """Is there one in the model, but not in the files? transformers gives it weights at random, and it answers."""
    names = itertools.chain(*(safe_open(path, "numpy").keys() for path in pretrained.weight_files(folder)))
    return not any("pooler" in name for name in names) and any("pooler" in name for name, _ in model.named_parameters())
