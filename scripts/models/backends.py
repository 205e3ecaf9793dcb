"""Which of Triton's backends a model runs on, as its config.pbtxt says, or its files where that does not."""

from __future__ import annotations

import re
from pathlib import Path

from scripts.common.model_config import COMMENT, config_of
from scripts.models.assemble import CONFIGS, models_of

SAID = re.compile(r"""^\s*(backend|platform|default_model_filename)\s*:\s*["']([^"']+)""", re.MULTILINE)
# A platform that has no backend: Triton itself.
ENSEMBLE = "ensemble"
# Triton's names for what has a backend of another name.
PLATFORMS = {
    "libtorch": "pytorch",
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_libtorch": "pytorch",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
    "tensorrt_plan": "tensorrt",
    "torch_aoti": "pytorch",
}
# What Triton takes a model for that does not say: by the file in its version, in this order.
FILES = {
    "model.savedmodel": "tensorflow",
    "model.graphdef": "tensorflow",
    "model.plan": "tensorrt",
    "model.onnx": "onnxruntime",
    "model.xml": "openvino",
    "model.pt": "pytorch",
    "model.pt2": "pytorch",
    "model.py": "python",
}


def needed(systems: list[str], repository: Path) -> set[str]:
    """By all models that `make package` would pack."""
    return set(by_model(systems, repository).values()) - {ENSEMBLE, ""}


def by_model(systems: list[str], repository: Path) -> dict[str, str]:
    models = {model for name in systems for model in models_of(name, repository)}
    return {model: backend_of(model, repository) for model in sorted(models)}


def backend_of(model: str, repository: Path) -> str:
    """Empty: Triton would not know it either."""
    config = config_of(model, repository, CONFIGS)
    said = dict(SAID.findall(COMMENT.sub("", config.read_text()))) if config else {}
    if "backend" in said:
        return said["backend"]
    if "platform" in said:
        return PLATFORMS.get(said["platform"], said["platform"])
    if "default_model_filename" in said:
        return FILES.get(said["default_model_filename"], "")
    return next((backend for file, backend in FILES.items() if any((repository / model).glob(f"*/{file}"))), "")
