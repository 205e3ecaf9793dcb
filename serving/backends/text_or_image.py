"""Backend `text_or_image`: sends each request to one of two models of the same server, by the inputs that it has.

A model of texts and images has two encoders. Triton batches only requests that set the same inputs, so each encoder is
a model of its own, with its own queue: texts share batches, whatever images arrive between them.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import triton_python_backend_utils as pb_utils

from serving.triton import responses
from serving.triton.backend import BatchBackend
from serving.triton.parameters import parameter
from serving.triton.types import BadRequest, ConfigError, InstanceArgs, ModelConfig, Tensors
from triton_transformers.protocol import IMAGE_MODEL, TEXT_MODEL, TOKEN_COUNT
from triton_transformers.triton_messages import is_starting

TEXT, IMAGES = "input_text", ("image", "image_bytes")
VECTOR = "sentence_embedding"


class Forwarded(NamedTuple):
    """One request: the model that it goes to, its inputs, and the outputs to ask the model for."""

    model: str
    inputs: Tensors
    outputs: list[str]


class TritonPythonModel(BatchBackend[Forwarded]):
    def set_up(self, config: ModelConfig, args: InstanceArgs) -> None:
        text, image = parameter(config, TEXT_MODEL), parameter(config, IMAGE_MODEL)
        if not text or not image:
            raise ConfigError("set the parameters 'text_model' and 'image_model' to the models that requests go to")
        self.models = {TEXT: text} | dict.fromkeys(IMAGES, image)
        self.outputs = [tensor["name"] for tensor in config["output"]]
        # As many as fill one batch while another one runs. Each model has its own, so that texts wait for no image.
        waiting = 2 * max(1, config["max_batch_size"])
        self.workers = {model: ThreadPoolExecutor(waiting) for model in (text, image)}
        self.to_load = [text, image]
        try:
            self.load_models()
        except Exception as error:
            if not is_starting(str(error)):
                raise ConfigError(f"model '{self.to_load[0]}', which this one needs, does not load: {error}") from None

    def load_models(self) -> None:
        """Load the two models: Triton itself loads only the steps of ensembles. While it starts, it loads neither."""
        while self.to_load:
            if not pb_utils.is_model_ready(self.to_load[0]):
                pb_utils.load_model(self.to_load[0])
            self.to_load = self.to_load[1:]

    def prepare(self, request: pb_utils.InferenceRequest) -> Forwarded:
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        models = {self.models[name] for name in tensors}
        if len(models) != 1:
            both_or_neither = "both" if models else "neither"
            raise BadRequest(f"send '{TEXT}', or one of '{IMAGES[0]}' and '{IMAGES[1]}', not {both_or_neither}")
        names = self.outputs if TEXT in tensors else [VECTOR]
        # Triton reuses the memory of the inputs after the execution.
        inputs = {name: array.copy() for name, array in tensors.items()}
        return Forwarded(models.pop(), inputs, responses.requested_outputs(request, names))

    def run_batch(self, jobs: list[Forwarded]) -> list[responses.Later]:
        return [responses.Later(partial(self.begin, job)) for job in jobs]

    def begin(self, job: Forwarded, response: responses.Response) -> None:
        self.workers[job.model].submit(self.answer, job, response)

    def answer(self, job: Forwarded, response: responses.Response) -> None:
        try:
            if self.to_load:
                self.load_models()
            rows = len(next(iter(job.inputs.values())))
            tensors = {TOKEN_COUNT: np.zeros((rows, 1), np.int32)} | (responses.infer(*job) if job.outputs else {})
            # The vector first, because some clients read only the first output.
            tensors = {name: tensors[name] for name in reversed(self.outputs) if name in tensors}
        except Exception as error:
            response.send(error)
        else:
            response.send(tensors)
