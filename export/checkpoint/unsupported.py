"""Refuse a model that cannot be served right, before anything is exported: what it is, and what to do instead."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import re
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from export.checkpoint.adapters import adapter_folders, check_adapters
from export.checkpoint.config_keys import is_empty, unread_keys
from export.checkpoint.tasks import (
    HALF_TASKS,
    IMAGE_TEXT,
    LIST,
    MALFORMED,
    TEXT_IMAGE,
    TRANSFORMERS,
    WITHOUT_CONFIG,
    architectures_of,
    encodes_texts_and_images,
    has_files,
    is_multi_vector,
    is_of_two_halves,
    is_vision,
    modules_of,
    needs_pipeline,
    pipeline_task,
    pipelines_of,
    processors_of,
    read_config,
    takes_images,
    task_of,
    task_of_architecture,
    transformers_of,
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
# Names of tasks on the Hub that transformers 5 has under another name.
TASKS = {"text-to-speech": "text-to-audio"}
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
# Tasks that any model can do without its head, and those that share one head.
HEADLESS = (
    "feature-extraction",
    "sentence-similarity",
    "multi-vector-embedding",
    "hybrid-embedding",
    "image-feature-extraction",
)
SAME_HEAD = (
    {"text-classification", "text-ranking"},
    {"fill-mask", "sparse-embedding"},
    {"text-generation", "gpt2"},
    {"text-generation", "text-ranking"},  # the exporter refuses language models that do not rank
)
# Weights that transformers reads without running code: one file, or an index that names several.
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Weights on which no answer depends: of training, and masks and positions that today's code computes.
UNUSED = re.compile(
    r"(^|\.)(position_ids|masked_bias|(attn|attention)\.bias|num_batches_tracked|pe|version|pos_encoding|mask_token"
    r"|masked_spec_embed|embed_positions\.weights|attn_mask|relative_position_index|relative_coords_table)$"
)
# Keys of config.json that describe adapters: Jina's. They are read, or the adapters' own files have the same.
OF_ADAPTERS = ("load_trained_adapters", "lora_*", "task_instructions")
# The formats in which reading weights can run code, or which other libraries read.
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.h5", "*.msgpack", "*.onnx", "*.safetensors")
# The modules with which a served sentence-transformer may begin, and their files, if these are not config.json.
FIRST_MODULES = (*TRANSFORMERS, *WITHOUT_CONFIG)
DESCRIPTIONS = {**dict.fromkeys(TRANSFORMERS, "sentence_bert_config.json"), "Router": "router_config.json"}


def check_task_name(task: str) -> None:
    """Raise for a task of the Hub that transformers has under another name."""
    if task in TASKS:
        raise UserError(f"TASK={task} is TASK={TASKS[task]} in transformers 5: set that")


def check_files(name: str, files: Iterable[str]) -> None:
    """Raise if the names of the files show that this is no model."""
    names = set(files)
    for file, kind in FILES.items():
        if file in names:
            raise UserError(f"{name} is {kind}")


def check_model(name: str, weights: Path, trust_remote_code: bool) -> list[str]:
    """Raise if the model in this folder is of a kind that no task serves. The weights may be missing.

    Return the keys of config.json that transformers ignores without harm.
    """
    check_files(name, (path.name for path in weights.iterdir()))
    if (folders := transformers_of(weights)) != [weights]:
        check_modules(name, weights, trust_remote_code)
        return [key for folder in folders for key in check_model(name, folder, trust_remote_code)]
    config = read_json(name, weights / "config.json")
    kind, architecture = config.get("model_type"), next(iter(architectures_of(config)), "")
    if not isinstance(kind, str) or not kind:
        if (weights / "modules.json").exists():  # whose first module may be no model of transformers
            check_modules(name, weights, trust_remote_code)
        own = type_of_architecture(architecture)
        instead = f'"{own}", the type of {architecture}' if own else 'the type of its network, such as "bert"'
        raise UserError(
            f"{name} is no model of transformers: its config.json names no model_type. Add it there ({instead}), or "
            "name a folder that save_pretrained wrote"
        )
    check_precision(name, config, task_of_architecture(architecture))
    has_pipeline = task_of_architecture(architecture) == IMAGE_TEXT or needs_pipeline(pipeline_task(config), config)
    if not has_pipeline and (purpose := purpose_of(architecture, kind)):
        raise UserError(f"{name} is a {architecture or kind}, which {purpose}; that is not served here ({LIST})")
    if config.get("is_encoder_decoder") and not has_pipeline and not architecture.endswith("T5EncoderModel"):
        raise UserError(
            f"{name} is an encoder-decoder ({architecture or kind}), which is not served here: choose "
            "an encoder such as BERT to classify texts, or a decoder such as Llama to generate them"
        )
    if architecture.endswith("ForConditionalGeneration") and not has_pipeline:
        raise UserError(f"{name} is a {architecture}, which {GENERATES}; that is not served here ({LIST})")
    if (weights / "modules.json").exists():
        check_modules(name, weights, trust_remote_code)
    config_class = class_of(name, config, weights, trust_remote_code)
    if adapter_folders(weights):
        if task_of_architecture(architecture) != "text-generation":  # such a model may generate without its adapters
            check_adapters(name, weights)
        config = {key: value for key, value in config.items() if not any(fnmatch(key, word) for word in OF_ADAPTERS)}
    own_network = own_code(config) and not own_code(config, for_config=True)
    # The network's own code may read any key.
    ignored = [] if own_network and trust_remote_code else check_keys(name, config, config_class)
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

    network: Any = getattr(transformers, architecture, None)
    if not architecture and config_class in transformers.MODEL_MAPPING:
        network = transformers.MODEL_MAPPING[config_class]
    inputs = inspect.signature(network.forward).parameters if hasattr(network, "forward") else ()
    return next((description for name, description in INPUTS.items() if name in inputs), "")


def check_precision(name: str, config: dict[str, Any], task: str) -> None:
    """Raise if the weights are quantized and the task is not the one whose exporter reads such weights."""
    if (method := quantization(config)) and task != "text-generation":
        raise UserError(
            f"{name} is quantized ({method}), and only language models are served so: name the model that it was made "
            "from (FORMAT=onnx-int8 quantizes encoders here)"
        )


def quantization(config: dict[str, Any]) -> str:
    """Return the method by which the weights are quantized, or nothing."""
    if not (settings := config.get("quantization_config")):
        return ""
    method = settings.get("quant_method") if isinstance(settings, dict) else ""
    return str(method or "an unknown method")


def class_of(name: str, config: dict[str, Any], weights: Path, trust_remote_code: bool) -> type[Any]:
    """Return the class that reads config.json: the library's, or that of the model's own code with consent."""
    from transformers import __version__
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = config["model_type"]
    own = own_code(config)
    if trust_remote_code and (code := own_code(config, for_config=True)):
        try:
            return get_class_from_dynamic_module(code, weights, local_files_only=True)
        except Exception as error:  # the code may raise anything
            raise UserError(
                f"{name}: its own code for its configuration does not run here ({type(error).__name__}): the code must "
                "be in the same folder or repository, and may import only what is installed"
            ) from error
    if kind in CONFIG_MAPPING:
        return CONFIG_MAPPING[kind]
    if own:
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


def own_code(config: dict[str, Any], for_config: bool = False) -> str:
    """Return the name of a class of the model's own code, if it has any: the one that reads config.json, or another.

    With `for_config`, return only the one that reads config.json.
    """
    names = config.get("auto_map")
    names = names if isinstance(names, dict) else {}
    own = names.get("AutoConfig") or ("" if for_config else next(iter(names.values()), ""))
    return own if isinstance(own, str) else ""


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


def check_keys(name: str, config: dict[str, Any], config_class: type[Any]) -> list[str]:
    """Return the keys that the installed transformers ignores. Raise if that may change what the network computes."""
    from transformers import __version__

    unread = list(unread_keys(config, config_class))
    installed, saved = int(__version__.partition(".")[0]), str(config.get("transformers_version") or "")
    is_newer = int(re.match(r"\d*", saved)[0] or 0) > installed  # type: ignore[index]
    if not (keys := [key.name for key in unread if key.changes_numbers or is_newer]):
        return [key.name for key in unread]
    if (own := own_code(config)) and own.rpartition(".")[2] != config_class.__name__:
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


def check_modules(name: str, weights: Path, trust_remote_code: bool) -> None:
    """Raise if sentence-transformers runs more than we do, or would ignore a part of its own configuration."""
    try:
        modules = modules_of(weights)
        entries = json.loads((weights / "modules.json").read_text(encoding="utf-8"))
    except MALFORMED:
        modules = []
    if not modules:
        raise UserError(f"{name}: modules.json lists no modules. Name a folder that save_pretrained wrote")
    own = weights / "config_sentence_transformers.json"
    settings = read_json(name, own)
    kind = str(settings.get("model_type", "SentenceTransformer"))
    packages: tuple[str, ...] = ("sentence_transformers.",)
    if is_multi_vector(weights, {}):
        kind, packages = "MultiVectorEncoder", (*packages, "pylate.models.")
    unknown = [
        module.name
        for module in modules
        if not (
            module.name in (FIRST_MODULES if module.is_first and kind in MODULES else MODULES.get(kind, ()))
            if module.package.startswith(packages)
            else trust_remote_code and not module.is_first
        )
    ]
    if unknown:
        raise UserError(f"{name} is a {kind} of {', '.join(unknown)}, which is not served here ({LIST})")
    check_words(name, own.name, settings, ["BaseModel", kind])
    for module in modules:
        path = module.folder / DESCRIPTIONS.get(module.name, "config.json")
        if path != weights / "config.json":
            bases = TRANSFORMERS if module.name in TRANSFORMERS else (module.name,)  # one is a base of the other
            file = str(path.relative_to(weights))
            check_words(name, file, read_json(name, path, file), [*bases])
    for entry in entries:
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


def check_weights(name: str, weights: Path) -> list[Path]:
    """Return the files of the weights. Raise if there are none that transformers reads without running code."""
    index = weights / INDEX
    listed = read_json(name, index).get("weight_map") if index.is_file() else None
    names = sorted({str(file) for file in listed.values()}) if listed and isinstance(listed, dict) else [SINGLE]
    if invalid := [file for file in names if Path(file).name != file or not file.endswith(".safetensors")]:
        raise UserError(f"{index} names '{invalid[0]}', which is not a *.safetensors file in the same folder")
    missing = [file for file in names if not (weights / file).is_file()]
    if not missing:
        return [weights / file for file in names]
    if listed:
        raise UserError(f"{name} has no {', '.join(missing)}, which {INDEX} names: download the missing files")
    others = sorted(path.name for pattern in OTHER_WEIGHTS for path in weights.glob(pattern))
    if others:
        raise UserError(
            f"{name} has no {SINGLE}, and its {others[0]} is not read, because other formats can run code or need "
            "other libraries. To convert a model that you trust: load it with from_pretrained(folder), then call "
            "save_pretrained(another_folder)"
        )
    raise UserError(
        f"{name} has no {SINGLE}, and no weights in another format: save_pretrained writes it beside config.json"
    )


class Comparison(NamedTuple):
    """The weights in which a network and a checkpoint differ."""

    different: set[str]  # in their sizes
    missing: set[str]  # in the checkpoint
    left_over: set[str]  # in the checkpoint, beyond what transformers ignores by its own lists
    body: set[str]  # the first parts of the names of weights that do not belong to a head

    def of_body(self) -> Comparison:
        return self._replace(
            **{
                field: {name for name in names if name.partition(".")[0] in self.body}
                for field, names in self._asdict().items()
            }
        )


def compare_weights(network: Any, weights: Path) -> Comparison:
    """Compare the weights of a class of transformers with those in a folder, by their names and sizes.

    The network is built without memory, because a config.json without sizes means one of billions of weights.
    """
    options = {"device_map": "meta", "output_loading_info": True, "ignore_mismatched_sizes": True}
    model, report = network.from_pretrained(weights, local_files_only=True, use_safetensors=True, **options)
    lists = ((name for name, *_ in report["mismatched_keys"]), report["missing_keys"], report["unexpected_keys"])
    different, missing, left_over = ({name for name in names if not UNUSED.search(name)} for names in lists)
    poolers = {name for name in different | missing | left_over if "pooler" in name}
    left_over -= poolers
    if "SequenceClassification" not in network.__name__:  # the only heads that read a pooler
        different, missing = different - poolers, missing - poolers
    body = {name for name, _ in getattr(model, model.base_model_prefix, model).named_children()}
    return Comparison(different, missing, left_over, {model.base_model_prefix, *body})


def check_network(name: str, weights: Path, task: str) -> None:
    """Raise if the weights are not those of the network of config.json: transformers would draw or drop the others."""
    import transformers

    config = read_config(weights)
    (architecture, *_) = *architectures_of(config), ""
    network: Any = getattr(transformers, architecture, None)
    if network is None or own_code(config) or quantization(config):
        return
    found = compare_weights(network, weights)
    used = found.of_body() if task in HEADLESS else found
    problems = {
        "has other sizes in": used.different,
        "is missing in": used.missing,
        "is left over from": found.of_body().left_over,  # those of other heads change nothing
    }
    if odd := [(min(names), problem) for problem, names in problems.items() if names]:
        (weight, problem), *_ = odd
        raise UserError(
            f"{name} is damaged, of two models, or made with other code: '{weight}' {problem} the weights of the "
            f"{architecture} that its config.json describes. Save the model again with save_pretrained, or choose "
            "another one"
        )


def check_task(name: str, weights: Path, task: str, trust_remote_code: bool) -> None:
    """Raise if the model, or a file that turns the task's inputs into tensors, does not fit the task."""
    if (folders := transformers_of(weights)) != [weights]:
        if task != (own := task_of(weights)):
            raise UserError(f"{name} is for TASK={own} and not for TASK={task}")
        for folder in folders:
            read_parts(name, folder, "tokenizer", trust_remote_code)
        return
    config = read_json(name, weights / "config.json")
    check_precision(name, config, task)
    kind = config["model_type"]
    if needs_pipeline(task, config):
        if task not in (tasks := pipelines_of(config)):
            own = " or ".join(f"TASK={own}" for own in tasks) or "no pipeline"
            raise UserError(f"{name} is a {' '.join(architectures_of(config))}, which is for {own}, not TASK={task}")
        return
    own_tasks = {task_of_architecture(architecture) for architecture in architectures_of(config)}
    encodes_both = any(map(encodes_texts_and_images, architectures_of(config)))
    if is_of_two_halves(config) and task not in own_tasks and not (encodes_both and task in (TEXT_IMAGE, *HALF_TASKS)):
        instead = f"set TASK={TEXT_IMAGE}" if encodes_both else LIST
        raise UserError(f"{name} is a model of texts and images ({kind}), which is not served as {task}: {instead}")
    if task == TEXT_IMAGE and not encodes_both:
        raise UserError(f"{name} has no encoders of texts and of images ({kind}), which TASK={task} requires ({LIST})")
    for architecture in architectures_of(config):
        own = task_of_architecture(architecture)
        if takes_images(architecture) and not is_vision(task):
            raise UserError(f"{name} is a {architecture}, which takes images: choose a model of texts for TASK={task}")
        # Weights of another head can have the right names and shapes, and then they load without an error.
        if own not in ("", task) and task not in HEADLESS and {own, task} not in SAME_HEAD:
            raise UserError(f"{name} is a {architecture}, which is for TASK={own} and not for TASK={task}")
    for noun, patterns in processors_of(task).items():
        file, inputs = PROCESSORS[noun]
        if not has_files(patterns, weights) and kind not in WITHOUT_FILES:
            raise UserError(
                f"{name} has no {noun} ({file}), which TASK={task} requires: save the model's own there too, with "
                f"save_pretrained(folder), or choose a model for {inputs}"
            )
    for noun in processors_of(task):
        read_parts(name, weights, noun, trust_remote_code)


