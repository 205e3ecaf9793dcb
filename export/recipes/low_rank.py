"""Add LoRA adapters to a network, so that each row of a batch may take another one: number 0 stands for none."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn import Embedding, Linear, functional
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from export.checkpoint.adapters import INSTEAD, WEIGHTS, read_options
from triton_transformers.settings import UserError

# The graph's input with the number of each row's adapter, at every token of the row.
ADAPTER = "adapter"
# The end of a tensor's name in an adapter's file -> whether it is the matrix A, which comes first.
MATRICES = {".lora_A.weight": True, ".lora_B.weight": False, ".lora_embedding_A": True, ".lora_embedding_B": False}


@dataclass
class AdaptedLayer:
    """A layer, and the matrices of all its adapters side by side: `owners` has the adapter of each column."""

    layer: Any
    down: torch.Tensor  # [rank, inputs]
    up: torch.Tensor  # [outputs, rank], with the scale of each adapter
    owners: tuple[int, ...]

    def __post_init__(self) -> None:
        self.own = self.layer.weight.data

    def merge(self, number: int) -> None:
        """Let the layer have the weights that this adapter makes of its own."""
        columns = torch.tensor(self.owners) == number
        change = self.up[:, columns] @ self.down[columns]
        if columns.any():
            self.layer.weight.data = self.own + (change.T if isinstance(self.layer, Embedding) else change)
        else:
            self.layer.weight.data = self.own


class Adapters:
    """The adapters of a network, in folders as peft saves them."""

    def __init__(self, name: str, network: Any, folders: list[Path]) -> None:
        self.merged = 0
        self.masks: dict[tuple[int, ...], torch.Tensor] = {}
        parts: dict[str, list[tuple[int, torch.Tensor, torch.Tensor]]] = defaultdict(list)
        for number, folder in enumerate(folders, start=1):
            for layer, (down, up) in matrices(f"{name}: the adapter in {folder.name}", network, folder).items():
                parts[layer].append((number, down, up))
        self.layers = [
            AdaptedLayer(
                network.get_submodule(layer),
                torch.cat([down for _, down, _ in own]),
                torch.cat([up for _, _, up in own], dim=1),
                tuple(number for number, down, _ in own for _ in down),
            )
            for layer, own in parts.items()
        ]

    def merge(self, number: int) -> None:
        """Let the network compute as this adapter and nothing else makes it, which is the reference."""
        if number != self.merged:
            for adapted in self.layers:
                adapted.merge(number)
            self.merged = number

    def install(self) -> None:
        """Let each layer add the change that the adapter of the row makes. `choose` sets the adapters of a run."""
        self.merge(0)
        for adapted in self.layers:
            is_table = isinstance(adapted.layer, Embedding)
            adapted.layer.register_buffer("adapters_down", adapted.down.T.contiguous() if is_table else adapted.down)
            adapted.layer.register_buffer("adapters_up", adapted.up)
            adapted.layer.register_forward_hook(self.hook(adapted.owners))

    def choose(self, numbers: torch.Tensor) -> None:
        """Set the adapter of each row of the next run: [rows, 1]."""
        layouts = {adapted.owners for adapted in self.layers}
        self.masks = {owners: (torch.tensor(owners) == numbers).float() for owners in layouts}

    def hook(self, owners: tuple[int, ...]) -> Any:
        def add(layer: Any, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
            transform = functional.embedding if isinstance(layer, Embedding) else functional.linear
            inner, mask = transform(args[0], layer.adapters_down), self.masks[owners]
            while mask.ndim < inner.ndim:
                mask = mask.unsqueeze(1)
            return output + functional.linear(inner * mask, layer.adapters_up)

        return add


def matrices(
    adapter: str, network: Any, folder: Path, kinds: tuple[type, ...] = (Linear, Embedding)
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the matrices A and B of each layer that an adapter changes, B with the adapter's scale.

    Raise UserError, which names the adapter so, if it changes anything but layers of these kinds.
    """
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{adapter} has no {WEIGHTS}: save it with save_pretrained of peft")
    options, pairs = read_options(adapter, folder), defaultdict[str, dict[bool, torch.Tensor]](dict)
    renamings = [one for one in get_model_conversion_mapping(network) if isinstance(one, WeightRenaming)]
    keys, own, scales = network.base_model_prefix, network.state_dict(), {}
    try:
        tensors = load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise UserError(f"{adapter}: {WEIGHTS} is damaged ({error}): download it again") from None
    for key, tensor in tensors.items():
        ending = next((ending for ending in MATRICES if key.endswith(ending)), "")
        stored = key.removesuffix(ending).removeprefix("base_model.model.")
        weight, _ = rename_source_key(f"{stored}.weight", renamings, [], keys, own)
        layer = weight.removesuffix(".weight")
        if not ending or weight not in own or not isinstance(network.get_submodule(layer), kinds):
            names = " or ".join(kind.__name__.lower() for kind in kinds)
            network_name = type(network).__name__
            raise UserError(f"{adapter} has '{key}', which changes no {names} layer of {network_name}: {INSTEAD}")
        if MATRICES[ending] in pairs[layer]:
            raise UserError(f"{adapter} has '{key}' twice, under different names: save it with save_pretrained of peft")
        pairs[layer][MATRICES[ending]] = tensor.float()
        patterns = (options.get("alpha_pattern") or {}).items()
        scales[layer] = next((alpha for end, alpha in patterns if re.match(rf"(.*\.)?({end})$", stored)), None)
    return {layer: scaled(adapter, options, own, layer, pairs[layer], scales[layer]) for layer in pairs}


def scaled(
    adapter: str,
    options: dict[str, Any],
    own: dict[str, torch.Tensor],
    layer: str,
    pair: dict[bool, torch.Tensor],
    alpha: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both matrices of a layer. Raise if they do not fit it, or each other."""
    down, up = pair.get(True, torch.empty(0)), pair.get(False, torch.empty(0))
    rank = options.get("r", 8) if not options.get("rank_pattern") else len(down)
    shape = tuple(own[f"{layer}.weight"].shape)
    if (*up.shape, *down.shape) not in ((shape[0], rank, rank, shape[1]), (shape[1], rank, rank, shape[0])):
        raise UserError(f"{adapter} does not fit '{layer}' of its model, or its own options: download both again")
    alpha = options.get("lora_alpha", 8) if alpha is None else alpha
    try:
        scale = float(alpha / (math.sqrt(rank) if options.get("use_rslora") else rank))
    except (TypeError, ValueError, ZeroDivisionError):
        raise UserError(
            f"{adapter} has r={rank} and lora_alpha={alpha} for '{layer}': both must be numbers above 0"
        ) from None
    up = up * scale
    if not (math.isfinite(scale) and down.isfinite().all() and up.isfinite().all()):
        raise UserError(
            f"{adapter} has infinite or undefined numbers for '{layer}': download it again, or train it anew"
        )
    return down, up
