"""The common part of torch_neuron and torch_neuronx: a compiled model is TorchScript that takes one shape."""

from __future__ import annotations

import itertools
import os

import torch
from stand_in_log import core_count, record, take_cores

_load = torch.jit.load
_loads = itertools.count()


def watch_loads() -> None:
    """Make torch.jit.load() record what it loads and onto which core, and the model record its runs."""
    torch.jit.load = load


def load(f, *args, **options) -> torch.jit.ScriptModule:
    take_cores()
    model = _load(f, *args, **options)
    number = next(_loads)
    core = number % (core_count() or 1)
    record("load", path=os.fspath(f) if isinstance(f, (str, os.PathLike)) else None, load=number, core=core)

    def record_run(_, inputs) -> None:
        record("run", load=number, core=core, shapes=shapes(inputs))

    # ScriptModule's own method refuses hooks.
    torch.nn.Module.register_forward_pre_hook(model, record_run)
    return model


def shapes(tensors) -> list[list[int]]:
    return [list(tensor.shape) for tensor in tensors]


def compiled(function, example_inputs) -> torch.jit.ScriptModule:
    """Trace the function, and add a check to the script that refuses other shapes and types than the examples'."""
    examples = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else tuple(example_inputs)
    with torch.no_grad():
        traced = torch.jit.trace(function, examples, strict=False, check_trace=False)
    holder = torch.nn.Module()
    holder.traced = traced
    script = torch.jit.script(holder)
    names = [f"input_{i}" for i in range(len(examples))]
    lines = [f"def forward(self, {', '.join(names)}):"]
    for name, example in zip(names, examples, strict=True):
        refusal = f"compiled for {list(example.shape)} of {example.dtype}, given "
        lines.append(f"    if list({name}.shape) != {list(example.shape)} or {name}.dtype != {example.dtype}:")
        lines.append(f'        raise ValueError("{refusal}" + str({name}.shape))')
    lines.append(f"    return self.traced({', '.join(names)})")
    script.define("\n".join(lines) + "\n")
    return script.eval()
