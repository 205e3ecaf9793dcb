"""Check how the arguments fit together, and describe the model folder to write."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from generator.arguments import Arguments
from generator.model_tensors import LANGUAGE_MODEL, model_tensors
from generator.options import GROUPS, PYTORCH, TENSORFLOW, TRANSFORMERS
from generator.paths import CompiledModel, compiled_model, model_folder
from generator.pbtxt import Enum, Map
from generator.value_types import Tensor

LANGUAGE_OPTIONS = [option.name for group in GROUPS if group.kinds == (TRANSFORMERS,) for option in group.options]


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
