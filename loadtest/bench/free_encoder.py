"""A model for Triton's Python backend that answers texts with zeros, so that only its requests cost CPU time.

`loadtest.bench.request_costs` links a model to this file.
"""

import numpy as np

from serving.encoders.packed import PackedEncoder
from serving.encoders.plan import Encoder
from serving.engines.packing import RunCost
from serving.triton.types import Array, InstanceArgs, ModelConfig, Tensors

WIDTH = 384


class TritonPythonModel(PackedEncoder):
    def load_encoder(self, config: ModelConfig, args: InstanceArgs) -> Encoder:
        inputs: dict[str, type] = dict.fromkeys(self.inputs, np.int64)
        outputs = [tensor["name"] for tensor in config["output"]]
        # A GPU runs all texts of a batch at once.
        return Encoder(inputs, outputs, set(), zeros, cost=RunCost(1e-4, 1e-7), is_flat=True)


def zeros(names: list[str], feed: Tensors) -> list[Array]:
    return [np.zeros((len(feed["input_ids"]), WIDTH), np.float32) for _ in names]
