"""Find a model's task from its files."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from export.checkpoint.adapters import adapter_folders
from export.checkpoint.pipelines import DOCUMENTS, DONUT, IMAGES_TO_TEXTS, pipeline_tasks_of
from triton_transformers.settings import UserError
from triton_transformers.tasks.table import TASKS

LIST = "docs/models.md lists what is served"
# The names under which sentence-transformers and PyLate save multi-vector models.
MULTI_VECTOR_CLASSES = ("MultiVectorEncoder", "ColBERT")
# The heads of BGE-M3, beside the weights of its encoder.
HEADS = ("sparse_linear.safetensors", "colbert_linear.safetensors")
# The files that turn inputs into tensors.
TOKENIZER = ("tokenizer*.json", "vocab.*", "*.model", "*.tiktoken")
IMAGE_PROCESSOR = ("preprocessor_config.json", "processor_config.json")
# The task of a model that turns texts and images into vectors of one space, and the tasks that one half of it is for.
TEXT_IMAGE = "text-image-similarity"
HALF_TASKS = ("sentence-similarity", "image-feature-extraction")
# The methods of a model for texts and images that turn each kind into vectors of one space.
TEXT_FEATURES, IMAGE_FEATURES = "get_text_features", "get_image_features"
# The task of a model that answers chats with images.
IMAGE_TEXT = "image-text-to-text"
# The modules of sentence-transformers that are a model of transformers, and the first ones that are not.
TRANSFORMERS = ("Transformer", "MLMTransformer")
WITHOUT_CONFIG = ("Router", "StaticEmbedding", "SparseStaticEmbedding")
# The exceptions of modules_of() for a malformed file.
MALFORMED = (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError)


def task_of_architecture(name: str) -> str:
    """Return the task, or "" if the name has no known ending."""
    return next((task for task, row in TASKS.items() if row.heads and name.endswith(row.heads)), "")


def architectures_of(config: dict[str, Any]) -> list[str]:
    """Return the architectures that config.json names."""
    names = config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def is_vision(task: str) -> bool:
    """Return whether the task's only inputs are images."""
    return task.startswith("image-") and task != IMAGE_TEXT


def processors_of(task: str) -> dict[str, tuple[str, ...]]:
    """Return the processors that turn the task's inputs into tensors, each with the names of its files."""
    processors: dict[str, tuple[str, ...]] = {"tokenizer": TOKENIZER} if not is_vision(task) else {}
    if is_vision(task) or task in (TEXT_IMAGE, IMAGE_TEXT):
        processors["image processor"] = IMAGE_PROCESSOR
    return processors


def has_files(patterns: tuple[str, ...], weights: Path) -> bool:
    return any(fnmatch(path.name, pattern) for path in weights.iterdir() for pattern in patterns)


def has_files_for(task: str, weights: Path) -> bool:
    """Return whether the folder has the files of all the task's processors."""
    return all(has_files(patterns, weights) for patterns in processors_of(task).values())


def is_of_two_halves(config: dict[str, Any]) -> bool:
    """Return whether the model is one for texts beside one for images."""
    return config.keys() >= {"text_config", "vision_config"}


def encodes_texts_and_images(architecture: str) -> bool:
    """Return whether an architecture of transformers turns texts and images into vectors of one space."""
    import transformers

    network = getattr(transformers, architecture, None)
    return hasattr(network, TEXT_FEATURES) and hasattr(network, IMAGE_FEATURES)


def pipelines_of(config: dict[str, Any]) -> list[str]:
    """Return the tasks of the pipelines that take the model, the likeliest first."""
    name, kind = next(iter(architectures_of(config)), ""), config.get("model_type")
    tasks = pipeline_tasks_of(name, kind) if isinstance(kind, str) else []
    encoder = config.get("encoder")
    if name == IMAGES_TO_TEXTS and (not isinstance(encoder, dict) or encoder.get("model_type") != DONUT):
        tasks = [task for task in tasks if task != DOCUMENTS]
    tuned_for = list(config.get("task_specific_params") or ())
    return sorted(tasks, key=lambda task: [task] != tuned_for)


