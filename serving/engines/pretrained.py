"""Loads the PyTorch model of a folder that save_pretrained wrote: chooses device and precision, checks that it fits."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from serving.engines.lean_transformers import transformers
from serving.triton.memory import HEADROOM, check_it_fits, memory, one_load_at_a_time
from serving.triton.parameters import (
    DEVICES,
    choice_parameter,
    flag_parameter,
    instance_count,
    parameter,
    usable_cpus,
    weights_folder,
)
from serving.triton.types import ConfigError, InstanceArgs, ModelConfig

# safetensors' names of the types that models compute in.
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def chosen_device(config: ModelConfig, args: InstanceArgs) -> torch.device:
    """Return the device that the config sets, or else the one where Triton placed the instance."""
    device = choice_parameter(config, "device", DEVICES, "auto")
    if device == "cpu" or (device == "auto" and args["model_instance_kind"] != "GPU"):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "the instance must run on a GPU, and torch finds none: set PROFILE=cuda, or KIND_CPU in instance_group"
        )
    return torch.device("cuda", int(args["model_instance_device_id"]))


def model_class(config: ModelConfig, default: str) -> Any:
    """Return the class of transformers that the parameter `model_class` names."""
    name = parameter(config, "model_class", default)
    if not hasattr(transformers, name):
        raise ConfigError(f"parameter 'model_class': transformers {transformers.__version__} has no class '{name}'")
    return getattr(transformers, name)


def method(model: transformers.PreTrainedModel, config: ModelConfig) -> Callable[..., Any]:
    """Return the method of the model that the parameter `method` names: of some, only one half of the model runs."""
    name = parameter(config, "method", "forward")
    call: Callable[..., Any] | None = getattr(model, name, None)
    if not callable(call):
        raise ConfigError(f"parameter 'method': {type(model).__name__} has no method '{name}'")
    return call


class Plan(NamedTuple):
    """The weights to load, and how."""

    folder: Path
    device: torch.device
    dtype: torch.dtype
    size: int  # of the loaded weights in bytes


def plan(config: ModelConfig, args: InstanceArgs, precision: torch.dtype | None = None) -> Plan:
    """Choose the device, and the precision if it is None, and set the threads of this process."""
    folder, device = weights_folder(config, args), chosen_device(config, args)
    stored = stored_weights(folder)
    dtype = chosen_dtype(choice_parameter(config, "dtype", ("auto", *map(name_of, DTYPES.values())), "auto"), stored)
    if device.type == "cpu":
        torch.set_num_threads(max(1, usable_cpus() // instance_count(config)))
        if dtype is torch.float16 and parameter(config, "dtype", "auto") == "auto":
            dtype = torch.bfloat16  # CPUs compute in bfloat16, and only store float16
    dtype = precision or dtype
    silence_transformers()
    return Plan(folder, device, dtype, size(stored, dtype))


def silence_transformers() -> None:
    """Let transformers log errors only."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@contextlib.contextmanager
def space_for(planned: Plan, args: InstanceArgs) -> Iterator[None]:
    """Load one model at a time, after a check that it fits. Raise ConfigError if it does not."""
    with one_load_at_a_time():
        check_it_fits(args["model_name"], planned.size * HEADROOM, free_memory(planned.device))
        yield


def load(
    architecture: Any, config: ModelConfig, args: InstanceArgs, precision: torch.dtype | None = None
) -> transformers.PreTrainedModel:
    """Return the model, ready to run. Raise ConfigError before loading if it cannot run or does not fit."""
    planned = plan(config, args, precision)
    with space_for(planned, args):
        model: transformers.PreTrainedModel = architecture.from_pretrained(
            planned.folder,
            dtype=planned.dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=flag_parameter(config, "trust_remote_code", False),
        )
        model.to(planned.device)
        copy_weights(model)
        model.eval()
        return model


def copy_weights(model: transformers.PreTrainedModel) -> None:
    """Copy the weights to memory of their own: on a CPU they are a map of the file, which counts as free memory."""
    if model.device.type == "cpu":
        for weight in model.parameters():
            weight.data = weight.data.clone()


def keep_tokens(model: Any, ids: list[int]) -> None:
    """Let a language model compute the logits of these tokens only."""
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight[ids])
    if getattr(head, "bias", None) is not None:
        head.bias = torch.nn.Parameter(head.bias[ids])


def rotary_context(config: Any) -> int | None:
    """Return the length up to which a text does not change the positions of others, or None if there is no limit.

    The scaling `longrope` turns all positions of a batch in another way once one text passes this length.
    """
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    nested = [values for values in parameters.values() if isinstance(values, dict)]
    lengths = [
        int(values["original_max_position_embeddings"])
        for values in (parameters, *nested)
        if values.get("rope_type") == "longrope"
    ]
    return min(lengths, default=None)


# --- memory -----------------------------------------------------------------------------------------------------------


def stored_weights(folder: Path) -> Counter[str]:
    """Return the count of numbers of each safetensors type, from the files' headers."""
    stored: Counter[str] = Counter()
    for path in weight_files(folder):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for tensor in header.values():
            stored[tensor["dtype"]] += math.prod(tensor["shape"])
    return stored


def weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        # Only the bare names, so that an index cannot name files in other folders.
        return [folder / Path(name).name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    raise ConfigError(f"{folder} has no model.safetensors: put there what save_pretrained writes, or run `make models`")


def chosen_dtype(name: str, stored: Counter[str]) -> torch.dtype:
    """Return the named type, or for `auto` the type of most of the weights."""
    if name != "auto":
        return next(dtype for dtype in DTYPES.values() if name_of(dtype) == name)
    return DTYPES[max(DTYPES, key=lambda stored_name: stored[stored_name])]


def size(stored: Counter[str], dtype: torch.dtype) -> int:
    """Return the bytes of the loaded weights."""
    return sum(count * (dtype.itemsize if name in DTYPES else 1) for name, count in stored.items())


def free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    used, limit = memory()
    return limit - used


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
