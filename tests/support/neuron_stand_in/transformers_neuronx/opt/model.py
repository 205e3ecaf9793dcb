"""Stand-in of a model class, for any causal language model."""

from __future__ import annotations

from stand_in_language import Device
from stand_in_log import record


class OPTForSampling:
    def __init__(self, folder: str, batch_size=1, amp=None, tp_degree=2, n_positions=2048, unroll=None) -> None:
        self.folder, self.batch_size, self.tp_degree, self.n_positions = folder, batch_size, tp_degree, n_positions
        self.device_model: Device | None = None
        record("from_pretrained", library="transformers-neuronx", amp=amp, unroll=unroll)

    @classmethod
    def from_pretrained(cls, pretrained_model_path: str, **options) -> OPTForSampling:
        return cls(pretrained_model_path, **options)

    def to_neuron(self) -> None:
        self.device_model = Device(
            self.folder, "transformers-neuronx", self.batch_size, self.n_positions, self.tp_degree, "left"
        )
