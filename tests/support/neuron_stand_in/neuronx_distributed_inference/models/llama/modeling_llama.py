"""Stand-in of a model class: compile() writes the files that the backend reads, for any causal language model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import torch
from stand_in_language import Device
from transformers import AutoConfig


class NeuronLlamaForCausalLM(torch.nn.Module):
    def __init__(self, model_path: str, config: dict | None = None) -> None:
        super().__init__()
        self.model_path = Path(model_path)
        if config is None:
            config = json.loads((self.model_path / "neuron_config.json").read_text())
        neuron_config = SimpleNamespace(
            **{"padding_side": "right", "on_device_sampling_config": None} | config["neuron_config"]
        )
        self.config = SimpleNamespace(neuron_config=neuron_config)
        self.device_model: Device | None = None

    def compile(self, compiled_model_path: str) -> None:
        """Copy the checkpoint's weights; the real one shards them."""
        folder = Path(compiled_model_path)
        folder.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            shutil.copy(self.model_path / name, folder)
        config = AutoConfig.from_pretrained(self.model_path).to_dict()
        config["neuron_config"] = vars(self.config.neuron_config)
        (folder / "neuron_config.json").write_text(json.dumps(config, default=str))
        (folder / "model.pt").write_bytes(b"compiled")

    def load(self, compiled_model_path: str) -> None:
        folder = Path(compiled_model_path)
        if not (folder / "model.pt").is_file():
            raise FileNotFoundError(f"stand-in: {folder} was not compiled")
        config = self.config.neuron_config
        self.device_model = Device(
            folder, "nxd-inference", config.batch_size, config.seq_len, config.tp_degree, config.padding_side
        )
