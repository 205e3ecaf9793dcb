"""LoRA adapters of a language model, as `make add ADAPTERS=...` puts them beside its weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.triton.types import BadRequest
from triton_transformers.errors import UNKNOWN_ADAPTER

if TYPE_CHECKING:
    import torch

FOLDER, CONFIG, WEIGHTS = "adapters", "adapter_config.json", "adapter_model.safetensors"


def adapter_names(weights: Path) -> list[str]:
    """Return the names of the adapters that are in place now."""
    return sorted(path.parent.name for path in (weights / FOLDER).glob(f"*/{WEIGHTS}"))


def check_adapter(name: str, names: Collection[str]) -> None:
    if name not in names:
        others = f"it has {', '.join(names)}" if names else "it has none"
        raise BadRequest(
            f"option 'lora_name': this model has no adapter '{name}'; {others}", "lora_name", code=UNKNOWN_ADAPTER
        )


class AdapterFiles:
    """The adapters of a folder, which may change while the model is served."""

    def __init__(self, weights: Path) -> None:
        self.weights = weights
        self.loaded: dict[str, tuple[int, Any]] = {}  # by name, with the time of the file

    def find(self, name: str) -> Any:
        """Return the adapter. Load it if it is new or replaced, and forget those that are gone."""
        names = adapter_names(self.weights)
        self.loaded = {own: adapter for own, adapter in self.loaded.items() if own in names}
        check_adapter(name, names)
        folder = self.weights / FOLDER / name
        changed = (folder / WEIGHTS).stat().st_mtime_ns
        if self.loaded.get(name, (0, None))[0] != changed:
            self.loaded[name] = changed, self.load(folder)
        return self.loaded[name][1]

    def load(self, folder: Path) -> Any:
        return read_matrices(folder)


def read_matrices(folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the matrices A and B of each layer that an adapter changes."""
    from safetensors.torch import load_file

    tensors = load_file(folder / WEIGHTS)
    return {
        name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"): (
            tensors[name],
            tensors[name.replace(".lora_A.", ".lora_B.")],
        )
        for name in tensors
        if name.endswith(".lora_A.weight")
    }


@contextmanager
def adapted(network: torch.nn.Module, adapters: Sequence[Any]) -> Iterator[None]:
    """Let each row of a batch have the change of its adapter, which AdapterFiles found, or none."""
    import torch

    distinct = list({id(adapter): adapter for adapter in adapters if adapter}.values())
    hooks = []
    for layer in dict.fromkeys(layer for adapter in distinct for layer in adapter):
        module: Any = network.get_submodule(layer)
        parts = [(adapter, *adapter[layer]) for adapter in distinct if layer in adapter]
        down, up = torch.cat([down for _, down, _ in parts]), torch.cat([up for _, _, up in parts], 1)
        mask = torch.tensor([[row is own for own, down, _ in parts for _ in down] for row in adapters])
        down, up, mask = (tensor.to(module.weight.device, module.weight.dtype) for tensor in (down, up, mask))
        hooks.append(module.register_forward_hook(partial(add_change, down, up, mask)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def add_change(
    down: torch.Tensor, up: torch.Tensor, mask: torch.Tensor, _: Any, args: tuple[torch.Tensor], output: torch.Tensor
) -> torch.Tensor:
    inner = args[0] @ down.T
    inner = (inner.reshape(len(mask), -1, inner.shape[-1]) * mask[:, None]).reshape(inner.shape)
    return output + inner @ up.T
