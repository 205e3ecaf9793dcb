"""Stand-in of the adapter that gives NxD Inference's models Hugging Face's generate()."""

from __future__ import annotations

import json

from stand_in_language import DeviceGenerationMixin
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel


class HuggingFaceGenerationAdapter(DeviceGenerationMixin, PreTrainedModel, GenerationMixin):
    def __init__(self, model) -> None:
        config = json.loads((model.model_path / "neuron_config.json").read_text())
        del config["neuron_config"]
        super().__init__(PretrainedConfig(**config))
        if model.device_model is None:
            raise RuntimeError("stand-in: the model is not loaded")
        self.device_model = model.device_model
        self.samples_on_device = model.config.neuron_config.on_device_sampling_config is not None
