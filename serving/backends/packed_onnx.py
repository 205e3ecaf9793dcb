"""Backend `packed_onnx`: serves ONNX text encoders on ragged batches of texts of any length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from serving.encoders.plan import Encoder
from serving.encoders.routed import RoutedEncoder
from serving.engines import onnx_model
from serving.engines.graphs import INT8
from serving.triton.parameters import mask_name
from serving.triton.types import Array, ConfigError, InstanceArgs, ModelConfig

HEAD = "head.onnx"


class TritonPythonModel(RoutedEncoder):
    def load_encoder(self, config: ModelConfig, args: InstanceArgs) -> Encoder:
        model = onnx_model.OnnxModel.load(config, args, pb_utils.Logger.log_info, ragged=True)
        self.engine_labels = model.labels
        for name in model.request_inputs:
            if len(model.inputs[name].shape) != 2 or not np.issubdtype(model.inputs[name].type.numpy, np.integer):
                raise ConfigError(f"input '{name}' of the model must be integers of shape [rows, tokens]")
        head = Path(args["model_repository"]) / args["model_version"] / HEAD
        is_int8 = model.path.name == INT8
        on_gpu = args["model_instance_kind"] == "GPU"
        return Encoder(
            inputs={name: port.type.numpy for name, port in model.inputs.items()},
            outputs=[tensor["name"] for tensor in config["output"]],
            per_token=per_token_outputs(model),
            run=model.engine.run,
            run_alone=model.engine.alone().run,
            # OpenVINO's first run of a shape takes up to twice as long as the next one. Rounding to int8 amplifies the
            # last digit of its sums, which is the same for all padded lengths that are multiples of 16.
            length_step=16 if is_int8 else 8 if model.engine.name == "openvino" else 1,
            rounds_alone=is_int8,
            skips_padding=model.engine.skips_padding,
            # Runs on a GPU share one stream and would only queue.
            parallel_runs=1 if on_gpu else onnx_model.intra_op_threads(config),
            # The key names the CPU and not the GPU, so the cost on a GPU is measured at each load.
            cost_depends_on=None if on_gpu else model.cost_depends_on,
            head=open_head(config, args, head) if head.is_file() else None,
        )


def open_head(config: ModelConfig, args: InstanceArgs, path: Path) -> Callable[[Array], Array]:
    """Return the layers after the pooling, a graph from vectors [rows, width] to vectors."""
    session = onnx_model.open_session(config, path, args["model_instance_kind"], int(args["model_instance_device_id"]))
    (node,) = session.get_inputs()

    def head(vectors: Array) -> Array:
        (result,) = session.run(None, {node.name: vectors})
        return result

    return head


def per_token_outputs(model: onnx_model.OnnxModel) -> set[str]:
    """Return the outputs whose second axis has the name of the mask's token axis."""
    mask = model.inputs.get(mask_name(model.config))
    axis = mask and mask.shape[1]
    if not isinstance(axis, str):
        return set()
    return {name for name, port in model.outputs.items() if len(port.shape) > 1 and port.shape[1] == axis}
