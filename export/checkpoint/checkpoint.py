"""What is in a model's folder. Each file is read once, and messages name the model as its user does."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from export.checkpoint.adapters import adapter_folders
from export.checkpoint.pipelines import DOCUMENTS, DONUT, IMAGES_TO_TEXTS, pipeline_tasks_of
from triton_transformers.settings import UserError

# The names under which sentence-transformers and PyLate save multi-vector models.
MULTI_VECTOR_CLASSES = ("MultiVectorEncoder", "ColBERT")
# The modules of sentence-transformers that are a model of transformers, and the first ones that are not.
TRANSFORMERS = ("Transformer", "MLMTransformer")
WITHOUT_CONFIG = ("Router", "StaticEmbedding", "SparseStaticEmbedding")
# What a malformed modules.json raises when it is read.
MALFORMED = (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError)
# Weights that transformers reads without running code: one file, or an index that names several.
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# The formats in which reading weights can run code, or which other libraries read.
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.h5", "*.msgpack", "*.onnx", "*.safetensors")


class Module(NamedTuple):
    """A module of sentence-transformers: its class, its folder, and whether it gets the texts."""

    package: str
    name: str
    folder: Path
    is_first: bool


@dataclass(frozen=True)
class Checkpoint:
    """A folder that save_pretrained wrote. Its weights may be missing."""

    name: str  # in messages
    folder: Path
    trust_remote_code: bool = False

    def read(self, file: str) -> dict[str, Any]:
        """Return the content of a file of JSON, which is empty if there is none."""
        return read_json(self.name, self.folder / file, file)

    def has(self, *patterns: str) -> bool:
        """Return whether one of the folder's files has a name like these."""
        return any(fnmatch(path.name, pattern) for path in self.folder.iterdir() for pattern in patterns)

    # --- config.json, which a model of sentence-transformers may lack -------------------------------------------------

    @cached_property
    def config(self) -> dict[str, Any]:
        return self.read("config.json")

    @property
    def kind(self) -> str:
        """Return the type of the model, or "" if config.json has none."""
        kind = self.config.get("model_type")
        return kind if isinstance(kind, str) else ""

    @cached_property
    def architectures(self) -> list[str]:
        names = self.config.get("architectures")
        return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []

    @property
    def architecture(self) -> str:
        return next(iter(self.architectures), "")

    @property
    def label_count(self) -> int:
        return len(self.config.get("id2label") or range(self.config.get("num_labels", 2)))

    @property
    def has_two_halves(self) -> bool:
        """Return whether the model is one for texts beside one for images."""
        return self.config.keys() >= {"text_config", "vision_config"}

    @property
    def quantization(self) -> str:
        """Return the method by which the weights are quantized, or ""."""
        if not (settings := self.config.get("quantization_config")):
            return ""
        method = settings.get("quant_method") if isinstance(settings, dict) else ""
        return str(method or "an unknown method")

    def own_code(self, for_config: bool = False) -> str:
        """Return the name of a class of the model's own code, if any: the one that reads config.json, or another.

        With `for_config`, return only the one that reads config.json.
        """
        names = self.config.get("auto_map")
        names = names if isinstance(names, dict) else {}
        own = names.get("AutoConfig") or ("" if for_config else next(iter(names.values()), ""))
        return own if isinstance(own, str) else ""

    @cached_property
    def pipelines(self) -> list[str]:
        """Return the tasks of the pipelines that take the model, the likeliest first."""
        tasks = pipeline_tasks_of(self.architecture, self.kind) if self.kind else []
        encoder = self.config.get("encoder")
        if self.architecture == IMAGES_TO_TEXTS:
            is_donut = isinstance(encoder, dict) and encoder.get("model_type") == DONUT
            tasks = [task for task in tasks if is_donut or task != DOCUMENTS]
        tuned_for = list(self.config.get("task_specific_params") or ())
        return sorted(tasks, key=lambda task: [task] != tuned_for)

    # --- what other libraries add -------------------------------------------------------------------------------------

    @cached_property
    def adapters(self) -> list[Path]:
        return adapter_folders(self.folder)

    @property
    def has_modules(self) -> bool:
        return (self.folder / "modules.json").exists()

    @cached_property
    def library(self) -> dict[str, Any]:
        """Return what sentence-transformers saved beside its modules."""
        return self.read("config_sentence_transformers.json")

    @property
    def library_class(self) -> Any:
        """Return the class of sentence-transformers that saved the folder."""
        return self.library.get("model_type", "SentenceTransformer")

    @property
    def is_multi_vector(self) -> bool:
        """Return whether Stanford's ColBERT, PyLate or sentence-transformers saved it with a vector for each token."""
        if not self.has_modules:
            return "HF_ColBERT" in self.architectures
        has_modules_of_pylate = '"pylate.' in (self.folder / "modules.json").read_text(encoding="utf-8")
        return self.library_class in MULTI_VECTOR_CLASSES or has_modules_of_pylate

    @property
    def is_cross_encoder(self) -> bool:
        """Return whether sentence-transformers wrote the model as a CrossEncoder, in the form of any of its releases.

        A sequence classifier with one label is one too, unless its config.json states that it is a regression: most
        rerankers of other libraries state nothing.
        """
        if self.has_modules:
            return self.library_class == "CrossEncoder"
        if not any(name.endswith("ForSequenceClassification") for name in self.architectures):
            return False
        saved_by_library = self.config.keys() & {"sentence_transformers", "sbert_ce_default_activation_function"}
        return bool(saved_by_library) or (self.label_count == 1 and not self.config.get("problem_type"))

    @cached_property
    def modules(self) -> list[Module]:
        """Return the modules that modules.json lists, and those of a Router's routes; none if it is malformed."""
        try:
            return self._listed_modules()
        except MALFORMED:
            return []

    def _listed_modules(self) -> list[Module]:
        modules = []
        for number, module in enumerate(json.loads((self.folder / "modules.json").read_text(encoding="utf-8"))):
            package, _, name = module["type"].rpartition(".")
            folder = self._inside(self.folder, module.get("path", ""))
            modules.append(Module(package, name, folder, number == 0))
            if name == "Router":
                router = json.loads((folder / "router_config.json").read_text(encoding="utf-8"))
                # A route's name becomes a folder, and the beginning of a parameter's name.
                if invalid := [route for route in router["structure"] if not re.fullmatch(r"[\w-]+", route)]:
                    raise UserError(
                        f"{self.name} has a Router with the route '{invalid[0]}': name it with letters, digits, - and _"
                    )
                firsts = {route[0] for route in router["structure"].values()}
                for part, kind in router["types"].items():
                    package, _, name = kind.rpartition(".")
                    modules.append(Module(package, name, self._inside(folder, part), number == 0 and part in firsts))
        return modules

    def _inside(self, folder: Path, place: str) -> Path:
        """Return the folder of a module. Raise if it is outside the checkpoint."""
        if Path(place).is_absolute() or ".." in Path(place).parts:
            raise UserError(f"{self.name} has a module in '{place}', which is another folder: choose another model")
        return folder / place

    @cached_property
    def parts(self) -> list[Checkpoint]:
        """Return the folders that transformers reads: this one, those of a Router's routes, or none for a table."""
        if not self.modules or self.modules[0].name not in WITHOUT_CONFIG:
            return [self]
        return [replace(self, folder=module.folder) for module in self.modules if module.name in TRANSFORMERS]

    # --- weights ------------------------------------------------------------------------------------------------------

    def weights(self) -> list[Path]:
        """Return the files of the weights. Raise if there are none that transformers reads without running code."""
        listed = self.read(INDEX).get("weight_map")
        names = sorted({str(file) for file in listed.values()}) if listed and isinstance(listed, dict) else [SINGLE]
        if invalid := [file for file in names if Path(file).name != file or not file.endswith(".safetensors")]:
            raise UserError(
                f"{self.name}: {INDEX} names '{invalid[0]}', which is not a *.safetensors file in the same folder"
            )
        missing = [file for file in names if not (self.folder / file).is_file()]
        if not missing:
            return [self.folder / file for file in names]
        if listed:
            raise UserError(f"{self.name} has no {', '.join(missing)}, which {INDEX} names: download the missing files")
        others = sorted(path.name for pattern in OTHER_WEIGHTS for path in self.folder.glob(pattern))
        if others:
            raise UserError(
                f"{self.name} has no {SINGLE}, and its {others[0]} is not read, because other formats can run code or "
                "need other libraries. To convert a model that you trust: load it with from_pretrained(folder), then "
                "call save_pretrained(another_folder)"
            )
        raise UserError(
            f"{self.name} has no {SINGLE}, and no weights in another format: save_pretrained writes it beside "
            "config.json"
        )


def read_json(name: str, path: Path, file: str = "") -> dict[str, Any]:
    """Return the content of a file, which messages call `file`: that of a module has a folder before its name."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise UserError(f"{name}: {file or path.name} is not a JSON object. Name a folder that save_pretrained wrote")
    return content
