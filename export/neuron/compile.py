"""Compile text encoders for AWS Neuron: one artifact per shape, and neuron.json, which lists them.

`make models PROFILE=neuron` calls this (recipes/text/recipe.py). The text_encoder.py of the backend `neuron` serves
the result.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from export.neuron.target import Target
from triton_transformers.cli import err
from triton_transformers.settings import UserError


@dataclass
class CompiledEncoder:
    """A module with one artifact for each number of rows and tokens, in the folder of a version."""

    module: torch.nn.Module
    inputs: list[str]
    target: Target
    lengths: list[int]
    folder: Path
    pad_token_id: int = 0
    files: dict[tuple[int, int], Path] = field(default_factory=dict)  # (rows, length) -> artifact

    def compile(self) -> None:
        neuron = torch_neuronx()
        shapes = [(rows, length) for length in self.lengths for rows in self.target.rows]
        for number, (rows, length) in enumerate(shapes, 1):
            start = time.monotonic()
            example = tuple(torch.ones(rows, length, dtype=torch.int64) for _ in self.inputs)
            artifact = neuron.trace(
                self.module, example, compiler_args=self.target.compiler_command, cpu_backend=not self.target.device
            )
            path = self.folder / f"model-{rows}x{length}.pt"
            torch.jit.save(artifact, path)
            self.files[rows, length] = path
            took = time.monotonic() - start
            err.print(f"compiled for {rows} x {length} tokens in {took:.0f} s ({number} of {len(shapes)})")
        listed = [
            {"rows": rows, "length": length, "file": path.name} for (rows, length), path in sorted(self.files.items())
        ]
        manifest = {"inputs": self.inputs, "shapes": listed}
        (self.folder / "neuron.json").write_text(json.dumps(manifest, indent=2) + "\n")

    def run(self, feeds: list[dict[str, Any]]) -> Iterator[list[Any]]:
        """Yield the outputs for each text. The texts take turns through the artifacts that they fit."""
        artifacts = {shape: torch.jit.load(path) for shape, path in self.files.items()}
        for number, feed in enumerate(feeds):
            length = feed[self.inputs[0]].shape[1]
            fitting = [shape for shape in artifacts if shape[1] >= length]
            rows, width = fitting[number % len(fitting)]
            fill = {"input_ids": self.pad_token_id}
            padded = [np.full((rows, width), fill.get(name, 0), np.int64) for name in self.inputs]
            for array, name in zip(padded, self.inputs, strict=True):
                array[-1, :length] = feed[name][0]
            with torch.inference_mode():
                outputs = artifacts[rows, width](*(torch.from_numpy(array) for array in padded))
            tensors = [outputs] if isinstance(outputs, torch.Tensor) else outputs
            yield [tensor[-1].float().numpy() for tensor in tensors]


@contextlib.contextmanager
def core_errors() -> Iterator[None]:
    """Explain the runtime's error when another process, mostly Triton, has the NeuronCores."""
    try:
        yield
    except RuntimeError as error:
        if "NRT" in str(error):
            reason = str(error).strip().splitlines()[-1]
            raise UserError(
                f"the NeuronCores are not available ({reason}): if Triton uses them, run `make down` first"
            ) from None
        raise


def torch_neuronx() -> Any:
    try:
        import torch_neuronx
    except ImportError as error:
        raise UserError(
            f"PROFILE=neuron compiles with torch_neuronx, which cannot be imported here ({error}): set RUNTIME=docker, "
            "whose image has it"
        ) from None
    return torch_neuronx
