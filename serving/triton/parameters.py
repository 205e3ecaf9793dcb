"""Reads what Triton passes to initialize(): parameters, files of the model, number of instances."""

from __future__ import annotations

import os
from pathlib import Path

from serving.triton.types import ConfigError, InstanceArgs, ModelConfig

# The values of the parameter `device`.
DEVICES = ("auto", "cpu", "cuda")
BF16_FLAGS = {"avx512_bf16", "amx_bf16"}  # in /proc/cpuinfo
# A setting of OpenVINO. Pinned threads of several processes would share the first cores and leave the others idle.
UNPINNED = {"ENABLE_CPU_PINNING": False}


def version_file(args: InstanceArgs, name: str, what: str = "the model's") -> Path:
    """Return the path of a file that `make models` puts into the model's version folder."""
    path = Path(args["model_repository"]) / args["model_version"] / name
    if not path.is_file():
        raise ConfigError(f"{path} is missing: put {what} there, or run `make models`")
    return path


def parameter(config: ModelConfig, key: str, default: str = "") -> str:
    value: str = config.get("parameters", {}).get(key, {}).get("string_value", default)
    return value.strip() or default


def mask_name(config: ModelConfig) -> str:
    """Return the input of a text encoder that has 1 for each token, and 0 for padding."""
    return parameter(config, "mask", "attention_mask")


def int_parameter(config: ModelConfig, key: str, default: int) -> int:
    text = parameter(config, key, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"parameter '{key}' must be a whole number, not '{text}'") from None


def choice_parameter(config: ModelConfig, key: str, choices: tuple[str, ...], default: str) -> str:
    value = parameter(config, key, default)
    if value not in choices:
        raise ConfigError(f"parameter '{key}' must be one of {', '.join(choices)}, not '{value}'")
    return value


def flag_parameter(config: ModelConfig, key: str, default: bool) -> bool:
    return choice_parameter(config, key, ("0", "1", "false", "true"), "1" if default else "0") in ("1", "true")


def weights_folder(config: ModelConfig, args: InstanceArgs) -> Path:
    """Return the version folder of the model, or of the model that the parameter `weights` names."""
    model = Path(args["model_repository"])
    folder = model.with_name(parameter(config, "weights", model.name)) / args["model_version"]
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json: put there what save_pretrained writes, or run `make models`")
    return folder


def has_input(config: ModelConfig, name: str) -> bool:
    return any(tensor["name"] == name for tensor in config.get("input", ()))


def instance_count(config: ModelConfig) -> int:
    return sum(group.get("count", 1) for group in config.get("instance_group", [])) or 1


def has_bf16() -> bool:
    return not BF16_FLAGS.isdisjoint(Path("/proc/cpuinfo").read_text().split())


def check_bf16(what: str, others: str) -> None:
    if not has_bf16():
        flags = " or ".join(sorted(BF16_FLAGS))
        raise ConfigError(f"{what} requires a CPU with {flags}, which this one lacks: choose {others}")


def usable_cpus() -> int:
    """Return the CPUs in this process's affinity mask, limited by the container's quota."""
    cpus = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cpus
    return cpus if quota == "max" else max(1, min(cpus, int(quota) // int(period)))
