"""Check how the arguments fit together, and describe the model folder to write."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from generator import options
from generator.folder import Enum, Map
from generator.options import (
    DATA_TYPES,
    EXAMPLES,
    GROUPS,
    INTEGERS,
    PYTORCH,
    TENSORFLOW,
    TRANSFORMERS,
    Arguments,
    InvalidArgument,
    Tensor,
)

LANGUAGE_OPTIONS = [option.name for group in GROUPS if group.kinds == (TRANSFORMERS,) for option in group.options]
# The same as in model_repository/falcon7b/config.pbtxt.
PROMPTS = (
    "prompt,STRING,-1 text_input,STRING,-1 messages,STRING,1 max_new_tokens,INT32,1 temperature,FP32,1 top_p,FP32,1 "
    "seed,INT64,1 stop,STRING,-1 cancel,STRING,1 stream,BOOL,1 exclude_input_in_output,BOOL,1 "
    "sampling_parameters,STRING,1"
)
TEXTS = (
    "text,STRING,-1 text_output,STRING,-1 finish_reason,STRING,-1 num_input_tokens,UINT32,-1 "
    "num_output_tokens,UINT32,-1 tokenized,STRING,-1"
)
LANGUAGE_MODEL = {
    "triton_input": [replace(options.tensor(text), optional=True) for text in PROMPTS.split()],
    "triton_output": [options.tensor(text) for text in TEXTS.split()],
}
TRITON_TYPES = {
    **{f"DT_{name}": name for name in ("BOOL", *INTEGERS, "STRING")},
    **{"DT_HALF": "FP16", "DT_FLOAT": "FP32", "DT_DOUBLE": "FP64"},
    "DT_BFLOAT16": "FP32",  # TensorFlow answers in numpy, which has no bfloat16
}


@dataclass
class Specification:
    folder: Path
    version: int
    compiled: CompiledModel
    base: str  # the class of the `neuron` backend that model.py subclasses
    config: dict


def specify(arguments: Arguments) -> Specification | None:
    """Return what to write, or None if `arguments.errors` lists any error."""
    folder = arguments.attempt(model_folder)
    cores = arguments.attempt(cores_per_instance)
    batching = arguments.attempt(dynamic_batching)
    compiled = arguments.attempt(compiled_model, folder)
    if arguments.kind == TRANSFORMERS:
        base, sides, rows = "LanguageModel", LANGUAGE_MODEL, 0
        arguments.attempt(check_tp_degree, cores)
    else:
        base, (sides, rows) = "TensorModel", arguments.attempt(model_tensors, compiled) or ({}, 0)
    if arguments.errors:
        return None
    warn_of_newer_version(arguments, folder)
    if arguments.kind == PYTORCH and not rows:
        warn_of_idle_cores(arguments, cores)
    config = {
        "name": folder.name,
        "backend": "python",
        "max_batch_size": arguments["max_batch_size"],
        "input": [tensor_config(tensor) for tensor in sides["triton_input"]],
        "output": [tensor_config(tensor) for tensor in sides["triton_output"]],
        **batching,
        "instance_group": [{"count": arguments["triton_model_instance_count"], "kind": Enum("KIND_MODEL")}],
        "parameters": Map(
            (name, {"string_value": str(value)}) for name, value in parameters(arguments, compiled, rows).items()
        ),
    }
    return Specification(folder, arguments["model_version"], compiled, base, config)


def cores_per_instance(arguments: Arguments) -> int:
    cores, instances = len(arguments["neuron_core_range"]), arguments["triton_model_instance_count"]
    if cores % instances:
        divisors = ", ".join(str(count) for count in range(1, min(cores, 128) + 1) if cores % count == 0)
        problem = f"cannot share {cores} cores ({arguments.text('neuron_core_range')}) equally; must be one of "
        raise arguments.error("triton_model_instance_count", problem + divisors)
    return cores // instances


def dynamic_batching(arguments: Arguments) -> dict[str, dict]:
    """Return the field of config.pbtxt, or nothing if dynamic batching is off."""
    fields = ("preferred_batch_size", "max_queue_delay_microseconds")
    if not arguments["enable_dynamic_batching"]:
        for name in filter(arguments.given, fields):
            arguments.warnings.append(f"--{name}: ignored without --enable_dynamic_batching")
        return {}
    maximum = arguments["max_batch_size"]
    if maximum == 0:
        raise arguments.error("enable_dynamic_batching", "needs --max_batch_size, such as 8")
    for size in arguments["preferred_batch_size"] or []:
        if size > maximum:
            arguments.error("preferred_batch_size", f"must be at most --max_batch_size, {maximum}", size)
    return {"dynamic_batching": {name: arguments[name] for name in fields if arguments.given(name)}}


def check_tp_degree(arguments: Arguments, cores: int | None) -> None:
    degree = arguments["tp_degree"]
    if degree and cores and degree > cores:
        arguments.error("tp_degree", f"an instance has {cores} cores; must be at most {cores}")
    elif degree and cores and degree < cores:
        arguments.warnings.append(f"--tp_degree {degree}: an instance has {cores} cores; the others stay idle")


def warn_of_newer_version(arguments: Arguments, folder: Path) -> None:
    newest = max((int(path.name) for path in folder.glob("*") if re.fullmatch("[1-9][0-9]*", path.name)), default=0)
    version = arguments["model_version"]
    if newest > version:
        arguments.warnings.append(f"--model_version {version}: {folder.name} has {newest} too, which Triton prefers")


def warn_of_idle_cores(arguments: Arguments, cores: int) -> None:
    """Warn about torch-neuronx only: torch-neuron cuts batches by itself, and separate requests run side by side."""
    side_by_side = arguments["disable_batch_requests_to_neuron"] and arguments["enable_dynamic_batching"]
    if arguments["inf2"] and cores > 1 and not side_by_side:
        arguments.warnings.append(
            f"--compiled_batch_size is not set: only one of an instance's {cores} cores computes at a time; set it to "
            "cut batches over the cores, or give each core an instance with --triton_model_instance_count "
            f"{len(arguments['neuron_core_range'])}"
        )


def tensor_config(tensor: Tensor) -> dict[str, object]:
    config = {"name": tensor.name, "data_type": Enum(f"TYPE_{tensor.data_type}"), "dims": tensor.dims or [1]}
    if not tensor.dims:  # Triton needs a dimension: clients see one of size 1, the model sees none
        config["reshape"] = {"shape": []}
    return {**config, "optional": True} if tensor.optional else config


def parameters(arguments: Arguments, compiled: CompiledModel, rows: int) -> dict[str, object]:
    """Return the parameters of config.pbtxt. For a language model, unset options are left to the model's own config."""
    cores, neuronx = arguments["neuron_core_range"], arguments["inf2"] or arguments.kind == TRANSFORMERS
    common = {
        "COMPILED_MODEL": compiled.parameter,
        "NEURON_CORE_START_INDEX": cores[0],
        "NEURON_CORE_END_INDEX": cores[-1],
        "NUM_THREADS_PER_CORE": arguments["threads_per_core"],
        "FRAMEWORK": TENSORFLOW if arguments.kind == TENSORFLOW else "torch-neuronx" if neuronx else "torch-neuron",
    }
    if arguments.kind == TRANSFORMERS:
        return {**common, **{name.upper(): arguments[name] for name in LANGUAGE_OPTIONS if arguments.given(name)}}
    common["BATCH_REQUESTS_TO_NEURON"] = "false" if arguments["disable_batch_requests_to_neuron"] else "true"
    if rows:
        common["COMPILED_BATCH_SIZE"] = rows
    if arguments.kind == TENSORFLOW:
        common.update(TAG_SET=arguments["tag_set"], SIGNATURE_DEF_KEY=arguments["signature_def_key"])
    return common


