"""Systems that a module's tests assemble and run in their own process, each once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from triton_transformers.models.exporters.served import ServedSystem, python_backend


@contextmanager
def systems_once(
    assemble: Callable[[Path, Path, str], None], folders: pytest.TempPathFactory
) -> Iterator[Callable[[Path, str], ServedSystem]]:
    """Yield a function that runs the system `search` of some weights in a format.

    `assemble` gets the weights, the folder to fill and the format.
    """
    systems = []

    @functools.cache
    def served(weights: Path, format: str) -> ServedSystem:
        folder = folders.mktemp(f"{weights.name}-{format}")
        assemble(weights, folder, format)
        systems.append(ServedSystem("search", folder))
        return systems[-1]

    with python_backend():
        yield served
        for system in systems:
            system.close()
