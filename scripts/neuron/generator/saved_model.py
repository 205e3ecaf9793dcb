"""The tensors of a TensorFlow SavedModel, read from its signature."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from generator.arguments import Arguments
from generator.value_types import DATA_TYPES, INTEGERS, Tensor

TRITON_TYPES = {
    **{f"DT_{name}": name for name in ("BOOL", *INTEGERS, "STRING")},
    **{"DT_HALF": "FP16", "DT_FLOAT": "FP32", "DT_DOUBLE": "FP64"},
    "DT_BFLOAT16": "FP32",  # TensorFlow answers in numpy, which has no bfloat16
}


def saved_model_file(folder: Path) -> Path | None:
    files = (folder / name for name in ("saved_model.pb", "saved_model.pbtxt"))
    return next(filter(os.path.isfile, files), None)


def signature_tensors(arguments: Arguments, folder: Path) -> dict[str, list[Tensor]]:
    """Return the inputs and outputs of the chosen signature, with the batch dimension in their shapes."""
    graphs = {joined_tags(graph.meta_info_def.tags): graph for graph in meta_graphs(arguments, folder)}
    graph = graphs.get(joined_tags(filter(None, arguments["tag_set"].split(","))))
    if graph is None:
        known = "; ".join(f"'{tags}'" for tags in sorted(graphs))
        raise arguments.error("tag_set", f"{folder} has no graph with these tags; it has {known or 'none at all'}")
    signature = graph.signature_def.get(arguments["signature_def_key"])
    if signature is None:
        known = ", ".join(sorted(key for key in graph.signature_def if not key.startswith("__")))
        raise arguments.error("signature_def_key", f"{folder} has no such signature; it has {known or 'none at all'}")
    return {"triton_input": tensors_of(signature.inputs), "triton_output": tensors_of(signature.outputs)}


def joined_tags(tags: Iterable[str]) -> str:
    return ",".join(sorted(tags))


def meta_graphs(arguments: Arguments, folder: Path) -> list:
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="2", TF_ENABLE_ONEDNN_OPTS="0")  # or its import logs a page
    file = saved_model_file(folder)
    assert file is not None  # compiled_model() has checked it
    try:
        from tensorflow.core.protobuf import saved_model_pb2
    except ImportError as error:
        problem = f"reading its tensors needs tensorflow, which is not installed here ({error}); install it, or set "
        raise arguments.error("compiled_model", f"{problem}--triton_input and --triton_output") from None
    try:
        if file.suffix == ".pb":
            return saved_model_pb2.SavedModel.FromString(file.read_bytes()).meta_graphs
        from google.protobuf import text_format

        return text_format.Parse(file.read_text(), saved_model_pb2.SavedModel()).meta_graphs
    except Exception as error:  # protobuf has errors of many types
        raise arguments.error("compiled_model", f"{file.name} cannot be read as a SavedModel: {error}") from None


def tensors_of(infos: dict) -> list[Tensor]:
    from tensorflow.core.framework import types_pb2

    tensors = []
    for name in sorted(infos):
        data_type, shape = types_pb2.DataType.Name(infos[name].dtype), infos[name].tensor_shape
        dims = None if shape.unknown_rank else [int(dim.size) for dim in shape.dim]
        tensors.append(Tensor(name, TRITON_TYPES.get(data_type, data_type), dims))
    return tensors


def remove_batch_dimension(arguments: Arguments, sides: dict[str, list[Tensor]]) -> int:
    """Leave the shapes as config.pbtxt has them. Return the rows that the model was compiled for, 0 if unknown."""
    batching, sizes = arguments["max_batch_size"] > 0, {0}
    for side, tensors in sides.items():
        for tensor in tensors:
            if tensor.data_type not in DATA_TYPES:
                arguments.error("compiled_model", f"{tensor.name} is {tensor.data_type}, which Triton does not have")
            elif tensor.dims is None:
                example = f"set --{side} {tensor.name},{tensor.data_type},-1x224x224x3, or what its shape is"
                arguments.error("compiled_model", f"has no shape for {tensor.name}; {example}")
            elif batching and not tensor.dims:
                arguments.error("max_batch_size", f"{tensor.name} has no batch dimension; must be 0")
            elif batching:
                sizes.add(tensor.dims.pop(0))
    if len(sizes - {0}) > 1:
        listed = " and ".join(str(size) for size in sorted(sizes - {0}))
        arguments.error("max_batch_size", f"the model's tensors have batch dimensions of {listed}; must be 0")
    return max(sizes)