# --- the model folder, and the compiled model -------------------------------------------------------------------------


def model_folder(arguments: Arguments) -> Path:
    folder = Path(os.path.abspath(arguments["triton_model_dir"]))
    parent = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not re.fullmatch("[A-Za-z0-9_][A-Za-z0-9_.-]*", folder.name):
        problem = "its last part is the model's name: letters, digits, '_', '-' and '.'"
    elif not os.path.isdir(parent):
        problem = f"{parent} is not a folder; choose another one, or move it away"
    elif not os.access(parent, os.W_OK | os.X_OK):
        problem = f"you cannot write to {parent}; choose another folder, or ask its owner"
    else:
        return folder
    raise arguments.error("triton_model_dir", problem)


@dataclass
class CompiledModel:
    path: Path
    parameter: str  # the COMPILED_MODEL of config.pbtxt: relative if the model lies in the model folder
    copied: bool = False  # into the model folder, unless that has the same content


def compiled_model(arguments: Arguments, folder: Path | None) -> CompiledModel:
    text = arguments["compiled_model"]
    path = Path(os.path.abspath(text))
    moves_in = arguments["inf2"] and not os.path.isabs(text)
    if moves_in:
        model = compiled_for_inf2(text, path, folder or Path())
    else:
        # A relative path stays valid in a container, and after the folder was moved.
        model = CompiledModel(path, path_within(folder, path) or str(path))
    if not os.path.exists(model.path):
        neither = f"is neither in {folder or '--triton_model_dir'} nor in {os.getcwd()}"
        problem = neither if moves_in else f"{model.path} does not exist"
    elif arguments.kind == PYTORCH and not os.path.isfile(model.path):
        kind = "a folder" if os.path.isdir(model.path) else "not a regular file"
        problem = f"is {kind}; must be the file that torch.jit.save wrote"
    elif arguments.kind == TENSORFLOW and not saved_model_file(model.path):
        problem = "must be the folder of a SavedModel, which has a saved_model.pb"
    elif arguments.kind == TRANSFORMERS and not os.path.isdir(model.path):
        problem = "is not a folder; must be the folder that the model was saved in"
    elif model.copied and folder and model.path in (folder, *folder.parents):
        problem = "contains --triton_model_dir, so it cannot be copied there; choose another folder"
    elif model.copied and model.parameter.isdecimal():
        problem = f"would look like version {model.parameter} in the model folder; rename it, or give its absolute path"
    elif not os.path.isabs(model.parameter) and {"config.pbtxt", "model.py"} & set(Path(model.parameter).parts):
        problem = "has the name of a file that is written into the model folder; rename it"
    else:
        return model
    raise arguments.error("compiled_model", problem)


