"""Backend `onnxruntime`: stands in for NVIDIA's C++ backend where that is not installed.

It takes the same config.pbtxt and model.onnx. docs/backends.md lists the differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from serving.engines import onnx_model
from serving.triton import responses
from serving.triton.backend import BatchBackend
from serving.triton.types import Array, InstanceArgs, ModelConfig, Tensors

Job = tuple[list[str], Tensors]  # the requested outputs, the inputs


class TritonPythonModel(BatchBackend[Job]):
    counters = ("runs",)

    @staticmethod
    def auto_complete_config(auto_complete_model_config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        config = auto_complete_model_config.as_dict()
        if config.get("input") and config.get("output"):
            return auto_complete_model_config
        path = onnx_model.model_path(config, Path(pb_utils.get_model_dir()))  # the version's folder
        session = onnx_model.open_session(config, path, "CPU", 0)
        inputs, outputs = onnx_model.ports(session.get_inputs()), onnx_model.ports(session.get_outputs())
        completed = onnx_model.complete_config(config, inputs, outputs)
        if "max_batch_size" in completed:
            auto_complete_model_config.set_max_batch_size(completed["max_batch_size"])
        if "dynamic_batching" in completed:
            auto_complete_model_config.set_dynamic_batching()
        for tensor in completed.get("input", []):
            auto_complete_model_config.add_input(tensor)
        for tensor in completed.get("output", []):
            auto_complete_model_config.add_output(tensor)
        return auto_complete_model_config

    def set_up(self, config: ModelConfig, args: InstanceArgs) -> None:
        self.model = onnx_model.OnnxModel.load(config, args, pb_utils.Logger.log_info)
        self.engine_labels = self.model.labels
        self.batching = config["max_batch_size"] > 0

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse | None]:
        if self.batching:
            return super().execute(requests)
        answers: list[pb_utils.InferenceResponse | None] = []
        for request in requests:
            answers += super().execute([request])
        return answers

    def prepare(self, request: pb_utils.InferenceRequest) -> Job:
        feed = {}
        for name in self.model.request_inputs:
            array = responses.input_tensor(request, name)
            if array.dtype == np.object_:
                texts = [responses.text(value, name, i, "element") for i, value in enumerate(array.ravel())]
                array = np.array(texts, np.object_).reshape(array.shape)
            feed[name] = array if self.model.inputs[name].shape else array.reshape(())
        return responses.requested_outputs(request, self.model.outputs), feed

    def run_batch(self, jobs: list[Job]) -> list[Tensors]:
        feeds = [feed for _, feed in jobs]
        requested = set().union(*(names for names, _ in jobs))
        names = [name for name in self.model.outputs if name in requested]
        joined = {
            name: feeds[0][name] if len(feeds) == 1 else np.concatenate([feed[name] for feed in feeds])
            for name in feeds[0]
        }
        arrays = [output_array(array) for array in self.model.engine.run(names, joined)]
        self.metrics.add(runs=1)
        if not self.batching:
            return [dict(zip(names, arrays, strict=True))]
        rows = [len(next(iter(feed.values()))) for feed in feeds]
        for name, array in zip(names, arrays, strict=True):
            if len(array) != sum(rows):
                raise RuntimeError(f"output '{name}' has {len(array)} rows for {sum(rows)} rows of input")
        cuts = np.cumsum(rows)[:-1]
        parts = [np.split(array, cuts) for array in arrays]
        return [dict(zip(names, part, strict=True)) for part in zip(*parts, strict=True)]


def output_array(array: Array) -> Array:
    if array.dtype == np.object_:
        array = np.array([text.encode() for text in array.ravel()], np.object_).reshape(array.shape)
    return np.atleast_1d(array)  # the config gives a scalar the dims [1]
