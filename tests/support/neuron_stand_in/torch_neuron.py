"""Stand-in of AWS's torch_neuron (Inf1): TorchScript on the CPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch
from stand_in_log import core_count, record
from stand_in_torch import compiled, shapes, watch_loads

watch_loads()


def trace(func, example_inputs, **options) -> torch.jit.ScriptModule:
    examples = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else example_inputs
    record("trace", shapes=shapes(examples))
    return compiled(func, example_inputs)


class DataParallel(torch.nn.Module):
    """Splits inputs along `dim` over the cores, and joins the outputs.

    The real one also takes chunks of other sizes than the compiled one, for models that can do that. This one passes
    the chunk on unchanged, so that a test notices a wrong size.
    """

    def __init__(self, model: torch.jit.ScriptModule, device_ids: list | None = None, dim: int = 0) -> None:
        super().__init__()
        self.model = model
        self.device_ids = list(range(core_count() or 1)) if device_ids is None else list(device_ids)
        self.dim = dim
        self.num_workers = 2 * len(self.device_ids)
        self.split_size: int | None = None
        self.dynamic_batching = dim == 0
        cores = [int(str(core).rpartition(":")[2]) for core in self.device_ids]
        if not cores or (core_count() is not None and max(cores) >= core_count()):
            raise ValueError(f"device_ids {self.device_ids} of {core_count()} cores")
        record("DataParallel", device_ids=self.device_ids, dim=dim)

    def disable_dynamic_batching(self) -> None:
        self.dynamic_batching = False

    def forward(self, *inputs: torch.Tensor):
        rows = inputs[0].shape[self.dim]
        size = self.split_size or max(1, rows // len(self.device_ids))
        if not self.dynamic_batching and size * len(self.device_ids) != rows:
            raise ValueError(f"{rows} rows for {len(self.device_ids)} cores, without dynamic batching")
        chunks = list(zip(*(tensor.split(size, self.dim) for tensor in inputs), strict=True))
        record("scatter", shapes=shapes(inputs), chunks=len(chunks), num_workers=self.num_workers)
        with ThreadPoolExecutor(self.num_workers) as pool:
            return self.gather(list(pool.map(lambda chunk: self.model(*chunk), chunks)))

    def gather(self, outputs: list):
        first = outputs[0]
        if isinstance(first, torch.Tensor):
            return torch.cat(outputs, self.dim)
        if isinstance(first, dict):
            return {key: self.gather([output[key] for output in outputs]) for key in first}
        return tuple(self.gather(list(parts)) for parts in zip(*outputs, strict=True))


# AWS documents them as torch.neuron.*; using them as torch_neuron.* must fail.
torch.neuron = SimpleNamespace(DataParallel=DataParallel, trace=trace)
del DataParallel, trace
