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
    copied: bool = False


def read_compiled(flags: Flags, folder: Path | None) -> Compiled:
    said = flags["compiled_model"]
    here = Path(os.path.abspath(said))
    found = Compiled(here, str(here))
    if flags["inf2"] and not os.path.isabs(said):
        found = compiled_for_inf2(flags, here, folder or Path())
    if not os.path.exists(found.path):
        nowhere = f"is neither in {folder or '--triton_model_dir'} nor in {os.getcwd()}"
        what = nowhere if found.copied else f"{found.path} is not there"
    elif flags.kind == PYTORCH and not os.path.isfile(found.path):
        what = "is a folder; must be the file that torch.jit.save wrote"
    elif flags.kind == TENSORFLOW and not saved_model_file(found.path):
        what = "must be the folder of a SavedModel, which has a saved_model.pb"
    elif flags.kind == TRANSFORMERS and not os.path.isdir(found.path):
        what = "is a file; must be the folder that the model was saved in"
    elif found.copied and folder and found.path in (folder, *folder.parents):
        what = "holds --triton_model_dir, so it cannot be copied into that; name another folder"
    else:
        return found
    raise flags.wrong("compiled_model", what)


def compiled_for_inf2(flags: Flags, here: Path, folder: Path) -> Compiled:
    """In the model folder, or to be copied there. Whether it is there, whoever asks sees."""
    name = os.path.normpath(flags["compiled_model"])
    inside = folder / name
    if os.path.exists(inside):
        if os.path.exists(here) and not os.path.samefile(here, inside):
            what = f"the one in the model folder is served, {here} is not copied"
            flags.warnings.append(f"--compiled_model {flags['compiled_model']}: {what}")
        return Compiled(inside, name)
    leads_out = name.split(os.sep)[0] in (os.curdir, os.pardir)
    return Compiled(here, here.name if leads_out else name, copied=True)
