"""ONNX text encoders on ragged batches: the rows of all requests, sorted by length, in the cheapest set of runs.

Takes models whose inputs are all integer [rows, tokens] with an attention mask, under `allow_ragged_batch: true`. An
input of the graph that the config leaves out (token_type_ids) is fed zeros.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from shared import onnx
from shared.config import parameter
from shared.errors import ConfigError
from shared.packed import Encoder, PackedRuns


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        return auto_complete_model_config

    def initialize(self, args):
        model = onnx.Model.load(args, ragged=True)
        for name in model.fed:
            if len(model.inputs[name].shape) != 2 or not np.issubdtype(model.inputs[name].type.numpy, np.integer):
                raise ConfigError(f"input '{name}' must be integers of shape [rows, tokens]")
        encoder = Encoder(
            inputs={name: port.type.numpy for name, port in model.inputs.items()},
            outputs=list(model.outputs),
            per_token=per_token(model),
            run=model.run,
        )
        # A batch's runs go side by side on the session's threads, which beats one run after the other on all of them.
        # A GPU's runs share one stream and would only queue.
        at_once = 1 if args["model_instance_kind"] == "GPU" else onnx.intra_op_threads(model.config)
        self.runs = PackedRuns(args, model.config, encoder, at_once)

    def execute(self, requests):
        return self.runs.execute(requests)

    def finalize(self):
        self.runs.close()


def per_token(model: onnx.Model) -> set[str]:
    """The outputs whose second axis is that of the tokens."""
    mask = model.inputs.get(parameter(model.config, "mask", "attention_mask"))
    axis = mask and mask.shape[1]
    if not isinstance(axis, str):
        return set()
    return {name for name, port in model.outputs.items() if len(port.shape) > 1 and port.shape[1] == axis}