def read_parts(name: str, weights: Path, noun: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """Return the configuration, and the tokenizer or image processor. Raise if transformers cannot read them."""
    import transformers

    from export.checkpoint.silence import quiet

    version = transformers.__version__
    loaders: dict[str, Any] = {"configuration": transformers.AutoConfig, "tokenizer": transformers.AutoTokenizer}
    loaders["image processor"] = transformers.AutoImageProcessor
    options: dict[str, Any] = {"backend": "pil"} if noun == "image processor" else {}
    options |= {"local_files_only": True, "trust_remote_code": trust_remote_code}
    parts = []
    for part in ("configuration", noun):
        try:
            with quiet():
                parts.append(loaders[part].from_pretrained(weights, **options))
        except Exception as error:  # a broken checkpoint makes transformers and tokenizers raise anything
            raise UserError(
                f"{name}: its {part} does not load in transformers {version} ({type(error).__name__}): it is damaged, "
                "incomplete, or of a kind that this release does not know. Save it again with that release, or choose "
                "another model"
            ) from error
    return parts[0], parts[1]


def read_json(name: str, path: Path, file: str = "") -> dict[str, Any]:
    """Return the content of a file, which messages call `file`: that of a module has a folder before its name."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise UserError(f"{name}: {file or path.name} is not a JSON object. Name a folder that save_pretrained wrote")
    return content
