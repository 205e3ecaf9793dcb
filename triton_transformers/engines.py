"""Define the engines that compute models: a row for each engine of texts, and the names of those of encoders.

A new engine of texts is one row here, and the file that its row names. The row is data for every program, so this
module imports the standard library only. Triton's process imports the file when a model's folder asks for it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TextEngine:
    """An engine that continues texts."""

    name: str  # label `engine` of the metric transformers_engine
    title: str  # for people
    module: str = ""  # of the backend's class; empty: another backend than `generation` loads it
    backend: str = ""
    files: tuple[str, ...] = ()  # the weights' folder has one of them, and none of an engine before
    formats: tuple[str, ...] = ()  # values of FORMAT that make these files
    profile: str = ""  # of the only servers that have it; empty: all
    lacks: frozenset[str] = frozenset()  # options of requests that it refuses
    has_drafts: bool = False  # DRAFT
    is_continuous: bool = True  # a text joins and leaves the others between any two steps
    packages: tuple[str, ...] = ()  # that an image needs for it, beside those of all backends
    needs_torch: bool = False  # with transformers, beside the packages
    image: str = ""  # target of Dockerfile.nvidia that has it, from which nothing can be left out


OPENVINO = TextEngine(
    "openvino-genai",
    "OpenVINO GenAI",
    "serving.generation.openvino.engine",
    "GenAIGeneration",
    files=("openvino_model.xml",),
    formats=("openvino", "openvino-int4", "openvino-bf16", "openvino-fp16", "openvino-fp32"),
    profile="cpu",
    lacks=frozenset({"logit_bias"}),
    has_drafts=True,
    packages=("openvino-genai", "jinja2", "xgrammar"),  # torch brings jinja2, too
)
VLLM = TextEngine(
    "vllm",
    "vLLM",
    "serving.generation.vllm",
    "VllmGeneration",
    files=("model.json",),
    formats=("vllm",),
    profile="cuda",
    has_drafts=True,
    image="cuda-vllm",
)
TRANSFORMERS = TextEngine(
    "transformers",
    "transformers (FORMAT=python)",
    "serving.generation.batched",
    "BatchedGeneration",
    files=("model.safetensors", "model.safetensors.index.json"),
    formats=("python",),
    is_continuous=False,
    packages=("xgrammar",),
    needs_torch=True,
)
# The backend `neuron` loads models that are compiled before.
NEURON = TextEngine("neuron", "AWS Neuron", lacks=frozenset({"prompt_logprobs"}), is_continuous=False)
TEXT_ENGINES = (OPENVINO, VLLM, TRANSFORMERS, NEURON)
BY_NAME = {engine.name: engine for engine in TEXT_ENGINES}
TEXT_FORMATS = tuple(form for engine in TEXT_ENGINES for form in engine.formats)


def engine_of_folder(folder: Path) -> TextEngine | None:
    """Return the engine for which the files in this folder are made."""
    return next((own for own in TEXT_ENGINES if any((folder / file).is_file() for file in own.files)), None)


def engine_of_format(form: str) -> TextEngine | None:
    """Return the engine of texts that reads what FORMAT makes."""
    return next((own for own in TEXT_ENGINES if form in own.formats), None)


def default_engine(profile: str) -> TextEngine:
    """Return the engine for which `make models` exports a text generator by default."""
    return next(own for own in TEXT_ENGINES if own.formats and own.profile in ("", profile))


def titles(engines: Collection[TextEngine]) -> str:
    """Return the names of several engines for a sentence."""
    *most, last = (engine.title for engine in engines)
    return f"{', '.join(most)} and {last}" if most else last


# --- encoders ---------------------------------------------------------------------------------------------------------

ONNX_RUNTIME, F32, BF16 = "onnxruntime", "openvino-f32", "openvino-bf16"
# Value of the setting TRITON_ENGINE or of a model's parameter `engine` -> the engines that the model may run on.
GRAPH_CHOICES = {
    "auto": (ONNX_RUNTIME, F32, BF16),
    "openvino": (F32, BF16),
    **{name: (name,) for name in (ONNX_RUNTIME, F32, BF16)},
}
# Text encoders on PyTorch choose from these: without padding or with it, in any precision or in the named one.
FLAT, PADDED = "torch-flat", "torch-padded"
TORCH_PRECISIONS = ("f32", "bf16", "f16")
TORCH_CHOICES = (FLAT, PADDED, *(f"{form}-{precision}" for form in (FLAT, PADDED) for precision in TORCH_PRECISIONS))
ENCODER_CHOICES = (*GRAPH_CHOICES, *TORCH_CHOICES)
