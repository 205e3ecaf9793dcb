"""Complete a config.json that lacks the class of the model, or names it otherwise than transformers does."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from export.checkpoint.checkpoint import INDEX, SINGLE, Checkpoint
from export.checkpoint.network import HEADLESS, compare_weights
from export.checkpoint.pipelines import names_in, pipeline_tasks_of
from export.checkpoint.tasks import LIST, network_of, task_of_architecture, type_of_architecture
from export.sources.source import Weights
from triton_transformers.cli import out
from triton_transformers.settings import UserError

# The kinds that people expect if several classes have the weights' names, the first one first. Kinds are those of
# transformers' MODEL_FOR_<kind>_MAPPING_NAMES; all others come after these, and the class without a head is the last.
FIRST_KINDS = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MASKED_LM", "CAUSAL_LM")
# Kinds that nobody asks for without naming them: their classes would win over the served class of the same weights.
OTHER_KINDS = ("PRETRAINING", "NEXT_SENTENCE_PREDICTION", "MULTIPLE_CHOICE")
OLD_NAMES = {"T5WithLMHeadModel": "T5ForConditionalGeneration"}  # of transformers 2 and 3


@contextlib.contextmanager
def completed(weights: Weights, folder: Path, task: str) -> Iterator[Weights]:
    """Yield the weights with a config.json that names its class and its labels as transformers reads them.

    The folder of a user stays as it is: links to its files lie beside `folder`.
    """
    checkpoint = Checkpoint(weights.name, weights.folder)
    changes: dict[str, Any] = {}
    if architecture := completed_architecture(checkpoint, task):
        changes["architectures"] = [architecture]
        out.print(
            f"{weights.name}: its weights are those of a {architecture}, which config.json does not name", markup=False
        )
    labels = checkpoint.config.get("id2label")
    if isinstance(labels, dict) and not all(isinstance(label, str) for label in labels.values()):
        changes["id2label"] = {number: str(label) for number, label in labels.items()}
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=folder.name) as links:
        if changes and not weights.movable:
            for path in weights.folder.iterdir():
                (Path(links) / path.name).symlink_to(path)
            weights = replace(weights, folder=Path(links))
        if changes:
            (weights.folder / "config.json").unlink()  # it may be a link to that of a user
            (weights.folder / "config.json").write_text(json.dumps(checkpoint.config | changes), encoding="utf-8")
        yield weights


def completed_architecture(checkpoint: Checkpoint, task: str) -> str:
    """Return the class of transformers that config.json should name, or "" if it names one, or the model's own code.

    Raise UserError if it names a class of other code, or of another type, whose weights no class of the type has.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind, named = checkpoint.kind, checkpoint.architecture
    if not kind or not (classes := classes_of(kind)):
        return ""
    is_of_other_library = checkpoint.has_modules or checkpoint.is_multi_vector
    if not checkpoint.has(SINGLE, INDEX) or checkpoint.own_code() or is_of_other_library:
        return ""
    usual = getattr(CONFIG_MAPPING[kind], "is_encoder_decoder", False)
    is_encoder_decoder = checkpoint.config.get("is_encoder_decoder", usual)
    if not named or (named == classes[-1] and is_encoder_decoder):  # pipelines load a tied head, too
        fitting = fitting_class(checkpoint, classes)
        return fitting if fitting != named else ""
    own = OLD_NAMES.get(named, named).lower()
    if same := next((name for name in classes if name.lower() == own), ""):
        return same if same != named else ""
    own_type = type_of_architecture(named)
    if own_type == kind:  # a class that no list has
        return ""
    classes = [name for name in classes if not task or is_for(name, task, kind)]
    fitting = fitting_class(checkpoint, classes, whole=task not in HEADLESS)
    if fitting and (own_type or task):
        return fitting
    code = f"of the type {own_type} and not {kind}" if own_type else f"not in transformers {transformers.__version__}"
    instead = f"Its weights are those of no {kind} in transformers: correct the file if it is wrong"
    if fitting:
        instead = f"Its weights fit {fitting}: set TASK if it computes as that does"
    raise UserError(
        f"{checkpoint.name} has the architecture {named} in its config.json, which is {code}. {instead}, or "
        f"choose another model ({LIST})"
    )


def is_for(name: str, task: str, model_type: str) -> bool:
    if task in HEADLESS:
        return name == classes_of(model_type)[-1]
    return task == task_of_architecture(name) or task in pipeline_tasks_of(name, model_type)


def classes_of(model_type: str) -> list[str]:
    """Return transformers' classes for a type of models, the likeliest first and the one without a head last."""
    from transformers.models.auto import modeling_auto

    suffix, before = "_MAPPING_NAMES", "MODEL_FOR_"
    kinds = [
        name.removesuffix(suffix).removeprefix(before)
        for name in vars(modeling_auto)
        if name.startswith(before) and name.endswith(suffix)
    ]
    kinds.sort(key=lambda kind: FIRST_KINDS.index(kind) if kind in FIRST_KINDS else len(FIRST_KINDS))
    lists = [getattr(modeling_auto, f"{before}{kind}{suffix}") for kind in kinds if kind not in OTHER_KINDS]
    found = dict.fromkeys(names_in(lists, model_type))
    for bare in names_in([modeling_auto.MODEL_MAPPING_NAMES], model_type):
        found.pop(bare, None)
        found[bare] = None
    return list(found)


def fitting_class(checkpoint: Checkpoint, classes: list[str], whole: bool = False) -> str:
    """Return the class that needs no other weights than these and reads the most of them, or "".

    With `whole`, it must read all of them.
    """
    left_over: dict[str, int] = {}
    for name in classes:
        try:
            found = compare_weights(network_of(name), checkpoint)
        except Exception:  # damaged files make transformers raise anything: later checks report them
            continue
        if not found.missing and not found.different and not (whole and found.left_over):
            left_over[name] = len(found.left_over)
    return min(left_over, key=left_over.__getitem__, default="")
