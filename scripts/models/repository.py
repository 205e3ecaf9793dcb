"""Putting an assembled system in place: all of it or nothing, once, whoever else is at it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

from scripts.cli import err, out
from scripts.files import exclusive, write_atomically
from scripts.models.catalogue import SYSTEMS, System, system
from scripts.settings import ROOT, Settings, UserError

CONFIGS = ROOT / "model_repository"
WORK = ".assembling-"


def assemble_all(settings: Settings) -> None:
    repository = settings.path("MODEL_REPOSITORY")
    systems = [system(name) for name in settings.words("SYSTEMS")]
    try:
        repository.mkdir(parents=True, exist_ok=True)
        with exclusive(repository, "another `make models` is at work here"):
            sweep(repository)
            for wanted in systems:
                assemble(wanted, repository)
    except OSError as error:
        raise UserError(f"{repository} could not be written, what was there stays: {error}") from None


def assemble(wanted: System, repository: Path) -> None:
    if is_assembled(wanted, repository):
        out.print(f"{wanted.name}: in place")
        return
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=repository, prefix=WORK) as folder:
        work = Path(folder)
        with err.status(f"{wanted.name}: exporting {wanted.source} and comparing it with the original"):
            facts = wanted.assemble(work)
        for model in wanted.models:
            copy_config(model, repository)
            put_in_place(work / model, repository / model)
        remember(wanted, repository, facts)
    out.print(
        f"{wanted.name}: {wanted.source} assembled in {time.monotonic() - start:.0f} s; "
        f"cosine with the original at least {facts['least_cosine']:.6f} on {facts['parity_texts']} texts"
    )


def is_assembled(wanted: System, repository: Path) -> bool:
    try:
        record = json.loads(_record(wanted, repository).read_text())
    except (OSError, ValueError):
        return False
    return record["recipe"] == wanted.recipe and all((repository / file).exists() for file in record["files"])


def remember(wanted: System, repository: Path, facts: dict) -> None:
    files = [
        str(path.relative_to(repository))
        for model in wanted.models
        for path in sorted((repository / model).glob("[0-9]*/*"))
        if path != _record(wanted, repository)
    ]
    record = {"source": wanted.source, "recipe": wanted.recipe, "files": files, **facts}
    write_atomically(_record(wanted, repository), json.dumps(record, indent=2) + "\n")


def copy_config(model: str, repository: Path) -> None:
    """A repository elsewhere starts with our config; one that has its own keeps it."""
    target = repository / model / "config.pbtxt"
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        shutil.copy(CONFIGS / model / "config.pbtxt", target)


def put_in_place(made: Path, model: Path) -> None:
    for version in made.iterdir():
        (model / version.name).mkdir(exist_ok=True)
        for file in version.iterdir():
            os.replace(file, model / version.name / file.name)


def remove_all(settings: Settings) -> None:
    """The files that were assembled, by their record; a user's own models beside them stay."""
    repository = settings.path("MODEL_REPOSITORY")
    for wanted in SYSTEMS.values():
        record = _record(wanted, repository)
        if record.exists():
            for file in (*json.loads(record.read_text())["files"], record.relative_to(repository)):
                (repository / file).unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # not empty
                    (repository / file).parent.rmdir()


def sweep(repository: Path) -> None:
    """What a killed run left. Only under the lock, for a running one's work looks the same."""
    for leftover in repository.glob(f"{WORK}*"):
        shutil.rmtree(leftover)


def _record(wanted: System, repository: Path) -> Path:
    """In the version folder that the ensemble must have but has nothing to put into."""
    return repository / wanted.name / "1/assembled.json"
