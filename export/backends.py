"""Find the Triton backend that each model runs on."""

from __future__ import annotations

from pathlib import Path

from export.record import models_of
from triton_transformers.engines import TRANSFORMERS, TextEngine, default_engine, engine_of_folder
from triton_transformers.model_config import load_config

# A platform without a backend: Triton itself runs the steps.
ENSEMBLE = "ensemble"
# Triton's older names for some backends.
PLATFORMS = {
    "libtorch": "pytorch",
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_libtorch": "pytorch",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
    "tensorrt_plan": "tensorrt",
    "torch_aoti": "pytorch",
}
# The backend that Triton chooses if the configuration names none: by the file in the version's folder, in this order.
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
# The backend that continues texts.
GENERATION = "generation"
# The folder of the part that reads images, on transformers, beside a language part on OpenVINO GenAI.
VISION = "vision"


def needed(systems: list[str], repository: Path, profile: str = "") -> set[str]:
    """Return the backends of the models that `make package` would pack."""
    return set(by_model(systems, repository, profile).values()) - {ENSEMBLE, ""}


def engines(systems: list[str], repository: Path, profile: str = "") -> set[TextEngine]:
    """Return the engines that continue the texts of the systems. Until `make models`, assume the profile's default."""
    models = [model for model, backend in by_model(systems, repository, profile).items() if backend == GENERATION]
    folders = {load_config(model, repository, profile).parameters.get("weights", model) for model in models}
    versions = {folder: [*(repository / folder).glob("*/")] for folder in folders}
    found = {
        next(filter(None, map(engine_of_folder, own)), None) or default_engine(profile) for own in versions.values()
    }
    if any((version / VISION).exists() for own in versions.values() for version in own):
        found.add(TRANSFORMERS)
    return found


def by_model(systems: list[str], repository: Path, profile: str = "") -> dict[str, str]:
    models = {model for name in systems for model in models_of(name, repository)}
    return {model: backend_of(model, repository, profile) for model in sorted(models)}


def backend_of(model: str, repository: Path, profile: str = "") -> str:
    """Return the model's backend, or "" if Triton could not choose one either."""
    config = load_config(model, repository, profile)
    if config.backend:
        return config.backend
    if config.platform:
        return PLATFORMS.get(config.platform, config.platform)
    if config.default_model_filename:
        return FILES.get(config.default_model_filename, "")
    return next((backend for file, backend in FILES.items() if any((repository / model).glob(f"*/{file}"))), "")
