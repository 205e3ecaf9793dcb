"""Where things are: the folder to be written, and the compiled model."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from generator.flags import Flags
from generator.options import PYTORCH, TENSORFLOW, TRANSFORMERS
from generator.saved_model import saved_model_file


def read_folder(flags: Flags) -> Path:
    folder = Path(os.path.abspath(flags["triton_model_dir"]))
    home = nearest(folder)
    if not re.fullmatch("[A-Za-z0-9_][A-Za-z0-9_.-]*", folder.name):
        what = "its last part is the model's name: letters, digits, '_', '-' and '.'"
    elif not os.path.isdir(home):
        what = f"{home} is no folder: name another, or move it away"
    elif not os.access(home, os.W_OK | os.X_OK):
        what = f"{home} cannot be written: name another, or ask whose it is"
    else:
        return folder
    raise flags.wrong("triton_model_dir", what)


def nearest(folder: Path) -> Path:
    """It, or of the folders it lies in the first that is there."""
    return next(path for path in (folder, *folder.parents) if os.path.lexists(path))


@dataclass
class Compiled:
    """What is served: where it is, and how config.pbtxt names it."""

    path: Path
    parameter: str
    copied: bool = False  # into the model folder, where that does not have the same already


def read_compiled(flags: Flags, folder: Path | None) -> Compiled:
    said = flags["compiled_model"]
    here = Path(os.path.abspath(said))
    goes_in = flags["inf2"] and not os.path.isabs(said)
    if goes_in:
        found = compiled_for_inf2(flags, here, folder or Path())
    else:
        # Even so it is found in a container, and after the folder was moved.
        found = Compiled(here, within(folder, here) or str(here))
    if not os.path.exists(found.path):
        nowhere = f"is neither in {folder or '--triton_model_dir'} nor in {os.getcwd()}"
        what = nowhere if goes_in else f"{found.path} is not there"
    elif flags.kind == PYTORCH and not os.path.isfile(found.path):
        kind = "a folder" if os.path.isdir(found.path) else "no file"
        what = f"is {kind}; must be the file that torch.jit.save wrote"
    elif flags.kind == TENSORFLOW and not saved_model_file(found.path):
        what = "must be the folder of a SavedModel, which has a saved_model.pb"
    elif flags.kind == TRANSFORMERS and not os.path.isdir(found.path):
        what = "is no folder; must be the folder that the model was saved in"
    elif found.copied and folder and found.path in (folder, *folder.parents):
        what = "holds --triton_model_dir, so it cannot be copied into that; name another folder"
    elif found.copied and found.parameter.isdecimal():
        what = f"would be {found.parameter} in the model folder, as a version is: rename it, or say its whole path"
    elif not os.path.isabs(found.parameter) and {"config.pbtxt", "model.py"} & set(Path(found.parameter).parts):
        what = "has the name of a file that is written into the model folder: rename it"
    else:
        return found
    raise flags.wrong("compiled_model", what)


def compiled_for_inf2(flags: Flags, here: Path, folder: Path) -> Compiled:
    """In the model folder, or to be copied there. Whether it is there, whoever asks sees."""
    name = os.path.normpath(flags["compiled_model"])
    if name.split(os.sep)[0] in (os.curdir, os.pardir):
        name = here.name
    place, inside = folder / name, within(folder, here)
    if os.path.exists(here) and not inside:
        return Compiled(here, name, copied=True)
    return Compiled(here, inside) if inside and not os.path.exists(place) else Compiled(place, name)


def within(folder: Path | None, path: Path) -> str | None:
    """How it is named from the folder on, where it lies in it."""
    if folder is None:
        return None
    real = Path(os.path.realpath(path.parent)) / path.name
    for each, top in ((path, folder), (real, Path(os.path.realpath(folder)))):
        if top in (each, *each.parents):
            return str(each.relative_to(top))
    return None
