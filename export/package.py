"""Pack the models of SYSTEMS into the zip that a cloud's model catalogue takes (make package)."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from zipfile import ZIP_STORED, ZipFile, ZipInfo, is_zipfile

from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from export.catalogue import find_system
from export.record import find_record, models_of
from triton_transformers.cli import err, out, run
from triton_transformers.files import exclusive
from triton_transformers.settings import Settings, UserError

TOP = "model_repository"
EXCLUDED = ("assembled.json", "__pycache__")
# The earliest time that a zip can hold. With it the same models give the same bytes, whenever they were assembled.
TIME = (1980, 1, 1, 0, 0, 0)

# A path in the zip, and the file or folder on disk.
Entry = tuple[str, Path]


def main() -> None:
    package(Settings.load())


def package(settings: Settings) -> None:
    repository, target = settings.model_repository, settings.package
    if target.is_dir():
        raise UserError(f"PACKAGE={settings['PACKAGE']} is a folder: add the name of the file")
    names = settings.systems
    models = sorted({model for name in names for model in assembled_models(name, repository)})
    with exclusive(repository, "`make models` is at work here"):
        entries = [entry for model in models for entry in entries_of(model, repository / model)]
        if is_packed(target, entries):
            out.print(f"{target}: packed already, {decimal(target.stat().st_size)}")
            return
        pack(target, entries)
    out.print(f"{target}: {', '.join(models)}, {decimal(target.stat().st_size)}")


def assembled_models(name: str, repository: Path) -> list[str]:
    """Return the Triton models of a system, or raise if any of its files is missing."""
    if record := find_record(name, repository):
        complete = record.is_complete(repository)
    else:
        complete = not find_system(name) and (repository / name / "config.pbtxt").exists()
    if not complete:
        raise UserError(f"{name} is not assembled in {repository}: make models SYSTEMS={name}")
    return models_of(name, repository)


def entries_of(name: str, path: Path) -> Iterator[Entry]:
    """Yield a model's folders and files. Resolve links, and include empty folders: an ensemble's version is one."""
    if path.is_dir():
        yield f"{TOP}/{name}/", path
        for child in sorted(path.iterdir()):
            if not child.name.startswith(".") and child.name not in EXCLUDED:
                yield from entries_of(f"{name}/{child.name}", child)
    elif path.is_file():
        yield f"{TOP}/{name}", path
    else:
        raise UserError(f"{path}: there is no such file, or it is a link to none")


def is_packed(target: Path, entries: list[Entry]) -> bool:
    """Return whether the zip holds the files as they are now.

    Compare with the time that the inode changed: a file that was moved into place keeps its older modification time.
    """
    if not is_zipfile(target):
        return False
    packed = target.stat().st_mtime
    if any(path.stat().st_ctime >= packed for _, path in entries if path.is_file()):
        return False
    with ZipFile(target) as archive:
        return archive.namelist() == [name for name, _ in entries]


def pack(target: Path, entries: list[Entry]) -> None:
    size = sum(path.stat().st_size for _, path in entries if path.is_file())
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if size > free:
        raise UserError(
            f"the package takes {decimal(size)}, but the disk of {target.parent} has only {decimal(free)} free. "
            "Make room there, or set PACKAGE to a file on another disk"
        )
    unfinished = target.with_name(target.name + ".tmp")
    columns = (TextColumn("packing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    try:
        # Stored: weights do not compress.
        with (
            ZipFile(unfinished, "w", ZIP_STORED) as archive,
            Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar,
        ):
            task = bar.add_task("", total=size)
            for name, path in entries:
                add(archive, name, path, lambda written: bar.advance(task, written))
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def add(archive: ZipFile, name: str, path: Path, advance: Callable[[int], None]) -> None:
    entry = ZipInfo(name, TIME)
    entry.create_system = 3  # Unix, so that the permissions below count
    if path.is_dir():
        entry.external_attr = (stat.S_IFDIR | 0o755) << 16
        archive.writestr(entry, b"")
        return
    entry.external_attr = (stat.S_IFREG | 0o644) << 16
    entry.file_size = os.path.getsize(path)  # makes zipfile write ZIP64
    with path.open("rb") as content, archive.open(entry, "w") as packed:
        while chunk := content.read(1 << 20):
            packed.write(chunk)
            advance(len(chunk))


if __name__ == "__main__":
    run(main)
