"""The common part of the stand-ins for language models: a real small model of transformers, on the CPU.

It has the limits of the hardware: batches of exactly the compiled rows, texts up to the compiled length, padding on the
library's side, and only the cores that the process may use.
"""

from __future__ import annotations

from pathlib import Path

import torch
from stand_in_log import core_count, record, take_cores, visible_cores
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutput

if visible_cores() is None:
    raise RuntimeError("stand-in: imported before the instance claimed its cores")


class Device:
    """The compiled model."""

    def __init__(self, folder: str | Path, library: str, batch_size: int, length: int, tp_degree: int, side: str):
        if core_count() < tp_degree:
            raise RuntimeError(f"stand-in: {tp_degree} cores asked for, {core_count()} visible")
        take_cores()
        torch.set_num_threads(1)  # models this small gain nothing from a second one
        self.batch_size, self.length, self.side, self.library = batch_size, length, side, library
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.known: dict[tuple[int, ...], torch.Tensor] = {}
        record("load", library=library, batch_size=batch_size, n_positions=length, tp_degree=tp_degree)

    def begin(self, tokens: torch.Tensor, mask: torch.Tensor) -> None:
        record("generate", library=self.library, rows=len(tokens), width=tokens.shape[1], real=mask.sum(1).tolist())
        if len(tokens) != self.batch_size:
            raise ValueError(f"stand-in: {len(tokens)} rows, compiled for {self.batch_size}")
        if not mask[:, 0 if self.side == "right" else -1].all():
            raise ValueError(f"stand-in: padding must be on the {self.side}")

    def logits(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the logits of each row's next token: [rows, 1, vocabulary]. Other rows have no influence."""
        if tokens.shape[1] >= self.length:
            raise ValueError(f"stand-in: {tokens.shape[1]} tokens and one more, compiled for {self.length}")
        return torch.stack([self.row_logits(row[kept.bool()]) for row, kept in zip(tokens, mask, strict=True)])

    @torch.no_grad()
    def row_logits(self, row: torch.Tensor) -> torch.Tensor:
        """Remember texts, because tests repeat many: rows that fill a batch, the same prompt alone and together."""
        key = tuple(row.tolist())
        if key not in self.known:
            self.known[key] = self.model(row[None]).logits[0, -1:]
        return self.known[key]


class DeviceGenerationMixin:
    """Hugging Face's own generate() on a Device, for a class that is a GenerationMixin and has `device_model`."""

    device_model: Device
    samples_on_device = False  # if true, generate() ignores logits processors

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def get_experts_implementation(self):
        """Return what transformers 5 asks every model with generate()."""

    def generate(self, input_ids, attention_mask=None, **options):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        self.device_model.begin(input_ids, mask)
        if self.samples_on_device:
            options["logits_processor"] = None
        return super().generate(input_ids, attention_mask=mask, **options)

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **_):
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(self, input_ids, attention_mask=None, **_):
        if attention_mask is None:  # transformers 5 drops a mask of ones
            attention_mask = torch.ones_like(input_ids)
        return CausalLMOutput(logits=self.device_model.logits(input_ids, attention_mask))
