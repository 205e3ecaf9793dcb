"""Small systems that unit tests assemble and run in their own process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from export import assemble as commands
from export.catalogue import RECIPES, Job
from export.check.served import ServedSystem, Tensors, python_backend, served_system
from export.checkpoint.checkpoint import Checkpoint
from export.checkpoint.unsupported import check as check_checkpoint
from export.sources.source import Folder, Weights, open_weights
from triton_transformers.settings import Settings


def assemble(
    weights: Path, folder: Path, form: str = "onnx", task: str = "", system: str = "m", draft: Weights | None = None
) -> Path:
    """Fill the folder as `make models` does, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open_weights(Folder(weights), Settings({"ALLOW_PICKLES": "1"}), folder) as own:
        task, _ = check_checkpoint(Checkpoint(system, own.folder), task)
        commands.run_recipe(
            RECIPES[task], Job(system, task, form, own.folder, own.movable, folder, draft=draft), system
        )
    return folder


def request(texts: list[str], **columns: str | list[str]) -> Tensors:
    """Return a request with a row for each text. A single value of another input is that of each row."""
    rows = {name: values if isinstance(values, list) else [values] * len(texts) for name, values in columns.items()}
    return {
        name: np.array([[value.encode()] for value in values], np.object_)
        for name, values in {"input_text": texts, **rows}.items()
    }


def ask(folder: Path, *requests: Tensors, system: str = "m") -> list[Tensors]:
    """Return the answers to requests that arrive at once."""
    with served_system(system, folder) as served:
        return served.together([*requests])


def check(folder: Path, requests: list[Tensors], output: str, expected: list[np.ndarray], system: str = "m") -> None:
    """Fail unless an output has these values, alone and in a batch. Padding may follow them."""
    with served_system(system, folder) as served:
        for answers in (served.alone(requests), served.together(requests)):
            for answer, own in zip(answers, expected, strict=True):
                assert np.abs(own).max() > 1e-3
                np.testing.assert_allclose(answer[output][:, : own.shape[1]], own, atol=1e-4)


@contextmanager
def systems_once(folders: pytest.TempPathFactory) -> Iterator[Callable[[Path, str], ServedSystem]]:
    """Yield a function that runs the system of some weights in a format, each once."""
    systems = []

    @functools.cache
    def served(weights: Path, form: str) -> ServedSystem:
        folder = folders.mktemp(f"{weights.name}-{form}")
        systems.append(ServedSystem("m", assemble(weights, folder, form)))
        return systems[-1]

    with python_backend():
        yield served
        for system in systems:
            system.close()
