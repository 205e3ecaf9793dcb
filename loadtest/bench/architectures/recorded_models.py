"""Write small checkpoints as an earlier release of transformers wrote them, without that release.

recorded/transformers-<release>.json has the files beside the weights, and the names and shapes of the weights. The
values are random again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from loadtest.bench.architectures.small_models import SPREAD, SmallModel

RECORDED = Path(__file__).parent / "recorded"


@dataclass(frozen=True, eq=False)
class RecordedModel(SmallModel):
    files: dict[str, Any] = field(default_factory=dict)  # the content of each file of JSON
    weights: dict[str, dict[str, list[int]]] = field(default_factory=dict)  # the shapes, by file and name

    def save(self, folder: Path) -> Path:
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        generator = torch.Generator().manual_seed(5)
        for name, shapes in self.weights.items():
            tensors = {key: random_weight(key, shape, generator) for key, shape in shapes.items()}
            save_file(tensors, folder / name, {"format": "pt"})
        return folder


def random_weight(name: str, shape: list[int], generator: torch.Generator) -> torch.Tensor:
    """Return values as in a trained model: those of a norm vary about 1, all others about 0."""
    values = torch.randn(shape, generator=generator) * SPREAD
    return 1 + values / 3 if len(shape) == 1 and name.endswith("weight") else values


def recorded_models(release: str) -> list[RecordedModel]:
    content = json.loads((RECORDED / f"transformers-{release}.json").read_text(encoding="utf-8"))
    rows = []
    for row in content["rows"]:
        files = row.pop("files")
        if "tokenizer.json" in files:  # several rows have the same
            files["tokenizer.json"] = content["tokenizers"][files["tokenizer.json"]]
        rows.append(RecordedModel(**row, files=files, saved_by=release))
    return rows
