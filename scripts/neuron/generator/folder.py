"""The folder, written: all of it is made beside its place first, so that what fails on the way changes nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from generator.order import Order
from generator.pbtxt import config_text
from generator.places import nearest

MODEL_PY = '''"""{name} on AWS Neuron, as gen_triton_model.py wrote it: yours to edit.

config.pbtxt says what is loaded and on which cores; {base} does the rest.
"""

import sys
from pathlib import Path

import triton_python_backend_utils as pb_utils

sys.path.append(str(Path(pb_utils.__file__).parents[1]))  # Triton's backends, of which `neuron` is one

from neuron.{module} import {base}


class TritonPythonModel({base}):
    """What you define here is done instead; super() has the original.

    {overrides}
    """
'''
BASES = {  # its module, and what can be overridden
    "TensorModel": (
        "tensors",
        "load(path): the compiled model, loaded. "
        "run(inputs): what becomes of a batch, numpy arrays by name in and out.",
    ),
    "LanguageModel": (
        "language",
        "load(): the model, loaded: anything that has the generate() of Hugging Face's models.",
    ),
}


def write(order: Order, command: str) -> list[str]:
    """What is there and not written stays. Returned are the names under which what is written over is kept."""
    hidden = f".{order.folder.name}.unfinished"
    for folder in (order.folder, *order.folder.parents):  # what a kill left of an earlier run
        shutil.rmtree(folder / hidden, ignore_errors=True)
    work = nearest(order.folder) / hidden
    try:
        made = make(order, command, work)
        for name, new in made.items():
            place = order.folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(new, place)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return [f"{name}.old" for name in made if f"{name}.old" in made]


def make(order: Order, command: str, work: Path) -> dict[str, Path]:
    """All that is new: where it is, by its name in the folder, in the order in which it is put there."""
    work.mkdir()
    made = {}

    def new(name: str) -> Path:
        return made.setdefault(name, work / str(len(made)))

    if order.compiled.copied:
        copy = shutil.copytree if order.compiled.path.is_dir() else shutil.copy2
        copy(order.compiled.path, new(order.compiled.parameter))
    for name, text in texts(order, command).items():
        old = order.folder / name
        there = old.read_bytes() if old.is_file() else None
        if there == text.encode():
            continue
        if there is not None:  # it may have been edited
            shutil.copy2(old, new(f"{name}.old"))
        new(name).write_text(text, encoding="utf-8")
    return made


def texts(order: Order, command: str) -> dict[str, str]:
    name, (module, overrides) = order.folder.name, BASES[order.base]
    comment = f"# {name} on AWS Neuron, made by the command below. Yours to edit, as {order.version}/model.py is.\n"
    return {
        f"{order.version}/model.py": MODEL_PY.format(name=name, base=order.base, module=module, overrides=overrides),
        "config.pbtxt": f"{comment}# {command}\n{config_text(order.config)}",
    }