def compiled_for_inf2(text: str, path: Path, folder: Path) -> CompiledModel:
    """Return the copy in the model folder, or what is to be copied there. The caller checks that it exists."""
    name = os.path.normpath(text)
    if name.split(os.sep)[0] in (os.curdir, os.pardir):
        name = path.name
    place, inside = folder / name, path_within(folder, path)
    if os.path.exists(path) and not inside:
        return CompiledModel(path, name, copied=True)
    return CompiledModel(path, inside) if inside and not os.path.exists(place) else CompiledModel(place, name)


def path_within(folder: Path | None, path: Path) -> str | None:
    """Return the path relative to the folder, also through links, or None if it lies elsewhere."""
    if folder is None:
        return None
    resolved = Path(os.path.realpath(path.parent)) / path.name
    for inner, outer in ((path, folder), (resolved, Path(os.path.realpath(folder)))):
        if outer in (inner, *inner.parents):
            return str(inner.relative_to(outer))
    return None


# --- inputs and outputs: from the command line, else from the SavedModel ----------------------------------------------


def model_tensors(arguments: Arguments, compiled: CompiledModel | None) -> tuple[dict[str, list[Tensor]], int]:
    """Return the tensors of both sides, and the rows that the model was compiled for, 0 if unknown."""
    for side in EXAMPLES:
        check_tensors(arguments, side)
    tensors = {side: arguments[side] for side in EXAMPLES if arguments.given(side)}
    rows = arguments["compiled_batch_size"]
    if len(tensors) == len(EXAMPLES) or arguments.kind != TENSORFLOW:
        return tensors, rows
    if compiled is None:
        raise InvalidArgument
    own = {side: own for side, own in signature_tensors(arguments, compiled.path).items() if side not in tensors}
    own_rows = remove_batch_dimension(arguments, own)
    if own_rows and rows not in (0, own_rows):
        raise arguments.error("compiled_batch_size", f"the model's own batch dimension is {own_rows}")
    return {**tensors, **own}, rows or own_rows


def check_tensors(arguments: Arguments, side: str) -> None:
    """Record errors of names and types. Reads texts, because a tensor with an invalid shape has no value."""
    parts = [text.split(",") for text in arguments.texts.get(side, [])]
    names = [part[0] for part in parts if len(part) == 3 and part[0]]
    if arguments.kind == PYTORCH:
        check_indices(arguments, side, names)
    else:
        for name in sorted({name for name in names if names.count(name) > 1}):
            arguments.errors.append(f"--{side}: {name} appears more than once; each tensor needs a name of its own")
    for part in parts:
        if arguments.kind == PYTORCH and part[1:2] in (["BYTES"], ["STRING"]):
            arguments.error(side, "PyTorch has no strings; must be a type of numbers", ",".join(part))
        if arguments.kind == TENSORFLOW and part[1:2] == ["BF16"]:
            arguments.error(side, "BF16 is for PyTorch; must be FP32, which TensorFlow converts to", ",".join(part))


def check_indices(arguments: Arguments, side: str, names: list[str]) -> None:
    example, indices = EXAMPLES[side], []
    if not arguments.given(side):
        arguments.errors.append(
            f"--{side} is missing: a TorchScript model does not list its tensors. Set it, as in {example}"
        )
    for name in names:
        match = re.fullmatch("(.+)__([0-9]{1,9})", name)
        if match:
            indices.append(int(match.group(2)))
        else:
            arguments.error(side, f"PyTorch's tensors are named <name>__<index>, such as {example}", name)
    if indices and len(indices) == len(arguments.texts[side]) and sorted(indices) != list(range(len(indices))):
        expected = "0" if len(indices) == 1 else f"0 to {len(indices) - 1}, each once"
        arguments.errors.append(f"--{side}: the indices are {', '.join(map(str, indices))}; must be {expected}")


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
