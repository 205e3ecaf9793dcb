"""What the command line means as a whole: do its flags fit each other, and what is to be written."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from generator.flags import Flags
from generator.options import GROUPS, PYTORCH, TENSORFLOW, TRANSFORMERS
from generator.pbtxt import Enum, Map
from generator.places import Compiled, read_compiled, read_folder
from generator.tensors import LANGUAGE_MODEL, read_tensors
from generator.values import Tensor

OF_LANGUAGE_MODELS = [option.name for group in GROUPS if group.kinds == (TRANSFORMERS,) for option in group.options]


@dataclass
class Order:
    folder: Path
    version: int
    compiled: Compiled
    base: str  # the class of the backend `neuron` that model.py makes its own of
    config: dict


def read(flags: Flags) -> Order | None:
    """None where something is wrong: flags.errors has all of it."""
    folder = flags.attempt(read_folder)
    cores = flags.attempt(cores_of_an_instance)
    batching = flags.attempt(dynamic_batching)
    compiled = flags.attempt(read_compiled, folder)
    if flags.kind == TRANSFORMERS:
        base, sides, rows = "LanguageModel", LANGUAGE_MODEL, 0
        flags.attempt(check_degree, cores)
    else:
        base, (sides, rows) = "TensorModel", flags.attempt(read_tensors, compiled) or ({}, 0)
    if flags.errors:
        return None
    warn_of_newer(flags, folder)
    if flags.kind == PYTORCH and not rows:
        warn_of_idle_cores(flags, cores)
    config = {
        "name": folder.name,
        "backend": "python",
        "max_batch_size": flags["max_batch_size"],
        "input": [tensor_config(each) for each in sides["triton_input"]],
        "output": [tensor_config(each) for each in sides["triton_output"]],
        **batching,
        "instance_group": [{"count": flags["triton_model_instance_count"], "kind": Enum("KIND_MODEL")}],
        "parameters": Map(
            (name, {"string_value": str(value)}) for name, value in parameters(flags, compiled, rows).items()
        ),
    }
    return Order(folder, flags["model_version"], compiled, base, config)


def cores_of_an_instance(flags: Flags) -> int:
    total, instances = len(flags["neuron_core_range"]), flags["triton_model_instance_count"]
    if total % instances:
        fit = ", ".join(str(count) for count in range(1, min(total, 128) + 1) if total % count == 0)
        said = f"{total} cores ({flags.text('neuron_core_range')})"
        what = f"{said} cannot be shared out equally among them; among {fit} they can"
        raise flags.wrong("triton_model_instance_count", what)
    return total // instances


def dynamic_batching(flags: Flags) -> dict[str, dict]:
    """Its field, where it is on."""
    if not flags["enable_dynamic_batching"]:
        for flag in filter(flags.said, ("preferred_batch_size", "max_queue_delay_microseconds")):
            flags.warnings.append(f"--{flag}: ignored without --enable_dynamic_batching")
        return {}
    most = flags["max_batch_size"]
    if most == 0:
        raise flags.wrong("enable_dynamic_batching", "needs --max_batch_size, the most rows put together, such as 8")
    for size in flags["preferred_batch_size"] or []:
        if size > most:
            flags.wrong("preferred_batch_size", f"must be at most --max_batch_size, {most}", size)
    fields = ("preferred_batch_size", "max_queue_delay_microseconds")
    return {"dynamic_batching": {field: flags[field] for field in fields if flags.said(field)}}


def check_degree(flags: Flags, cores: int | None) -> None:
    degree = flags["tp_degree"]
    if degree and cores and degree > cores:
        flags.wrong("tp_degree", f"an instance has {cores} cores: must be at most {cores}")
    elif degree and cores and degree < cores:
        flags.warnings.append(f"--tp_degree {degree}: an instance has {cores} cores, of which the others stay idle")


def warn_of_newer(flags: Flags, folder: Path) -> None:
    versions = [int(each.name) for each in folder.glob("*") if re.fullmatch("[1-9][0-9]*", each.name)]
    version = flags["model_version"]
    if max(versions, default=0) > version:
        flags.warnings.append(f"--model_version {version}: {folder.name} has {max(versions)} too, which Triton prefers")


def warn_of_idle_cores(flags: Flags, cores: int) -> None:
    """torch-neuron (Inf1) cuts batches up by itself, and requests that are kept apart go side by side."""
    side_by_side = flags["disable_batch_requests_to_neuron"] and flags["enable_dynamic_batching"]
    if flags["inf2"] and cores > 1 and not side_by_side:
        flags.warnings.append(
            f"--compiled_batch_size is not said: one of an instance's {cores} cores computes at a time; say it "
            "(batches are cut up among the cores), or --triton_model_instance_count "
            f"{len(flags['neuron_core_range'])} (each has one)"
        )


def tensor_config(tensor: Tensor) -> dict[str, object]:
    config = {"name": tensor.name, "data_type": Enum(f"TYPE_{tensor.data_type}"), "dims": tensor.dims or [1]}
    if not tensor.dims:  # Triton has none without dimensions: clients see one of size 1, the model does not.
        config["reshape"] = {"shape": []}
    return {**config, "optional": True} if tensor.optional else config


def parameters(flags: Flags, compiled: Compiled, rows: int) -> dict[str, object]:
    """Of language models those that were said: what was not is the model's own, or the backend's default."""
    cores, neuronx = flags["neuron_core_range"], flags["inf2"] or flags.kind == TRANSFORMERS
    found = {
        "COMPILED_MODEL": compiled.parameter,
        "NEURON_CORE_START_INDEX": cores[0],
        "NEURON_CORE_END_INDEX": cores[-1],
        "NUM_THREADS_PER_CORE": flags["threads_per_core"],
        "FRAMEWORK": TENSORFLOW if flags.kind == TENSORFLOW else "torch-neuronx" if neuronx else "torch-neuron",
    }
    if flags.kind == TRANSFORMERS:
        return {**found, **{flag.upper(): flags[flag] for flag in OF_LANGUAGE_MODELS if flags.said(flag)}}
    found["BATCH_REQUESTS_TO_NEURON"] = "false" if flags["disable_batch_requests_to_neuron"] else "true"
    if rows:
        found["COMPILED_BATCH_SIZE"] = rows
    if flags.kind == TENSORFLOW:
        found.update(TAG_SET=flags["tag_set"], SIGNATURE_DEF_KEY=flags["signature_def_key"])
    return found
