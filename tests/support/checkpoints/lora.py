"""Save LoRA adapters of a causal language model as peft does, and the model whose weights one is merged into."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from export.checkpoint.adapters import CONFIG, WEIGHTS

# The fields that peft 0.21 writes and that change nothing here.
WRITTEN = {
    "base_model_name_or_path": "tests/base", "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True, "loftq_config": {}, "lora_bias": False, "lora_dropout": 0.05, "modules_to_save": None,
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "use_dora": False, "alpha_pattern": {}, "rank_pattern": {},
    "use_rslora": False,
}  # fmt: skip


def save_adapter(folder: Path, base: Path, layers: str = "q_proj|v_proj", seed: int = 1, **options: Any) -> Path:
    """Save an adapter of the linear layers whose names end like this."""
    options = WRITTEN | {"r": 4, "lora_alpha": 8} | options
    torch.manual_seed(seed)
    tensors = {}
    for name, module in transformers.AutoModelForCausalLM.from_pretrained(base).named_modules():
        if isinstance(module, torch.nn.Linear) and re.search(rf"\.({layers})$", name):
            rank = matched(options["rank_pattern"], name, options["r"])
            for end, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                tensors[f"base_model.model.{name}.lora_{end}.weight"] = torch.randn(shape) * 0.4
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(options))
    return folder


def merged(base: Path, adapter: Path | None) -> Any:
    """Return the model with W + scale * B A in each layer that the adapter changes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if adapter is None:
        return model
    options, tensors = json.loads((adapter / CONFIG).read_text()), load_file(adapter / WEIGHTS)
    for key in tensors:
        if key.endswith(".lora_A.weight"):
            name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            rank = matched(options["rank_pattern"], name, options["r"])
            alpha = matched(options["alpha_pattern"], name, options["lora_alpha"])
            scale = alpha / (rank**0.5 if options["use_rslora"] else rank)
            model.get_submodule(name).weight.data += scale * tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
    return model


def matched(pattern: dict[str, Any], name: str, default: Any) -> Any:
    return next((value for end, value in pattern.items() if re.match(rf"(.*\.)?({end})$", name)), default)
