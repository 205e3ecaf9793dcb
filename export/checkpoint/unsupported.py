"""Refuse a model that cannot be served right, before anything is exported: what it is, and what to do instead."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from export.checkpoint.adapters import check_adapters
from export.checkpoint.checkpoint import TRANSFORMERS, WITHOUT_CONFIG, Checkpoint, read_json
from export.checkpoint.config_keys import is_empty, unread_keys
from export.checkpoint.network import HEADLESS
from export.checkpoint.silence import quiet
from export.checkpoint.tasks import (
    HALF_TASKS,
    IMAGE_TEXT,
    LIST,
    TEXT_IMAGE,
    encodes_texts_and_images,
    inputs_of,
    is_vision,
    needs_pipeline,
    network_of,
    processors_of,
    takes_images,
    task_of,
    task_of_architecture,
    type_of_architecture,
)
from triton_transformers.settings import UserError

# A kind of model -> what it does. The kinds are those of transformers' MODEL_FOR_<kind>_MAPPING_NAMES, which list the
# architectures; other architectures of the kind end in its name (CTC: ...ForCTC).
KINDS = {
    "AUDIO_FRAME_CLASSIFICATION": "classifies sound",
    "AUDIO_XVECTOR": "recognizes speakers",
    "CAUSAL_IMAGE_MODELING": "generates images",
    "IMAGE_TO_IMAGE": "turns images into other images",
    "KEYPOINT_DETECTION": "finds points in images",
    "MASKED_IMAGE_MODELING": "fills in hidden parts of images",
    "MULTIPLE_CHOICE": "chooses one of several texts",
    "NEXT_SENTENCE_PREDICTION": "judges whether one sentence follows another",
    "RETRIEVAL": "returns several vectors for each page",
    "TABLE_QUESTION_ANSWERING": "answers questions about tables",
    "TIME_SERIES_CLASSIFICATION": "classifies series of measurements",
    "TIME_SERIES_PREDICTION": "forecasts series of measurements",
    "TIME_SERIES_REGRESSION": "forecasts series of measurements",
    "VIDEO_CLASSIFICATION": "classifies videos",
    "VISUAL_QUESTION_ANSWERING": "answers questions about images",
}
# The end of an architecture's name -> what it does, for kinds that transformers does not list.
ARCHITECTURES = {
    "DPRReader": "marks answers in DPR's passages",
    "ViTMAEForPreTraining": "fills in hidden parts of images",
    "ViTMAEModel": "sees a random part of each image",
}
# The purpose of a ...ForConditionalGeneration, unless it is an encoder-decoder of texts.
GENERATES = "generates text from images, sound or other text"
# An input that a model takes beside or instead of tokens and images -> what the model takes.
INPUTS = {
    "bbox": "the places of words on a page",
    "input_features": "sound",
    "input_values": "sound",
    "past_values": "series of measurements",
    "pixel_values_videos": "texts, images and videos together",
    "visual_embeds": "texts and images together",
    "xpath_tags_seq": "the markup of web pages",
}
# Kinds whose types of models read nothing else, whatever the architecture's head.
WHOLE_TYPES = ("TABLE_QUESTION_ANSWERING", "VIDEO_CLASSIFICATION")

# A file that only folders of this kind have -> what such a folder is.
FILES = {
    "adapter_config.json": (
        "a PEFT adapter (LoRA, ...) without its base model: add it to the system of a language model, as in "
        "ADAPTERS=name=folder; or load it with peft, call merge_and_unload() and save_pretrained(folder), and set "
        "SOURCE=folder"
    ),
    "model_index.json": f"a pipeline of diffusers, which is not served here; {LIST}",
}
# The modules of sentence-transformers that are served, by the kind of the model.
MODULES = {
    "SentenceTransformer": {"Pooling", "Dense", "LayerNorm", "Normalize", "Dropout", "CNN", "WeightedLayerPooling"},
    "SparseEncoder": {"SpladePooling", "Pooling", "SparseAutoEncoder"},
    "CrossEncoder": {"LogitScore", "Dense"},
    "MultiVectorEncoder": {"Dense", "MultiVectorMask", "Normalize"},
}
# The processor that turns inputs into tensors -> its main file, and these inputs.
PROCESSORS = {"tokenizer": ("tokenizer.json", "texts"), "image processor": ("preprocessor_config.json", "images")}
# Types whose tokenizers read the characters or bytes of a text, and no file.
WITHOUT_FILES = ("canine", "perceiver")
# Tasks that share one head.
SAME_HEAD = (
    {"text-classification", "text-ranking"},
    {"fill-mask", "sparse-embedding"},
    {"text-generation", "gpt2"},
    {"text-generation", "text-ranking"},  # the exporter refuses language models that do not rank
)
# Keys of config.json that describe adapters: Jina's. They are read, or the adapters' own files have the same.
OF_ADAPTERS = ("load_trained_adapters", "lora_*", "task_instructions")
# The modules with which a served sentence-transformer may begin, and their files, if these are not config.json.
FIRST_MODULES = (*TRANSFORMERS, *WITHOUT_CONFIG)
DESCRIPTIONS = {**dict.fromkeys(TRANSFORMERS, "sentence_bert_config.json"), "Router": "router_config.json"}


def check_files(name: str, files: Iterable[str]) -> None:
    """Raise if the names of the files show that this is no model."""
    names = set(files)
    for file, kind in FILES.items():
        if file in names:
            raise UserError(f"{name} is {kind}")


def check(checkpoint: Checkpoint, task: str) -> tuple[str, list[str]]:
    """Raise if the model cannot be served for the task; without one, find the model's own.

    Return the task, and the keys of config.json that transformers ignores without harm.
    """
    ignored = check_model(checkpoint)
    for part in checkpoint.parts:
        part.weights()  # raises if there are none
    task = task or task_of(checkpoint)
    check_task(checkpoint, task)
    return task, ignored


def check_model(checkpoint: Checkpoint) -> list[str]:
    """Raise if the model is of a kind that no task serves. Its weights may be missing.

    Return the keys of config.json that transformers ignores without harm.
    """
    name, kind, architecture = checkpoint.name, checkpoint.kind, checkpoint.architecture
    check_files(name, (path.name for path in checkpoint.folder.iterdir()))
    if checkpoint.has_modules:
        check_modules(checkpoint)
    if checkpoint.parts != [checkpoint]:
        return [key for part in checkpoint.parts for key in check_model(part)]
    if not kind:
        own = type_of_architecture(architecture)
        instead = f'"{own}", the type of {architecture}' if own else 'the type of its network, such as "bert"'
        raise UserError(
            f"{name} is no model of transformers: its config.json names no model_type. Add it there ({instead}), or "
            "name a folder that save_pretrained wrote"
        )
    check_precision(checkpoint, task_of_architecture(architecture))
    likely = next(iter(checkpoint.pipelines), "")
    has_pipeline = task_of_architecture(architecture) == IMAGE_TEXT or needs_pipeline(likely, checkpoint)
    if not has_pipeline and (purpose := purpose_of(architecture, kind)):
        raise UserError(f"{name} is a {architecture or kind}, which {purpose}; that is not served here ({LIST})")
    if checkpoint.config.get("is_encoder_decoder") and not has_pipeline and not architecture.endswith("T5EncoderModel"):
        raise UserError(
            f"{name} is an encoder-decoder ({architecture or kind}), which is not served here: choose "
            "an encoder such as BERT to classify texts, or a decoder such as Llama to generate them"
        )
    if architecture.endswith("ForConditionalGeneration") and not has_pipeline:
        raise UserError(f"{name} is a {architecture}, which {GENERATES}; that is not served here ({LIST})")
    config_class = class_of(checkpoint)
    # A language model may generate without its adapters.
    if checkpoint.adapters and task_of_architecture(architecture) != "text-generation":
        check_adapters(name, checkpoint.folder)
    own_network = checkpoint.own_code() and not checkpoint.own_code(for_config=True)
    # The network's own code may read any key.
    ignored = [] if own_network and checkpoint.trust_remote_code else check_keys(checkpoint, config_class)
    if not has_pipeline and (read := unserved_input(architecture, config_class)):
        raise UserError(f"{name} is a {architecture or kind}, which takes {read}; that is not served here ({LIST})")
    return ignored


def purpose_of(architecture: str, model_type: str) -> str:
    """Return what a model that is not served does, after "which", or "" for other models."""
    name = architecture.lower()
    for kind, purpose in KINDS.items():
        if name.endswith(f"for{kind.replace('_', '').lower()}"):
            return purpose
    from transformers.models.auto import modeling_auto

    for kind, purpose in KINDS.items():
        listed = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {})
        names = [name for entry in listed.values() for name in ((entry,) if isinstance(entry, str) else entry)]
        if architecture in names or (kind in WHOLE_TYPES and model_type in listed):
            return purpose
    return next((purpose for ending, purpose in ARCHITECTURES.items() if architecture.endswith(ending)), "")


def unserved_input(architecture: str, config_class: type[Any]) -> str:
    """Return what a model reads that no task sends, or "". Without an architecture, ask the class without a head."""
    import transformers

    network = network_of(architecture)
    if not architecture and config_class in transformers.MODEL_MAPPING:
        network = transformers.MODEL_MAPPING[config_class]
    inputs = inputs_of(network)
    return next((description for name, description in INPUTS.items() if name in inputs), "")


def check_precision(checkpoint: Checkpoint, task: str) -> None:
    """Raise if the weights are quantized and the task is not the one whose exporter reads such weights."""
    if checkpoint.quantization and task != "text-generation":
        raise UserError(
            f"{checkpoint.name} is quantized ({checkpoint.quantization}), and only language models are served so: name "
            "the model that it was made from (FORMAT=onnx-int8 quantizes encoders here)"
        )


def class_of(checkpoint: Checkpoint) -> type[Any]:
    """Return the class that reads config.json: the library's, or that of the model's own code with consent."""
    from transformers import __version__
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    name, kind = checkpoint.name, checkpoint.kind
    if checkpoint.trust_remote_code and (code := checkpoint.own_code(for_config=True)):
        try:
            return get_class_from_dynamic_module(code, checkpoint.folder, local_files_only=True)
        except Exception as error:  # the code may raise anything
            raise UserError(
                f"{name}: its own code for its configuration does not run here ({type(error).__name__}): the code must "
                "be in the same folder or repository, and may import only what is installed"
            ) from error
    if kind in CONFIG_MAPPING:
        return CONFIG_MAPPING[kind]
    if own := checkpoint.own_code():
        raise UserError(f"{name} {needs_code(own)}")
    if meant := type_of_architecture(kind):
        raise UserError(
            f"{name}: the model_type in its config.json is {kind}, the name of a class: set it to {meant}, the type of "
            "that class, and architectures to the class"
        )
    raise UserError(
        f"{name} is of the type {kind}, which transformers {__version__} does not know: it may need a newer release, "
        f"which is not available here yet. Choose another model ({LIST})"
    )


def needs_code(own: str) -> str:
    """Return that a model brings its own code, and what to do."""
    repository, elsewhere, _ = own.partition("--")
    if elsewhere:
        return (
            f"needs code of another repository ({repository}), which is not loaded here: choose another model ({LIST})"
        )
    return (
        "brings its own code, which can do whatever you can: set TRUST_REMOTE_CODE=1 if you trust it, and keep its "
        "*.py files beside config.json"
    )


def check_keys(checkpoint: Checkpoint, config_class: type[Any]) -> list[str]:
    """Return the keys that the installed transformers ignores. Raise if that may change what the network computes."""
    from transformers import __version__

    name, config = checkpoint.name, checkpoint.config
    if checkpoint.adapters:
        config = {key: value for key, value in config.items() if not any(fnmatch(key, word) for word in OF_ADAPTERS)}
    unread = list(unread_keys(config, config_class))
    installed, saved = int(__version__.partition(".")[0]), str(config.get("transformers_version") or "")
    is_newer = int(re.match(r"\d*", saved)[0] or 0) > installed  # type: ignore[index]
    if not (keys := [key.name for key in unread if key.changes_numbers or is_newer]):
        return [key.name for key in unread]
    if (own := checkpoint.own_code()) and own.rpartition(".")[2] != config_class.__name__:
        raise UserError(f"{name}: config.json sets {', '.join(keys)}, and {needs_code(own)}")
    if is_newer:
        instead = (
            f"choose a checkpoint that transformers {installed} saved, or wait for the release of this project that "
            f"brings transformers {saved.partition('.')[0]}"
        )
    else:
        instead = (
            "choose another checkpoint or release of transformers (docs/models.md), or, if the model computes the "
            "same without it, remove the key there"
        )
    raise UserError(
        f"{name}: config.json sets {', '.join(keys)}, which {config_class.__name__} of transformers {__version__} does "
        f"not read, so that answers could be wrong without notice: {instead}"
    )


def check_modules(checkpoint: Checkpoint) -> None:
    """Raise if sentence-transformers runs more than we do, or would ignore a part of its own configuration."""
    name, weights, modules = checkpoint.name, checkpoint.folder, checkpoint.modules
    if not modules:
        raise UserError(f"{name}: modules.json lists no modules. Name a folder that save_pretrained wrote")
    kind = str(checkpoint.library_class)
    packages: tuple[str, ...] = ("sentence_transformers.",)
    if checkpoint.is_multi_vector:
        kind, packages = "MultiVectorEncoder", (*packages, "pylate.models.")
    unknown = [
        module.name
        for module in modules
        if not (
            module.name in (FIRST_MODULES if module.is_first and kind in MODULES else MODULES.get(kind, ()))
            if module.package.startswith(packages)
            else checkpoint.trust_remote_code and not module.is_first
        )
    ]
    if unknown:
        raise UserError(f"{name} is a {kind} of {', '.join(unknown)}, which is not served here ({LIST})")
    check_words(name, "config_sentence_transformers.json", checkpoint.library, ["BaseModel", kind])
    for module in modules:
        path = module.folder / DESCRIPTIONS.get(module.name, "config.json")
        if path != weights / "config.json":
            bases = TRANSFORMERS if module.name in TRANSFORMERS else (module.name,)  # one is a base of the other
            file = str(path.relative_to(weights))
            check_words(name, file, read_json(name, path, file), [*bases])
    for entry in json.loads((weights / "modules.json").read_text(encoding="utf-8")):
        check_words(name, "modules.json", entry, ["BaseModel"])


def check_words(name: str, file: str, content: dict[str, Any], classes: list[str]) -> None:
    """Raise if a key in a file of sentence-transformers occurs nowhere in the code of the classes that read it."""
    code = "".join(text for text in library_sources() if any(f"class {of_class}(" in text for of_class in classes))
    words = {word for groups in re.findall(r"[\"'](\w+)[\"']|\b(\w+): ", code) for word in groups}
    if unread := [key for key, value in content.items() if not is_empty(value) and key not in words]:
        raise UserError(
            f"{name}: {file} sets {', '.join(unread)}, which the installed sentence-transformers does not read, "
            "so that answers would be wrong without notice: choose a checkpoint that an earlier release saved"
        )


@functools.cache
def library_sources() -> list[str]:
    """Return the texts of the files of the installed sentence-transformers, without importing it."""
    spec = importlib.util.find_spec("sentence_transformers")
    assert spec and spec.submodule_search_locations
    return [file.read_text(encoding="utf-8") for file in Path(spec.submodule_search_locations[0]).rglob("*.py")]


def check_task(checkpoint: Checkpoint, task: str) -> None:
    """Raise if the model, or a file that turns the task's inputs into tensors, does not fit the task."""
    name, kind, architectures = checkpoint.name, checkpoint.kind, checkpoint.architectures
    if checkpoint.parts != [checkpoint]:
        if task != (own := task_of(checkpoint)):
            raise UserError(f"{name} is for TASK={own} and not for TASK={task}")
        for part in checkpoint.parts:
            read_parts(part, "tokenizer")
        return
    check_precision(checkpoint, task)
    if needs_pipeline(task, checkpoint):
        if task not in checkpoint.pipelines:
            own = " or ".join(f"TASK={own}" for own in checkpoint.pipelines) or "no pipeline"
            raise UserError(f"{name} is a {' '.join(architectures)}, which is for {own}, not TASK={task}")
        return
    own_tasks = {task_of_architecture(architecture) for architecture in architectures}
    encodes_both = any(map(encodes_texts_and_images, architectures))
    if checkpoint.has_two_halves and task not in own_tasks and not (encodes_both and task in (TEXT_IMAGE, *HALF_TASKS)):
        instead = f"set TASK={TEXT_IMAGE}" if encodes_both else LIST
        raise UserError(f"{name} is a model of texts and images ({kind}), which is not served as {task}: {instead}")
    if task == TEXT_IMAGE and not encodes_both:
        raise UserError(f"{name} has no encoders of texts and of images ({kind}), which TASK={task} requires ({LIST})")
    for architecture in architectures:
        own = task_of_architecture(architecture)
        if takes_images(architecture) and not is_vision(task):
            raise UserError(f"{name} is a {architecture}, which takes images: choose a model of texts for TASK={task}")
        # Weights of another head can have the right names and shapes, and then they load without an error.
        if own not in ("", task) and task not in HEADLESS and {own, task} not in SAME_HEAD:
            raise UserError(f"{name} is a {architecture}, which is for TASK={own} and not for TASK={task}")
    for noun, patterns in processors_of(task).items():
        file, inputs = PROCESSORS[noun]
        if not checkpoint.has(*patterns) and kind not in WITHOUT_FILES:
            raise UserError(
                f"{name} has no {noun} ({file}), which TASK={task} requires: save the model's own there too, with "
                f"save_pretrained(folder), or choose a model for {inputs}"
            )
    for noun in processors_of(task):
        read_parts(checkpoint, noun)


def read_parts(checkpoint: Checkpoint, noun: str) -> tuple[Any, Any]:
    """Return the configuration, and the tokenizer or image processor. Raise if transformers cannot read them."""
    import transformers

    loaders: dict[str, Any] = {"configuration": transformers.AutoConfig, "tokenizer": transformers.AutoTokenizer}
    loaders["image processor"] = transformers.AutoImageProcessor
    options: dict[str, Any] = {"backend": "pil"} if noun == "image processor" else {}
    options |= {"local_files_only": True, "trust_remote_code": checkpoint.trust_remote_code}
    parts = []
    for part in ("configuration", noun):
        try:
            with quiet():
                parts.append(loaders[part].from_pretrained(checkpoint.folder, **options))
        except Exception as error:  # a broken checkpoint makes transformers and tokenizers raise anything
            raise UserError(
                f"{checkpoint.name}: its {part} does not load in transformers {transformers.__version__} "
                f"({type(error).__name__}): it is damaged, incomplete, or of a kind that this release does not know. "
                "Save it again with that release, or choose another model"
            ) from error
    return parts[0], parts[1]
