"""Find the LoRA adapters beside a model's weights, in a folder for each, and refuse those that are not served."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

from triton_transformers.settings import UserError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# The files of adapters in a folder or a repository. The trainer saves the state of a training as checkpoint-500.
FILE = re.compile(rf"(?!(.*/)?checkpoint-\d)([^/.][^/]*/)+({re.escape(CONFIG)}|{re.escape(WEIGHTS)})")
# The options that the exporter applies.
APPLIED = ("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
# Options that change no answer of a trained adapter: its origin, its training, and the layers that its file names.
HARMLESS = (
    "auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode", "layers_pattern",
    "layers_to_transform", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "revision",
    "target_modules", "task_type",
)  # fmt: skip
# The initial weights that leave the model's own weights as they were. Those of PiSSA and LoftQ change them.
BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")
INSTEAD = "merge it into its model (merge_and_unload in peft), and serve that as a system of its own"


def adapter_folders(weights: Path) -> list[Path]:
    """Return the folders of the adapters, by name. Each has a number in the exported graph: its place, from 1."""
    configs = [path for path in weights.rglob(CONFIG) if FILE.fullmatch(path.relative_to(weights).as_posix())]
    return sorted((path.parent for path in configs), key=lambda folder: folder.name)


def check_adapters(name: str, weights: Path) -> None:
    """Raise if an adapter computes more than LoRA does. The weights may be missing."""
    folders = adapter_folders(weights)
    for folder in folders:
        check_adapter(f"{name}: the adapter in {folder.relative_to(weights)}", read_options(name, folder))
    names = [folder.name for folder in folders]
    if twice := [one for one, other in itertools.pairwise(names) if one == other]:
        raise UserError(f"{name} has two adapters that are named {twice[0]}: rename the folder of one of them")


def check_adapter(adapter: str, options: dict[str, Any]) -> None:
    """Raise if the adapter, which messages name so, computes more than LoRA does."""
    if (kind := options.get("peft_type")) != "LORA":
        raise UserError(f"{adapter} is of the type {kind}, and only LORA is served: {INSTEAD}")
    if unserved := [key for key, value in options.items() if not is_served(key, value)]:
        raise UserError(f"{adapter} sets {', '.join(unserved)} in {CONFIG}, which is not served here: {INSTEAD}")


def is_served(key: str, value: Any) -> bool:
    if key == "init_lora_weights":
        return value in BEGINNINGS
    is_unset = not value or value == "none" or (isinstance(value, dict) and not any(value.values()))
    return key in APPLIED or key in HARMLESS or is_unset


def read_options(name: str, folder: Path) -> dict[str, Any]:
    try:
        options = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, dict):
        raise UserError(f"{name}: {folder.name}/{CONFIG} is not a JSON object: download the adapter again")
    return options