def pipeline_task(config: dict[str, Any]) -> str:
    return next(iter(pipelines_of(config)), "")


def needs_pipeline(task: str, config: dict[str, Any]) -> bool:
    """Return whether only transformers' pipeline serves the model for this task: faster formats take other models."""
    row = TASKS.get(task)
    if row is None or not row.is_faster_elsewhere:
        return row is not None and bool(row.fields)
    known = any(task_of_architecture(name) == task for name in architectures_of(config))
    return task in pipelines_of(config) and (bool(config.get("is_encoder_decoder")) or not known)


def type_of_architecture(name: str) -> str:
    """Return the model_type of an architecture of transformers, or "" for the name of another."""
    import transformers

    return getattr(getattr(getattr(transformers, name, None), "config_class", None), "model_type", "")


def takes_images(architecture: str) -> bool:
    """Return whether an architecture of transformers takes images and no texts."""
    import transformers

    return getattr(getattr(transformers, architecture, None), "main_input_name", "") == "pixel_values"


def sees(architecture: str) -> bool:
    """Return whether an architecture of transformers takes images, perhaps beside texts."""
    import transformers

    network: Any = getattr(transformers, architecture, None)
    inputs = inspect.signature(network.forward).parameters if hasattr(network, "forward") else ()
    return not {"pixel_values", "image_patches"}.isdisjoint(inputs)


def task_of(weights: Path, name: str = "the model") -> str:
    """Return the task of a model in a folder that save_pretrained wrote."""
    config = read_config(weights)
    architectures = architectures_of(config)
    if is_cross_encoder(weights, config):  # one with several labels ranks nothing
        has_head = any(name.endswith("ForSequenceClassification") for name in architectures)
        return "text-classification" if has_head and label_count(config) > 1 else "text-ranking"
    if any(map(encodes_texts_and_images, architectures)):
        return TEXT_IMAGE
    if all((weights / name).exists() for name in HEADS):
        return "hybrid-embedding"
    if is_multi_vector(weights, config):
        return "multi-vector-embedding"
    if (weights / "modules.json").exists():
        return "sparse-embedding" if library_class(weights) == "SparseEncoder" else "sentence-similarity"
    likely = pipeline_task(config)
    # GIT's name ends as that of a model of texts.
    if likely and (not TASKS[likely].is_faster_elsewhere or (likely == IMAGE_TEXT and any(map(sees, architectures)))):
        return likely
    for architecture in architectures:
        if task := task_of_architecture(architecture):
            return task
    if likely:
        return likely
    if is_of_two_halves(config):
        kind = config["model_type"]
        raise UserError(f"{name} is for texts and images together ({kind}), which is not served here ({LIST})")
    has_images = any(map(takes_images, architectures)) or has_files_for("image-feature-extraction", weights)
    for architecture in architectures:
        if architecture.endswith("ModelWithProjection"):  # one half of CLIP
            return "image-feature-extraction" if has_images else "sentence-similarity"
        if architecture.endswith("Model"):
            encodes = "sentence-similarity" if adapter_folders(weights) else "feature-extraction"
            return "image-feature-extraction" if has_images else encodes
    named = f"is a {architectures[0]}, and no task is for its head" if architectures else "names no architecture"
    ways = [
        f"TASK={task}" for task in ("feature-extraction", "image-feature-extraction") if has_files_for(task, weights)
    ]
    instead = f"set {' or '.join(ways)} to serve it without a head, or choose another model" if ways else LIST
    raise UserError(f"{name} {named}: {instead}")


def is_cross_encoder(weights: Path, config: dict[str, Any]) -> bool:
    """Return whether sentence-transformers wrote the model as a CrossEncoder, in the form of any of its releases.

    A sequence classifier with one label is one too, unless its config.json states that it is a regression: most
    rerankers of other libraries state nothing.
    """
    if (weights / "modules.json").exists():
        return library_class(weights) == "CrossEncoder"
    if not any(name.endswith("ForSequenceClassification") for name in architectures_of(config)):
        return False
    saved_by_library = config.keys() & {"sentence_transformers", "sbert_ce_default_activation_function"}
    return bool(saved_by_library) or (label_count(config) == 1 and not config.get("problem_type"))


