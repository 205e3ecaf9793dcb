"""What a SavedModel says of its own tensors."""

from __future__ import annotations

import os
from pathlib import Path

from generator.flags import Flags
from generator.values import DATA_TYPES, INTEGERS, Tensor

OF_TENSORFLOW = {
    **{f"DT_{name}": name for name in ("BOOL", *INTEGERS, "STRING")},
    **{"DT_HALF": "FP16", "DT_FLOAT": "FP32", "DT_DOUBLE": "FP64"},
    "DT_BFLOAT16": "FP32",  # numpy, which TensorFlow answers in, has no type for it
}


def saved_model_file(folder: Path) -> Path | None:
    files = (folder / name for name in ("saved_model.pb", "saved_model.pbtxt"))
    return next(filter(os.path.isfile, files), None)


def signature(flags: Flags, folder: Path) -> dict[str, list[Tensor]]:
    """The tensors of both sides, by the names that they are called by, with their whole shapes."""
    graphs = {tags(graph.meta_info_def.tags): graph for graph in meta_graphs(flags, folder)}
    graph = graphs.get(tags(filter(None, flags["tag_set"].split(","))))
    if graph is None:
        there = "; ".join(f"'{each}'" for each in sorted(graphs))
        raise flags.wrong("tag_set", f"{folder} has no graph of these tags; it has {there or 'none at all'}")
    found = graph.signature_def.get(flags["signature_def_key"])
    if found is None:
        there = ", ".join(sorted(each for each in graph.signature_def if not each.startswith("__")))
        raise flags.wrong("signature_def_key", f"{folder} has no such signature; it has {there or 'none at all'}")
    return {"triton_input": tensors_of(found.inputs), "triton_output": tensors_of(found.outputs)}


def tags(names) -> str:
    return ",".join(sorted(names))


def meta_graphs(flags: Flags, folder: Path) -> list:
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="2", TF_ENABLE_ONEDNN_OPTS="0")  # it has much to say at its import
    file = saved_model_file(folder)
    try:
        from tensorflow.core.protobuf import saved_model_pb2
    except ImportError as error:
        what = f"its tensors cannot be read, since tensorflow is not installed here ({error}): install it, or say "
        raise flags.wrong("compiled_model", f"{what}--triton_input and --triton_output") from None
    try:
        if file.suffix == ".pb":
            return saved_model_pb2.SavedModel.FromString(file.read_bytes()).meta_graphs
        from google.protobuf import text_format

        return text_format.Parse(file.read_text(), saved_model_pb2.SavedModel()).meta_graphs
    except Exception as error:  # whatever protobuf stumbles over
        raise flags.wrong("compiled_model", f"{file.name} cannot be read as a SavedModel: {error}") from None


def tensors_of(infos: dict) -> list[Tensor]:
    from tensorflow.core.framework import types_pb2

    tensors = []
    for name in sorted(infos):
        kind, shape = types_pb2.DataType.Name(infos[name].dtype), infos[name].tensor_shape
        dims = None if shape.unknown_rank else [int(dim.size) for dim in shape.dim]
        tensors.append(Tensor(name, OF_TENSORFLOW.get(kind, kind), dims))
    return tensors


def take_batch_off(flags: Flags, sides: dict[str, list[Tensor]]) -> int:
    """Shapes are left as config.pbtxt has them; returned are the rows compiled for, 0 where they are not known."""
    most, batches = flags["max_batch_size"], set()
    for side, tensors in sides.items():
        for each in tensors:
            if each.data_type not in DATA_TYPES:
                flags.wrong("compiled_model", f"{each.name} is {each.data_type}, which Triton does not have")
            elif each.dims is None:
                example = f"say --{side} {each.name},{each.data_type},-1x224x224x3, or what it is"
                flags.wrong("compiled_model", f"does not tell the shape of {each.name}: {example}")
            elif most and not each.dims:
                flags.wrong("max_batch_size", f"{each.name} has no batch dimension; must be 0")
            elif most:
                batches.add(each.dims.pop(0))
    if len(batches) > 1:
        said = " and ".join(str(size) for size in sorted(batches))
        flags.wrong("max_batch_size", f"the model's tensors have batch dimensions of {said}; must be 0")
    return max([0, *batches])
