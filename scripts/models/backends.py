"""Which of Triton's backends a model runs on, as its config.pbtxt says, or its files where that does not."""

from __future__ import annotations

import re
from pathlib import Path

from scripts.models.repository import CONFIGS, models_of
from scripts.models.served import COMMENT, config_of

SAID = re.compile(r"""^\s*(backend|platform)\s*:\s*["']([^"']+)""", re.MULTILINE)
PLATFORMS = {"onnxruntime_onnx": "onnxruntime", "ensemble": ""}
# What Triton takes a model for that does not say: by the file in its version.
FILES = {"model.onnx": "onnxruntime", "model.py": "python"}


def needed(systems: list[str], repository: Path) -> set[str]:
    """By all models that `make package` would pack."""
    models = {model for name in systems for model in models_of(name, repository)}
    return {backend for model in models if (backend := backend_of(model, repository))}


def backend_of(model: str, repository: Path) -> str:
    """Empty: an ensemble, which has none."""
    config = config_of(model, repository, CONFIGS)
    said = dict(SAID.findall(COMMENT.sub("", config.read_text()))) if config else {}
    if "backend" in said:
        return said["backend"]
    if "platform" in said:
        return PLATFORMS.get(said["platform"], said["platform"])
    return next((backend for file, backend in FILES.items() if any((repository / model).glob(f"*/{file}"))), "")
