"""The paths of the model folder and of the compiled model."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from generator.arguments import Arguments
from generator.options import PYTORCH, TENSORFLOW, TRANSFORMERS
from generator.saved_model import saved_model_file


def model_folder(arguments: Arguments) -> Path:
    folder = Path(os.path.abspath(arguments["triton_model_dir"]))
    parent = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not re.fullmatch("[A-Za-z0-9_][A-Za-z0-9_.-]*", folder.name):
        problem = "its last part is the model's name: letters, digits, '_', '-' and '.'"
    elif not os.path.isdir(parent):
        problem = f"{parent} is not a folder; choose another one, or move it away"
    elif not os.access(parent, os.W_OK | os.X_OK):
        problem = f"you cannot write to {parent}; choose another folder, or ask its owner"
    else:
        return folder
    raise arguments.error("triton_model_dir", problem)


@dataclass
class CompiledModel:
    path: Path
    parameter: str  # the COMPILED_MODEL of config.pbtxt: relative if the model lies in the model folder
    copied: bool = False  # into the model folder, unless that has the same content


def compiled_model(arguments: Arguments, folder: Path | None) -> CompiledModel:
    text = arguments["compiled_model"]
    path = Path(os.path.abspath(text))
    moves_in = arguments["inf2"] and not os.path.isabs(text)
    if moves_in:
        model = compiled_for_inf2(text, path, folder or Path())
    else:
        # A relative path stays valid in a container, and after the folder was moved.
        model = CompiledModel(path, path_within(folder, path) or str(path))
    if not os.path.exists(model.path):
        neither = f"is neither in {folder or '--triton_model_dir'} nor in {os.getcwd()}"
        problem = neither if moves_in else f"{model.path} does not exist"
    elif arguments.kind == PYTORCH and not os.path.isfile(model.path):
        kind = "a folder" if os.path.isdir(model.path) else "not a regular file"
        problem = f"is {kind}; must be the file that torch.jit.save wrote"
    elif arguments.kind == TENSORFLOW and not saved_model_file(model.path):
        problem = "must be the folder of a SavedModel, which has a saved_model.pb"
    elif arguments.kind == TRANSFORMERS and not os.path.isdir(model.path):
        problem = "is not a folder; must be the folder that the model was saved in"
    elif model.copied and folder and model.path in (folder, *folder.parents):
        problem = "contains --triton_model_dir, so it cannot be copied there; choose another folder"
    elif model.copied and model.parameter.isdecimal():
        problem = f"would look like version {model.parameter} in the model folder; rename it, or give its absolute path"
    elif not os.path.isabs(model.parameter) and {"config.pbtxt", "model.py"} & set(Path(model.parameter).parts):
        problem = "has the name of a file that is written into the model folder; rename it"
    else:
        return model
    raise arguments.error("compiled_model", problem)


def compiled_for_inf2(text: str, path: Path, folder: Path) -> CompiledModel:
    """Return the copy in the model folder, or what is to be copied there. The caller checks that it exists."""
    name = os.path.normpath(text)
    if name.split(os.sep)[0] in (os.curdir, os.pardir):
        name = path.name
    place, inside = folder / name, path_within(folder, path)
    if os.path.exists(path) and not inside:
        return CompiledModel(path, name, copied=True)
    return CompiledModel(path, inside) if inside and not os.path.exists(place) else CompiledModel(place, name)


def path_within(folder: Path | None, path: Path) -> str | None:
    """Return the path relative to the folder, also through links, or None if it lies elsewhere."""
    if folder is None:
        return None
    resolved = Path(os.path.realpath(path.parent)) / path.name
    for inner, outer in ((path, folder), (resolved, Path(os.path.realpath(folder)))):
        if outer in (inner, *inner.parents):
            return str(inner.relative_to(outer))
    return None
