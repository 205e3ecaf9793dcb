"""Stand-in of AWS's torch_neuronx (Inf2, Trn1): TorchScript on the CPU."""

from __future__ import annotations

import torch
from stand_in_log import record
from stand_in_torch import compiled, shapes, watch_loads

watch_loads()


def trace(
    func,
    example_inputs,
    *_,
    input_output_aliases=None,
    compiler_workdir=None,
    compiler_args=None,
    partitioner_config=None,
    inline_weights_to_neff=True,
    cpu_backend=False,
) -> torch.jit.ScriptModule:
    if cpu_backend and "--target" not in str(compiler_args):
        raise ValueError("cpu_backend needs compiler_args with --target")
    examples = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else example_inputs
    record("trace", shapes=shapes(examples), compiler_args=compiler_args, cpu_backend=cpu_backend)
    return compiled(func, example_inputs)
