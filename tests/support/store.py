"""Keep the systems that tests assemble, so that equal ones are assembled once on this machine.

They lie in `~/.cache/triton-transformers-tests`, below a name for all that decides what is made of a checkpoint: code,
packages and CPU. Several processes may use them at once.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import platform
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from export import assemble
from export.catalogue import Job, Outcome, Recipe
from export.recipes import pipeline
from export.recipes.text import recipe as text
from triton_transformers.files import exclusive
from triton_transformers.settings import ROOT

STORE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "triton-transformers-tests"
CODE = ("export", "serving", "tests/support/neuron_stand_in", "triton_transformers", "uv.lock")
UNUSED_S = 24 * 3600  # then, other code made it
NOWHERE = Path()
assemble_anew = assemble.run_recipe


def digest(folders: Iterable[Path], *facts: object) -> str:
    """Return a name for the files in these folders, and for these facts."""
    hashed = hashlib.sha256(repr(facts).encode())
    for folder in folders:
        files = (path for path in (folder, *folder.rglob("*")) if path.is_file())
        for file in sorted(file for file in files if file.suffix not in (".md", ".pyc")):
            content = file.read_bytes()
            hashed.update(f"\0{file.relative_to(folder)} {len(content)}\0".encode() + content)
    return hashed.hexdigest()[:32]


@functools.cache
def shelf() -> Path:
    """Return the folder of what today's code makes. Delete what other code made and nobody used for a day."""
    cpu = {line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("model name", "flags"))}
    folder = STORE / digest((ROOT / name for name in CODE), platform.python_version(), sorted(cpu))
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    for other in STORE.iterdir():
        if time.time() - other.stat().st_mtime > UNUSED_S:
            shutil.rmtree(other, ignore_errors=True)
    return folder


@contextmanager
def stored() -> Iterator[None]:
    """Let this process take equal systems from the store, and make none that depends on the moment.

    Each model is compared with few texts, because the tests send texts of their own, and the graphs of a pipeline are
    served however long they take.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "PARITY_TEXTS", 1)
        patch.setattr(pipeline, "WORTHWHILE", 0)
        patch.setattr(assemble, "run_recipe", run_recipe)
        yield


def run_recipe(recipe: Recipe, job: Job, name: str) -> Outcome:
    """Do as assemble.run_recipe, or fill the folder with what an equal job made before."""
    draft = job.draft.folder if job.draft else NOWHERE  # nowhere, too, if the text itself proposes the tokens
    order = replace(job, weights=NOWHERE, folder=NOWHERE, draft=None)
    sources = [folder for folder in (job.weights, draft) if folder != NOWHERE]
    kept = shelf() / digest(sources, recipe, order, bool(job.draft), text.PARITY_TEXTS, pipeline.WORTHWHILE)
    with exclusive(kept.with_suffix(".lock"), "another test assembles the same"):
        if not kept.exists():
            outcome = assemble_anew(recipe, job, name)
            with tempfile.TemporaryDirectory(dir=shelf()) as work:
                shutil.copytree(job.folder, f"{work}/models", symlinks=True)
                Path(work, "outcome").write_bytes(pickle.dumps(outcome))
                Path(work).rename(kept)
            return outcome
    shutil.copytree(kept / "models", job.folder, symlinks=True, dirs_exist_ok=True)
    return pickle.loads((kept / "outcome").read_bytes())
