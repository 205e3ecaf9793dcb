"""Stand-in of optimum-neuron's NeuronModelForCausalLM, as far as the `neuron` backend uses it.

`optimum` is a namespace package, as in the real packages, so it has no __init__.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from stand_in_language import Device, DeviceGenerationMixin
from transformers import AutoConfig, GenerationConfig, GenerationMixin


class NeuronModelForCausalLM(DeviceGenerationMixin, GenerationMixin):
    main_input_name = "input_ids"
    _is_stateful = False
    _supports_cache_class = False

    @classmethod
    def from_pretrained(cls, model_id: str, local_files_only: bool = False) -> NeuronModelForCausalLM:
        folder = Path(model_id)
        model = cls()
        model.config = AutoConfig.from_pretrained(folder, local_files_only=local_files_only)
        model.generation_config = GenerationConfig.from_model_config(model.config)
        model.neuron_config = config = SimpleNamespace(**json.loads((folder / "neuron_config.json").read_text()))
        model.samples_on_device = config.on_device_sampling
        model.device_model = Device(
            folder, "optimum-neuron", config.batch_size, config.sequence_length, config.tp_degree, "right"
        )
        return model

    def __call__(self, **inputs):
        return self.forward(**inputs)

    def can_generate(self) -> bool:
        return True
