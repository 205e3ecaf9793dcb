"""Put files that were made elsewhere into the model repository, and delete those that it no longer needs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path


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
