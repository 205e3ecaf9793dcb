"""Refuse a model that cannot be served right, before anything is exported: what it is, and what to do instead."""

from __future__ import annotations

import json
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from scripts.common.settings import UserError
from scripts.models.tasks import task_of_architecture

LIST = "docs/models.md lists what is served"
# A file that only folders of this kind have -> what such a folder is.
FILES = {
    "adapter_config.json": (
        "a PEFT adapter (LoRA, ...) without its base model: load it with peft, call merge_and_unload() and "
        "save_pretrained(folder), and set SOURCE=folder"
    ),
    "quantize_config.json": "quantized (GPTQ): name the model that it was made from",
    "model_index.json": f"a pipeline of diffusers, which is not served here; {LIST}",
}
ENCODER_DECODER = "needs an encoder-decoder, which is not served here: choose a model for TASK=text-generation"
# The end of an architecture's name -> what such a model does.
ARCHITECTURES = {
    "ColBERT": "returns a vector for each token in ColBERT's way, with markers, masks and a projection of its own",
    "ForAudioClassification": "classifies sound",
    "ForCTC": "transcribes speech",
    "ForConditionalGeneration": "generates text from images, sound or other text",
    "ForImageTextToText": "generates text from images",
    "ForMultipleChoice": "chooses one of several texts",
    "ForObjectDetection": "finds objects in images",
    "ForRetrieval": "returns several vectors for each page",
    "ForSemanticSegmentation": "labels each pixel of an image",
    "ForSpeechSeq2Seq": "transcribes speech",
    "ForUniversalSegmentation": "labels each pixel of an image",
}
# The tasks of the Hub that users may expect -> what to do instead.
TASKS = {
    "automatic-speech-recognition": f"is not served here; {LIST}",
    "image-to-text": f"is not served here; {LIST}",
    "summarization": ENCODER_DECODER,
    "text2text-generation": ENCODER_DECODER,
    "translation": ENCODER_DECODER,
    "zero-shot-classification": (
        "is served as text-classification: set that, and send each hypothesis as text_pair (docs/models.md)"
    ),
    "zero-shot-image-classification": (
        "is served as two systems: set TASK=image-feature-extraction for one, TASK=sentence-similarity for the other"
    ),
}
# The modules of sentence-transformers that are served, by the kind of the model.
MODULES = {
    "SentenceTransformer": {"Transformer", "Pooling", "Dense", "LayerNorm", "Normalize", "Dropout"},
    "SparseEncoder": {"Transformer", "MLMTransformer", "SpladePooling"},
    "CrossEncoder": {"Transformer", "LogitScore", "Dense"},
}
# Tasks that any model can do without its head, and those that share one head.
HEADLESS = ("feature-extraction", "sentence-similarity", "image-feature-extraction")
SAME_HEAD = (
    {"text-classification", "text-ranking"},
    {"fill-mask", "sparse-embedding"},
    {"text-generation", "gpt2"},
    {"text-generation", "text-ranking"},  # the exporter refuses these too, and explains how to convert them
)
# The types of models of texts and images, and the tasks for which one half of them is served.
HALVES = {"clip": ("image-feature-extraction", "sentence-similarity"), "siglip": ("image-feature-extraction",)}
TOKENIZER = ("tokenizer*.json", "vocab.*", "*.model", "*.tiktoken")
IMAGE_PROCESSOR = ("preprocessor_config.json", "processor_config.json")


def check_task_name(task: str) -> None:
    """Raise for a task of the Hub that is served in another way, or not at all."""
    if task in TASKS:
        raise UserError(f"TASK={task} {TASKS[task]}")


def check_files(name: str, files: Iterable[str]) -> None:
    """Raise if the names of the files show that this is no model."""
    names = set(files)
    for file, kind in FILES.items():
        if file in names:
            raise UserError(f"{name} is {kind}")
    if any(fnmatch(file, "*.gguf") for file in names) and not any(fnmatch(file, "*.safetensors") for file in names):
        raise UserError(f"{name} has its weights as GGUF: name the model that they were converted from")


