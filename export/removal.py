"""Delete systems from the model repository: exactly the files that their records list."""

from __future__ import annotations

import contextlib
import filecmp
import shutil
from collections.abc import Iterator
from pathlib import Path

from export.catalogue import find_system
from export.record import IGNORE, Record, find_record, read_record, read_records
from export.record import NAME as RECORD
from export.sources.hub import DOWNLOADS
from triton_transformers.model_config import CONFIGS, tuned_configs, with_steps
from triton_transformers.settings import Settings, UserError
from triton_transformers.tasks.kinds import NAME


def removable(name: str, repository: Path) -> Record:
    """Return the record of the system; raise UserError if it may not be removed."""
    if not NAME.fullmatch(name):
        raise UserError(f"SYSTEM={name}: not a valid name; use letters, digits, '_', '-' and '.'")
    record = read_record(name, repository)
    if record is None:
        whole = find_record(name, repository)
        if whole:
            models, command = " and ".join(whole.models), f"make remove SYSTEM={whole.system}"
            raise UserError(f"{name} is a part of {whole.system}: `{command}` removes {models}")
        if find_system(name):
            raise UserError(f"{name} is not assembled in {repository}: there is nothing to remove")
        if (repository / name).is_dir():
            raise UserError(f"{name} is your own model, which make never deletes: delete {repository / name} yourself")
        assembled = ", ".join(other.system for other in read_records(repository)) or "none"
        raise UserError(f"no system '{name}' in {repository}; assembled: {assembled}")
    for file in record.files:
        if not (folder := (repository / file).parent.resolve()).is_relative_to(repository.resolve()):
            raise UserError(f"{repository / file} is a link into {folder}: delete the linked folder yourself")
    for user, model in _users(record, repository):
        raise UserError(f"{user} runs the model '{model}' of {name}: remove {user} first, or give it another model")
    return record


def _users(record: Record, repository: Path) -> Iterator[tuple[str, str]]:
    """Yield each model outside the system that runs one of its models, and that model."""
    system = find_system(record.system)
    own = {*record.models, *(system.names if system else ())}
    for config in sorted(repository.glob("*/config.pbtxt")):
        user = config.parent.name
        for model in with_steps(user, repository) if user not in own else ():
            if model in record.models:
                yield user, model


def remove(record: Record, repository: Path) -> int:
    """Delete the system's files and the folders that this empties; return how many bytes they had."""
    files = {repository / file for file in record.files}
    files |= {repository / model / IGNORE for model in record.models}
    for model in record.models:
        files |= {*_copied_configs(model, repository), *tuned_configs(repository / model)}
    # The record goes last: after an interruption, the same command finds what is left.
    ordered = [*files, repository / record.system / RECORD]
    size = 0
    for file in ordered:
        with contextlib.suppress(FileNotFoundError):
            size += file.stat().st_size
            file.unlink()
    folders = {folder for file in ordered for folder in file.relative_to(repository).parents}
    # Triton requires a version's folder, even of a model without files.
    folders |= {
        version.relative_to(repository) for model in record.models for version in (repository / model).glob("[0-9]*")
    }
    folders |= {Path(model) for model in record.models}
    for folder in sorted(folders - {Path()}, key=lambda folder: len(folder.parts), reverse=True):
        with contextlib.suppress(OSError):  # not empty
            (repository / folder).rmdir()
    return size


def _copied_configs(model: str, repository: Path) -> Iterator[Path]:
    """Yield the configurations that were copied from git to a repository elsewhere and not edited since."""
    for config in (CONFIGS / model).glob("**/*.pbtxt"):
        copy = repository / config.relative_to(CONFIGS)
        if copy.is_file() and not copy.samefile(config) and filecmp.cmp(config, copy, shallow=False):
            yield copy


def remove_all(settings: Settings) -> None:
    """Delete every system that was assembled; the user's own models stay."""
    repository = settings.model_repository
    shutil.rmtree(repository / DOWNLOADS, ignore_errors=True)
    for record in read_records(repository):
        remove(record, repository)