def label_count(config: dict[str, Any]) -> int:
    return len(config.get("id2label") or range(config.get("num_labels", 2)))


def is_multi_vector(weights: Path, config: dict[str, Any]) -> bool:
    """Return whether Stanford's ColBERT, PyLate or sentence-transformers saved a model with a vector for each token."""
    if not (weights / "modules.json").exists():
        return "HF_ColBERT" in architectures_of(config)
    has_modules_of_pylate = '"pylate.' in (weights / "modules.json").read_text(encoding="utf-8")
    return library_class(weights) in MULTI_VECTOR_CLASSES or has_modules_of_pylate


def library_class(weights: Path) -> str:
    """Return the class of sentence-transformers that saved the folder."""
    own = weights / "config_sentence_transformers.json"
    content = json.loads(own.read_text()) if own.exists() else {}
    return content.get("model_type", "SentenceTransformer")


class Module(NamedTuple):
    """A module of sentence-transformers: its class, its folder, and whether it gets the texts."""

    package: str
    name: str
    folder: Path
    is_first: bool


def modules_of(weights: Path) -> list[Module]:
    """Return the modules that modules.json lists, and those of each route of a Router. Raise if it is malformed."""
    modules = []
    listed = json.loads((weights / "modules.json").read_text(encoding="utf-8"))
    for number, module in enumerate(listed):
        package, _, name = module["type"].rpartition(".")
        folder = module_folder(weights, module.get("path", ""))
        modules.append(Module(package, name, folder, number == 0))
        if name == "Router":
            router = json.loads((folder / "router_config.json").read_text(encoding="utf-8"))
            check_routes(weights, router["structure"])
            firsts = {route[0] for route in router["structure"].values()}
            for part, kind in router["types"].items():
                package, _, name = kind.rpartition(".")
                modules.append(Module(package, name, module_folder(folder, part), number == 0 and part in firsts))
    return modules


def module_folder(weights: Path, place: str) -> Path:
    """Return the folder of a module. Raise if it is outside the checkpoint."""
    if Path(place).is_absolute() or ".." in Path(place).parts:
        raise UserError(f"{weights} has a module in '{place}', which is another folder: choose another model")
    return weights / place


def check_routes(weights: Path, names: Iterable[str]) -> None:
    """Raise for a route whose name cannot be that of a folder and the beginning of a parameter's name."""
    if invalid := [name for name in names if not re.fullmatch(r"[\w-]+", name)]:
        raise UserError(f"{weights} has a Router with the route '{invalid[0]}': name it with letters, digits, - and _")


def transformers_of(weights: Path) -> list[Path]:
    """Return the folders that transformers reads: the model's own, those of a Router's routes, or none for a table."""
    try:
        modules = modules_of(weights)
    except MALFORMED:
        modules = []
    if not modules or modules[0].name not in WITHOUT_CONFIG:
        return [weights]
    return [module.folder for module in modules if module.name in TRANSFORMERS]


def read_config(weights: Path) -> dict[str, Any]:
    """Return the content of config.json; a model of sentence-transformers may have none."""
    path = weights / "config.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def save_labels(version: Path, labels: list[str]) -> None:
    """Write the labels for the last step, in the order of the model's logits."""
    text = json.dumps(labels, ensure_ascii=False)
    (version / "labels.json").write_text(f"{text}\n", encoding="utf-8")


def activation(config: Any) -> str:
    """Return the function that turns a classifier's logits into scores, chosen as transformers' pipelines do."""
    if config.problem_type == "regression":
        return "none"
    multi_label = config.problem_type == "multi_label_classification" or config.num_labels == 1
    return "sigmoid" if multi_label else "softmax"
