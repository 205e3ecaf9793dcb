"""Stand-in of the adapter that gives transformers-neuronx' models Hugging Face's generate()."""

from __future__ import annotations

from stand_in_language import DeviceGenerationMixin
from transformers import GenerationMixin, PreTrainedModel


class HuggingFaceGenerationModelAdapter(DeviceGenerationMixin, PreTrainedModel, GenerationMixin):
    def __init__(self, config, model) -> None:
        super().__init__(config)
        if model.device_model is None:
            raise RuntimeError("stand-in: to_neuron() comes first")
        self.device_model = model.device_model
