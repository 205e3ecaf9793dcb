"""A folder as save_pretrained writes it, as a PyTorch model here: on which device, how precise, and whether it fits."""

from __future__ import annotations

import fcntl
import json
import math
import struct
from collections import Counter
from pathlib import Path

import torch
import transformers

from shared.errors import ConfigError
from shared.memory import memory
from shared.parameters import choice_parameter, instance_count, parameter, usable_cpus

# safetensors' names of the types that weights are computed in.
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# The weights, and a tenth for torch itself and what a batch keeps of its texts.
HEADROOM = 1.1


def weights_folder(config: dict, args: dict[str, str]) -> Path:
    """The model's own version folder, or that of the model whose weights it shares."""
    model = Path(args["model_repository"])
    folder = model.with_name(parameter(config, "weights", model.name)) / args["model_version"]
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json: put there what save_pretrained writes, or run `make models`")
    return folder


def chosen_device(config: dict, args: dict[str, str]) -> torch.device:
    """As Triton placed the instance, unless the config knows better."""
    asked = choice_parameter(config, "device", ("auto", "cpu", "cuda"), "auto")
    if asked == "cpu" or (asked == "auto" and args["model_instance_kind"] != "GPU"):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "the instance is to run on a GPU, but the installed torch finds none: say KIND_CPU in instance_group"
        )
    return torch.device("cuda", int(args["model_instance_device_id"]))


def load(architecture: type, config: dict, args: dict[str, str]) -> transformers.PreTrainedModel:
    """The model, ready to run; a ConfigError before anything is loaded where it cannot be."""
    folder, device = weights_folder(config, args), chosen_device(config, args)
    stored = stored_weights(folder)
    dtype = chosen_dtype(choice_parameter(config, "dtype", ("auto", *map(name_of, DTYPES.values())), "auto"), stored)
    if device.type == "cpu":
        torch.set_num_threads(max(1, usable_cpus() // instance_count(config)))
        if dtype is torch.float16 and parameter(config, "dtype", "auto") == "auto":
            dtype = torch.bfloat16  # CPUs compute in it, and only store float16
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with open(__file__) as lock:
        # One model after the other, so that each is weighed against what the one before has taken.
        fcntl.flock(lock, fcntl.LOCK_EX)
        check_it_fits(args["model_name"], size(stored, dtype) * HEADROOM, free_memory(device))
        model = architecture.from_pretrained(
            folder,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=trusts_remote_code(config),
        )
        return owned(model.to(device)).eval()


def owned(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """With weights in memory of its own: on a CPU they are a map of the file, which counts as free memory."""
    if model.device.type == "cpu":
        for weight in model.parameters():
            weight.data = weight.data.clone()
    return model


def trusts_remote_code(config: dict) -> bool:
    return choice_parameter(config, "trust_remote_code", ("0", "1"), "0") == "1"


# --- does it fit? -----------------------------------------------------------------------------------------------------


def stored_weights(folder: Path) -> Counter[str]:
    """Safetensors' type -> how many numbers the files hold of it, by their headers."""
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
        # By their bare names: whoever made the index has no say over other folders.
        return [folder / Path(name).name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    raise ConfigError(f"{folder} has no model.safetensors: put there what save_pretrained writes, or run `make models`")


def chosen_dtype(asked: str, stored: Counter[str]) -> torch.dtype:
    """`auto`: as most of the weights are stored."""
    if asked != "auto":
        return getattr(torch, asked)
    known = {dtype: count for name, count in stored.items() if (dtype := DTYPES.get(name))}
    return max(known, key=known.get, default=torch.float32)


def size(stored: Counter[str], dtype: torch.dtype) -> int:
    """Bytes of the weights once loaded."""
    return sum(count * (dtype.itemsize if name in DTYPES else 1) for name, count in stored.items())


def free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    used, limit = memory()
    return limit - used


def check_it_fits(name: str, needed: float, free: int) -> None:
    if needed > free:
        raise ConfigError(
            f"{name} takes about {needed / 1e9:.1f} GB and {max(0, free) / 1e9:.1f} GB of memory are free here: "
            "unload another model, give Triton more memory, or set the parameter 'dtype' to a smaller type"
        )


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
