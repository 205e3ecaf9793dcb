"""Define what models do: the tensors of each task, and how to find a model's task from its files.

Axes by letter: T tokens, L labels, D the width of a vector, M that of a token's vector, H that of the encoder's, V the
vocabulary, K the requested answers, S the spans of a text, E its entities, or the words in its sparse vector.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from export.checkpoint.adapters import adapter_folders
from triton_transformers.settings import UserError
from triton_transformers.tasks.kinds import TOKEN_COUNT
from triton_transformers.tasks.pipelines import (
    DOCUMENTS,
    DONUT,
    FASTER,
    IMAGES_TO_TEXTS,
    PIPELINE_TASKS,
    pipeline_tasks_of,
)

Axes = tuple[str | int, ...]


@dataclass(frozen=True)
class TextTask:
    """A text encoder's task, with a last step if the encoder's outputs are not yet the answer."""

    model_class: str  # in transformers
    outputs: dict[str, Axes]  # of the encoder
    inputs: tuple[str, ...] = ("input_text",)
    second_is_optional: bool = False
    truncation: str = "longest_first"  # which text of a pair is cut: a strategy of the library tokenizers
    # The last step: what it takes from the tokenizer and from the request beside the encoder's outputs.
    from_tokenizer: tuple[str, ...] = ()
    from_request: tuple[str, ...] = ()
    answers: dict[str, tuple[str, Axes]] = field(default_factory=dict)
    # The encoder itself makes the answers of its graph's outputs.
    encoder_answers: bool = False
    # The encoder is the whole system: an ensemble asks its steps for all outputs, whatever a client asks for.
    is_one_model: bool = False

    @property
    def has_last_step(self) -> bool:
        return bool(self.answers) and not self.encoder_answers

    @property
    def compared(self) -> list[str]:
        """Return the outputs of the encoder as they are served."""
        return list(self.answers if self.encoder_answers else self.outputs)

    @property
    def cuts_windows(self) -> bool:
        """Return whether a second text that is too long becomes several rows of the encoder, instead of being cut."""
        return "pair" in self.from_tokenizer

    @property
    def tokenizes_in_encoder(self) -> bool:
        """Return whether the encoder takes texts: unless the last step needs the same tokens, one step is faster."""
        return not self.from_tokenizer

    @property
    def ensemble_outputs(self) -> dict[str, tuple[str, Axes]]:
        """Return the outputs that clients get. Windows have no token count, because their rows are not the client's.

        Triton's response has the outputs of an ensemble in reverse order, and some clients read only the first, so the
        token count comes first.
        """
        answers = self.answers or {name: ("FP32", axes) for name, axes in self.outputs.items()}
        return answers if self.cuts_windows else {TOKEN_COUNT: ("INT32", (1,)), **answers}


SPARSE: dict[str, tuple[str, Axes]] = {
    "token": ("STRING", ("E",)),
    "token_id": ("INT64", ("E",)),
    "weight": ("FP32", ("E",)),
}
MULTI_VECTOR: dict[str, tuple[str, Axes]] = {
    "vector_count": ("INT32", (1,)),
    "score": ("FP32", (1,)),
    "token_embeddings": ("FP32", ("T", "M")),
}
# Added to a model that pools the mean of its tokens: a vector for each span of a text.
SPAN_OUTPUTS: dict[str, Axes] = {"last_hidden_state": ("T", "H")}
SPAN_ANSWERS: dict[str, tuple[str, Axes]] = {
    "sentence_embedding": ("FP32", ("D",)),
    "span_embeddings": ("FP32", ("S", "D")),
}

TEXT_TASKS = {
    "sentence-similarity": TextTask("AutoModel", {"sentence_embedding": ("D",)}),
    "sparse-embedding": TextTask("AutoModelForMaskedLM", {"sparse_embedding": ("V",)}, answers=SPARSE),
    "multi-vector-embedding": TextTask(
        "AutoModel", {"token_embeddings": ("T", "M")}, answers=MULTI_VECTOR, encoder_answers=True, is_one_model=True
    ),
    "hybrid-embedding": TextTask(
        "AutoModel",
        {"sentence_embedding": ("D",), "token_weights": ("T",), "token_embeddings": ("T", "M")},
        answers={"sentence_embedding": ("FP32", ("D",)), **SPARSE, **MULTI_VECTOR},
        encoder_answers=True,
        is_one_model=True,
    ),
    "feature-extraction": TextTask("AutoModel", {"last_hidden_state": ("T", "D")}),
    "text-classification": TextTask(
        "AutoModelForSequenceClassification",
        {"logits": ("L",)},
        inputs=("input_text", "text_pair"),
        second_is_optional=True,
        answers={"label": ("STRING", (1,)), "score": ("FP32", (1,)), "scores": ("FP32", ("L",))},
    ),
    "text-ranking": TextTask(
        "AutoModelForSequenceClassification",
        {"logits": ("L",)},
        inputs=("query", "text"),
        answers={"score": ("FP32", ("L",))},
    ),
    "token-classification": TextTask(
        "AutoModelForTokenClassification",
        {"logits": ("T", "L")},
        from_tokenizer=("offsets", "special_tokens_mask", "input_ids"),
        from_request=("input_text",),
        answers={
            "label": ("STRING", ("E",)),
            "score": ("FP32", ("E",)),
            "start": ("INT64", ("E",)),
            "end": ("INT64", ("E",)),
        },
    ),
    "fill-mask": TextTask(
        "AutoModelForMaskedLM",
        {"mask_logits": ("V",)},
        answers={"token": ("STRING", ("K",)), "token_id": ("INT64", ("K",)), "score": ("FP32", ("K",))},
    ),
    "question-answering": TextTask(
        "AutoModelForQuestionAnswering",
        {"start_logits": ("T",), "end_logits": ("T",)},
        inputs=("question", "context"),
        truncation="only_second",
        from_tokenizer=("offsets", "word_offsets", "second_text_mask", "pair", "second_text"),
        answers={"answer": ("STRING", (1,)), "score": ("FP32", (1,)), "start": ("INT64", (1,)), "end": ("INT64", (1,))},
    ),
}

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
# The task of a model that answers chats with images, and the architectures whose batches have been compared with
# transformers' own answers (tests/serving/vision/test_chat.py).
IMAGE_TEXT = "image-text-to-text"
SEEING = tuple(f"{family}ForConditionalGeneration" for family in (
    "Gemma3", "Idefics3", "Llava", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "SmolVLM",
))  # fmt: skip
# The modules of sentence-transformers that are a model of transformers, and the first ones that are not.
TRANSFORMERS = ("Transformer", "MLMTransformer")
WITHOUT_CONFIG = ("Router", "StaticEmbedding", "SparseStaticEmbedding")
# The exceptions of modules_of() for a malformed file.
MALFORMED = (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError)
# The two encoders of DPR: one for questions, one for passages.
DPR = ("DPRContextEncoder", "DPRQuestionEncoder")
# The end of an architecture's name -> its task.
ENDINGS = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    **dict.fromkeys(DPR, "sentence-similarity"),
    **dict.fromkeys(SEEING, IMAGE_TEXT),
}


def task_of_architecture(name: str) -> str:
    """Return the task, or "" if the name has no known ending."""
    return next((task for ending, task in ENDINGS.items() if name.endswith(ending)), "")


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
    if task not in FASTER:
        return task in PIPELINE_TASKS
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
    if likely and (likely not in FASTER or (likely == IMAGE_TEXT and any(map(sees, architectures)))):
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
