"""Record what was assembled: <system>/1/assembled.json lists each system's models, files and weights."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from export.catalogue import RECIPES
from triton_transformers.answers import LIMITS
from triton_transformers.files import write_atomically
from triton_transformers.model_config import CONFIGS, with_steps

# The recipe of a system that is being put in place. If that is interrupted, the next run assembles it again.
UNFINISHED = "unfinished"
NAME = "1/assembled.json"
# Hides the folder of a model from git if its config.pbtxt is not from there, but written by the recipe.
IGNORE = ".gitignore"
# A fact that is recorded if FORMAT was empty: the profile, whose default format or fallback the system has.
DEFAULT = "default_on"
# A fact of what `make loadtest FORMATS` assembled: the system whose format it is.
FORMAT_OF = "format_of"
MIN_QUALITY = "min_quality"  # set by the user, for FORMAT=int8


@dataclass(frozen=True)
class Record:
    system: str
    also: tuple[str, ...]  # its other Triton models
    task: str
    format: str
    recipe: str  # the version of the recipe
    files: tuple[str, ...]  # relative to the model repository
    source: str  # for people
    identity: str  # changes with the weights
    neuron: dict[str, Any] | None = None  # what it was compiled for (export/neuron/target.py)
    facts: dict[str, Any] = field(default_factory=dict)  # everything else that the recipe reports

    @property
    def models(self) -> tuple[str, ...]:
        return self.system, *self.also

    @property
    def precision(self) -> str:
        """Return the row of LIMITS for its answers."""
        if self.neuron or self.format in ("onnx-int8", "int8"):
            return "neuron" if self.neuron else self.format
        tolerances = {own.difference: name for (use, name), own in LIMITS.items() if use == "original"}
        if "tolerance" in self.facts:
            return tolerances.get(self.facts["tolerance"], "inexact")
        # Beside weights in few bits OpenVINO rounds activations too, and in a batch in another order.
        is_exact = self.facts.get("dtype", "float32") == "float32"
        return "exact" if is_exact and not self.facts.get("weights", "").startswith("int") else "inexact"

    def is_complete(self, repository: Path) -> bool:
        return all((repository / file).exists() for file in self.files)

    def is_current(self, repository: Path) -> bool:
        """Return whether today's recipe made it, and all its files exist."""
        recipe = RECIPES.get(self.task)
        return recipe is not None and self.recipe == recipe.version and self.is_complete(repository)

    def size(self, repository: Path) -> int:
        """Return how many bytes its files have."""
        return sum(path.stat().st_size for file in self.files if (path := repository / file).exists())

    def write(self, repository: Path) -> None:
        path = repository / self.system / NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        fields = {name: value for name, value in vars(self).items() if name != "facts" and value is not None}
        write_atomically(path, json.dumps(fields | self.facts, indent=2) + "\n")

    def unfinished(self, before: Record | None) -> Record:
        """Return the record to write first. It lists the old files too, so that an interrupted run loses none."""
        return replace(self, recipe=UNFINISHED, files=tuple(sorted({*self.files, *(before.files if before else ())})))


def read_record(system: str, repository: Path) -> Record | None:
    """Return a system's record, or None if there is none that can be read."""
    try:
        content = json.loads((repository / system / NAME).read_text())
        names = Record.__dataclass_fields__.keys() - {"facts"}
        fields = {name: content[name] for name in names & content.keys()}
        fields |= {name: tuple(fields[name]) for name in ("also", "files")}
        return Record(**fields, facts={name: content[name] for name in content.keys() - names})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def read_records(repository: Path) -> list[Record]:
    records = (read_record(path.parents[1].name, repository) for path in sorted(repository.glob(f"*/{NAME}")))
    return [record for record in records if record]


def find_record(model: str, repository: Path) -> Record | None:
    """Return the record of the system that the model belongs to."""
    return next((record for record in read_records(repository) if model in record.models), None)


def is_in_git(model: str) -> bool:
    """Return whether git has the model's configuration. A recipe writes that of any other."""
    folder = CONFIGS / model
    return (folder / "config.pbtxt").is_file() and not (folder / IGNORE).exists()


def models_of(name: str, repository: Path) -> list[str]:
    """Return the Triton models of a system: those in its record, or the model and its ensemble's steps."""
    record = find_record(name, repository)
    return list(record.models) if record else with_steps(name, repository)


# --- the files of a record --------------------------------------------------------------------------------------------


def place_files(files: Iterable[str], folder: Path, repository: Path) -> None:
    """Move these files of the folder to the same places of the repository."""
    mask = os.umask(0)
    os.umask(mask)
    for file in files:
        (repository / file).parent.mkdir(parents=True, exist_ok=True)
        # safetensors and ONNX's external data are created readable by their owner only; containers run as another user.
        (folder / file).chmod(0o666 & ~mask)
        os.replace(folder / file, repository / file)


def delete_files(files: Iterable[str], repository: Path) -> None:
    """Delete these files, and the folders that this empties."""
    for file in files:
        (repository / file).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            for folder in Path(file).parents[:-1]:
                (repository / folder).rmdir()