def check_model(name: str, weights: Path, trust_remote_code: bool) -> None:
    """Raise if the model in this folder is of a kind that is not served, whatever the task."""
    check_files(name, (path.name for path in weights.iterdir()))
    config = read_json(name, weights / "config.json")
    architecture = next(iter(config.get("architectures") or []), "")
    if "model_type" not in config:
        raise UserError(
            f"{name} is no model of transformers: its config.json names no model_type. Name a folder that "
            "save_pretrained wrote"
        )
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else ""
        raise UserError(
            f"{name} is quantized ({method or 'an unknown method'}), and only weights in full "
            "precision are served: name the model that it was made from (FORMAT=onnx-int8 quantizes encoders here)"
        )
    if config.get("is_encoder_decoder") and not architecture.endswith("T5EncoderModel"):
        raise UserError(
            f"{name} is an encoder-decoder ({architecture or config['model_type']}), which is not served here: choose "
            "an encoder such as BERT to classify texts, or a decoder such as Llama to generate them"
        )
    for ending, purpose in ARCHITECTURES.items():
        if architecture.endswith(ending):
            raise UserError(f"{name} is a {architecture}, which {purpose}; that is not served here ({LIST})")
    if (weights / "modules.json").exists():
        check_modules(name, weights)
    if not trust_remote_code and needs_code(config):
        raise UserError(
            f"{name} brings its own code, which can do whatever you can: set TRUST_REMOTE_CODE=1 if you trust it"
        )


def check_modules(name: str, weights: Path) -> None:
    """Raise if sentence-transformers runs more than we do."""
    try:
        types = [module["type"] for module in json.loads((weights / "modules.json").read_text(encoding="utf-8"))]
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{name}: modules.json lists no modules. Name a folder that save_pretrained wrote") from None
    if any(module.startswith("pylate.") for module in types):
        raise UserError(
            f"{name} is a ColBERT of PyLate, which {ARCHITECTURES['ColBERT']}; that is not served here ({LIST})"
        )
    own = weights / "config_sentence_transformers.json"
    kind = read_json(name, own).get("model_type", "SentenceTransformer")
    unknown = [module.rpartition(".")[2] for module in types if module.startswith("sentence_transformers.")]
    unknown = [module for module in unknown if module not in MODULES.get(kind, ())]
    if unknown:
        raise UserError(f"{name} is a {kind} of {', '.join(unknown)}, which is not served here ({LIST})")


def check_task(name: str, weights: Path, task: str) -> None:
    """Raise if the model, or a file that turns the task's inputs into tensors, does not fit the task."""
    config = read_json(name, weights / "config.json")
    kind = config["model_type"]
    own_tasks = {task_of_architecture(architecture) for architecture in config.get("architectures") or []}
    is_whole = config.keys() >= {"text_config", "vision_config"} and task not in own_tasks
    if is_whole and task not in (served := HALVES.get(kind, ())):
        instead = f"set TASK={' or TASK='.join(served)}" if served else LIST
        raise UserError(f"{name} is a model of texts and images ({kind}), which is not served as {task}: {instead}")
    for architecture in config.get("architectures") or []:
        own = task_of_architecture(architecture)
        if architecture.endswith("T5EncoderModel") and task != "sentence-similarity":
            raise UserError(f"{name} is a {architecture}, which is served as TASK=sentence-similarity only")
        # Weights of another head can have the right names and shapes, and then they load without an error.
        if own not in ("", task) and task not in HEADLESS and {own, task} not in SAME_HEAD:
            raise UserError(f"{name} is a {architecture}, which is for TASK={own} and not for TASK={task}")
    files = [path.name for path in weights.iterdir()]
    is_vision = task.startswith("image-")
    patterns, noun = (IMAGE_PROCESSOR, "image processor") if is_vision else (TOKENIZER, "tokenizer")
    if not any(fnmatch(file, pattern) for file in files for pattern in patterns):
        file = patterns[0].replace("*", "")
        raise UserError(f"{name} has no {noun} ({file}), which TASK={task} requires: set another TASK ({LIST})")
    if is_vision and "sampling_rate" in read_json(name, weights / "preprocessor_config.json"):
        raise UserError(f"{name} takes sound, which is not served here")


def needs_code(config: dict[str, Any]) -> bool:
    """Return whether transformers does not know the model, but the folder names code that does."""
    if "auto_map" not in config:
        return False
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return config["model_type"] not in CONFIG_MAPPING_NAMES


def read_json(name: str, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise UserError(f"{name}: {path.name} is not a JSON object. Name a folder that save_pretrained wrote")
    return content
