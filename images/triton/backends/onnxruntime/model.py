"""Stands in for NVIDIA's C++ onnxruntime backend where that is not installed: same config, same model.onnx.

What it does otherwise is in docs/backends.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

sys.path.append(str(Path(__file__).resolve().parents[1]))

from shared import onnx, serving
from shared.metrics import Metrics


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        config = auto_complete_model_config.as_dict()
        if config.get("input") and config.get("output"):
            return auto_complete_model_config
        path = onnx.model_path(config, Path(pb_utils.get_model_dir()))  # the version's folder
        session = onnx.open_session(config, path, "CPU", 0)
        completed = onnx.complete_config(config, onnx.ports(session.get_inputs()), onnx.ports(session.get_outputs()))
        if "max_batch_size" in completed:
            auto_complete_model_config.set_max_batch_size(completed["max_batch_size"])
        if "dynamic_batching" in completed:
            auto_complete_model_config.set_dynamic_batching()
        for tensor in completed.get("input", []):
            auto_complete_model_config.add_input(tensor)
        for tensor in completed.get("output", []):
            auto_complete_model_config.add_output(tensor)
        return auto_complete_model_config

    def initialize(self, args):
        self.model = onnx.Model.load(args)
        self.batching = self.model.config["max_batch_size"] > 0
        self.metrics = Metrics(args, "runs")

    def finalize(self):
        self.metrics.close()

    def execute(self, requests):
        if self.batching:
            return serving.serve(requests, self.prepare, self.run_batch, self.reply)
        return [serving.serve([r], self.prepare, self.run_single, self.reply)[0] for r in requests]

    def prepare(self, request):
        feed = {}
        for name in self.model.fed:
            array = serving.input_tensor(request, name)
            if array.dtype == np.object_:
                array = onnx.decode_strings(array, name)
            feed[name] = array if self.model.inputs[name].shape else array.reshape(())
        return serving.wanted_outputs(request, self.model.outputs), feed

    def run_batch(self, jobs):
        feeds = [feed for _, feed in jobs]
        rows = [len(next(iter(feed.values()))) for feed in feeds]
        wanted = sorted(set().union(*(names for names, _ in jobs)))
        joined = {
            name: feeds[0][name] if len(feeds) == 1 else np.concatenate([feed[name] for feed in feeds])
            for name in feeds[0]
        }
        arrays = self.model.run(wanted, joined)
        self.metrics.add(runs=1)
        for name, array in zip(wanted, arrays, strict=True):
            if len(array) != sum(rows):
                raise RuntimeError(f"output '{name}' has {len(array)} rows for {sum(rows)} rows of input")
        cuts = np.cumsum(rows)[:-1]
        parts = [np.split(array, cuts) for array in arrays]
        return [dict(zip(wanted, part, strict=True)) for part in zip(*parts, strict=True)]

    def run_single(self, jobs):
        ((wanted, feed),) = jobs
        arrays = self.model.run(wanted, feed)
        self.metrics.add(runs=1)
        return [dict(zip(wanted, arrays, strict=True))]

    def reply(self, request, arrays):
        wanted = serving.wanted_outputs(request, self.model.outputs)
        return pb_utils.InferenceResponse([self.tensor(name, arrays[name]) for name in wanted])

    def tensor(self, name, array):
        if array.dtype == np.object_:
            array = onnx.encode_strings(array)
        # A scalar goes out as [1], as its config says.
        return pb_utils.Tensor(name, np.atleast_1d(array))
