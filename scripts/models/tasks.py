"""What a model does: which tensors go in and come out, and how its config.json tells.

Axes by letter: T tokens, L labels, D the width of a vector, V the vocabulary, K the answers asked for, E entities.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from scripts.common.settings import UserError

Axes = tuple[str | int, ...]


@dataclass(frozen=True)
class TextTask:
    """A text encoder's task: tokenizer, encoder, and a last step where the encoder's outputs are not yet the answer."""

    model_class: str  # of transformers
    outputs: dict[str, Axes]  # of the encoder
    inputs: tuple[str, ...] = ("input_text",)
    # The last step: what it needs of the tokens and of the texts, and what it answers.
    of_tokens: tuple[str, ...] = ()
    of_texts: tuple[str, ...] = ()
    answers: dict[str, tuple[str, Axes]] = field(default_factory=dict)


TEXT_TASKS = {
    "sentence-similarity": TextTask("AutoModel", {"sentence_embedding": ("D",)}),
    "feature-extraction": TextTask("AutoModel", {"last_hidden_state": ("T", "D")}),
    "text-classification": TextTask(
        "AutoModelForSequenceClassification",
        {"logits": ("L",)},
        answers={"label": ("STRING", (1,)), "score": ("FP32", (1,)), "scores": ("FP32", ("L",))},
    ),
    "token-classification": TextTask(
        "AutoModelForTokenClassification",
        {"logits": ("T", "L")},
        of_tokens=("offsets", "special_tokens_mask"),
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
        answers={"token": ("STRING", ("K",)), "score": ("FP32", ("K",))},
    ),
    "question-answering": TextTask(
        "AutoModelForQuestionAnswering",
        {"start_logits": ("T",), "end_logits": ("T",)},
        inputs=("question", "context"),
        of_tokens=("offsets", "second_text_mask"),
        of_texts=("context",),
        answers={
            "answer": ("STRING", (1,)),
            "score": ("FP32", (1,)),
            "start": ("INT64", (1,)),
            "end": ("INT64", (1,)),
        },
    ),
}

# The end of an architecture's name -> its task.
ENDINGS = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
}


def task_of_architecture(name: str) -> str:
    """Empty where its name does not tell."""
    return next((task for ending, task in ENDINGS.items() if name.endswith(ending)), "")


def save_labels(version: Path, labels: list[str]) -> None:
    """For the last step, in the order of the model's logits."""
    text = json.dumps(labels, ensure_ascii=False)
    (version / "labels.json").write_text(f"{text}\n", encoding="utf-8")


def activation(config) -> str:
    """What makes scores of a classifier's logits, as transformers' pipelines choose it."""
    if config.problem_type == "regression":
        return "none"
    several = config.problem_type == "multi_label_classification" or config.num_labels == 1
    return "sigmoid" if several else "softmax"


def task_of(weights: Path) -> str:
    """As the files that save_pretrained wrote tell."""
    if (weights / "modules.json").exists():
        return "sentence-similarity"
    config = json.loads((weights / "config.json").read_text())
    for architecture in config.get("architectures") or []:
        if task := task_of_architecture(architecture):
            return task
        if architecture.endswith("Model"):
            pictures = (weights / "preprocessor_config.json").exists()
            return "image-feature-extraction" if pictures else "feature-extraction"
    raise UserError("its config.json does not tell what it does: say TASK (docs/models.md lists them)")
