"""What the stand-ins of the Neuron libraries for language models share: a real small model of transformers, on the CPU.

It holds to what the hardware does: a batch of exactly the rows, texts of at most the length that it was compiled for,
padding on the library's side, no more cores than the process may use.
"""

from __future__ import annotations

from pathlib import Path

import torch
from stand_in_log import core_count, record, take_cores, visible_cores
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutput

if visible_cores() is None:
    raise RuntimeError("stand-in: imported before the instance took its cores")


class Device:
    """The model as the compiler left it."""

    def __init__(self, folder: str | Path, library: str, batch_size: int, length: int, tp_degree: int, side: str):
        if core_count() < tp_degree:
            raise RuntimeError(f"stand-in: {tp_degree} cores asked for, {core_count()} visible")
        take_cores()
        torch.set_num_threads(1)  # models this small only wait for a second one
        self.batch_size, self.length, self.side, self.library = batch_size, length, side, library
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        record("load", library=library, batch_size=batch_size, n_positions=length, tp_degree=tp_degree)

    def begin(self, tokens: torch.Tensor, mask: torch.Tensor) -> None:
        record("generate", library=self.library, rows=len(tokens), width=tokens.shape[1], real=mask.sum(1).tolist())
        if len(tokens) != self.batch_size:
            raise ValueError(f"stand-in: {len(tokens)} rows, compiled for {self.batch_size}")
        if not mask[:, 0 if self.side == "right" else -1].all():
            raise ValueError(f"stand-in: padding is to be on the {self.side}")

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Of each row's next token, [rows, 1, vocabulary]: each row by itself, as if nothing were beside it."""
        if tokens.shape[1] >= self.length:
            raise ValueError(f"stand-in: {tokens.shape[1]} tokens and one more, compiled for {self.length}")
        rows = [self.model(row[kept.bool()][None]).logits[0, -1:] for row, kept in zip(tokens, mask, strict=True)]
        return torch.stack(rows)


class Generates:
    """Hugging Face's own generate() on a Device, for a class that is a GenerationMixin and has `device_model`."""

    device_model: Device
    chooses_itself = False  # as with on-device sampling: nobody is asked about the scores

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def generate(self, input_ids, attention_mask=None, **said):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        self.device_model.begin(input_ids, mask)
        if self.chooses_itself:
            said["logits_processor"] = None
        return super().generate(input_ids, attention_mask=mask, **said)

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **_):
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(self, input_ids, attention_mask=None, **_):
        return CausalLMOutput(logits=self.device_model.logits(input_ids, attention_mask))
