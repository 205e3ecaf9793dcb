"""Build small ONNX models for tests to serve."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper, numpy_helper


def value(name: str, dtype: str, shape: list):
    return helper.make_tensor_value_info(name, getattr(TensorProto, dtype), shape)


def save(path: Path, nodes, inputs, outputs, initializers=()) -> Path:
    graph = helper.make_graph(nodes, "test", inputs, outputs, list(initializers))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    return path


def save_identity(path: Path, tensors: dict[str, tuple[str, list]]) -> Path:
    """Save a graph that copies each input to an output <name>_out. `tensors`: name -> (ONNX type, shape)."""
    return save(
        path,
        [helper.make_node("Identity", [name], [f"{name}_out"]) for name in tensors],
        [value(name, dtype, shape) for name, (dtype, shape) in tensors.items()],
        [value(f"{name}_out", dtype, shape) for name, (dtype, shape) in tensors.items()],
    )


def save_lookup(path: Path, rows: int = 100) -> Path:
    """Save a graph that maps ids [n, 1] INT64 to equal numbers [n, 1] FP32, and refuses ids of `rows` or more."""
    import numpy as np

    table = numpy_helper.from_array(np.arange(rows, dtype=np.float32), "table")
    return save(
        path,
        [helper.make_node("Gather", ["table", "ids"], ["row"])],
        [value("ids", "INT64", ["n", 1])],
        [value("row", "FLOAT", ["n", 1])],
        [table],
    )


def save_sequence_model(path: Path) -> Path:
    """Save a graph that adds 100 to `number` [n, 1] INT32 if `start` is 1."""
    import numpy as np

    hundred = numpy_helper.from_array(np.array([[100]], np.int32), "hundred")
    return save(
        path,
        [
            helper.make_node("Mul", ["start", "hundred"], ["bonus"]),
            helper.make_node("Add", ["number", "bonus"], ["sum"]),
        ],
        [value("number", "INT32", ["n", 1]), value("start", "INT32", ["n", 1])],
        [value("sum", "INT32", ["n", 1])],
        [hundred],
    )


def save_token_model(path: Path) -> Path:
    """Save a miniature text encoder: input_ids, attention_mask [n, t] -> per_token [n, t, 1], pooled [n, 1].

    per_token is id * mask and pooled is its sum, so every mistake in padding or packing changes the numbers.
    """
    import numpy as np

    axes = numpy_helper.from_array(np.array([1], np.int64), "axes")
    last = numpy_helper.from_array(np.array([2], np.int64), "last")
    return save(
        path,
        [
            helper.make_node("Mul", ["input_ids", "attention_mask"], ["kept"]),
            helper.make_node("Cast", ["kept"], ["real"], to=TensorProto.FLOAT),
            helper.make_node("Unsqueeze", ["real", "last"], ["per_token"]),
            helper.make_node("ReduceSum", ["real", "axes"], ["pooled"], keepdims=1),
        ],
        [value("input_ids", "INT64", ["n", "t"]), value("attention_mask", "INT64", ["n", "t"])],
        [value("per_token", "FLOAT", ["n", "t", 1]), value("pooled", "FLOAT", ["n", 1])],
        [axes, last],
    )
