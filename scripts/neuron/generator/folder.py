"""Write a model folder. All new files are written to a work folder first, so that a failure changes nothing."""

from __future__ import annotations

import contextlib
import filecmp
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from generator.specification import Specification

MODEL_PY = '''"""Serve {name} on AWS Neuron. gen_triton_model.py wrote this file; it is yours to edit.

config.pbtxt names the compiled model and its cores; {base} does the rest.
"""

import sys
from pathlib import Path

import triton_python_backend_utils as pb_utils

sys.path.append(str(Path(pb_utils.__file__).parents[1]))  # Triton's backends; `neuron` is one of them

from neuron.{module} import {base}


class TritonPythonModel({base}):
    """Override a method to change what it does; super() has the original.

    {overrides}
    """
'''
BASES = {  # class: its module, and the methods to override
    "TensorModel": (
        "tensors",
        "load(path) returns the loaded model. run(inputs) runs a batch: numpy arrays by name in and out.",
    ),
    "LanguageModel": (
        "language",
        "load() returns the loaded model: any object with the generate() of Hugging Face's models.",
    ),
}


def write_folder(specification: Specification, command: str) -> list[str]:
    """Write what is new, leave everything else. Return the names under which replaced files are kept."""
    folder = specification.folder
    prefix, suffix = f".{folder.name}.", ".unfinished"
    with created(folder), tempfile.TemporaryDirectory(dir=folder, prefix=prefix, suffix=suffix) as work:
        return move_in(prepare(specification, command, Path(work)), folder)


@contextlib.contextmanager
def created(folder: Path) -> Iterator[None]:
    """Create the folder, and remove it and its new parents if they stay empty."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()


def prepare(specification: Specification, command: str, work: Path) -> dict[str, Path]:
    """Write all that is new into the work folder. Return its paths by name, in the order to move them in."""
    folder, compiled = specification.folder, specification.compiled
    paths: dict[str, Path] = {}

    def new(name: str) -> Path:
        return paths.setdefault(name, work / str(len(paths)))

    if compiled.copied and not same_content(compiled.path, folder / compiled.parameter):
        print(f"copying {compiled.path} into {folder}", flush=True)
        copy = shutil.copytree if compiled.path.is_dir() else shutil.copy2
        copy(compiled.path, new(compiled.parameter))
    for name, text in generated_files(specification, command).items():
        place = folder / name
        if not place.is_file() or place.read_bytes() != text.encode():
            new(name).write_text(text, encoding="utf-8")
    return paths


def same_content(one: Path, other: Path) -> bool:
    """Compare bytes: a reproducible build has the same times and sizes, whatever is in its files."""
    if not other.exists() or one.is_dir() != other.is_dir():
        return False
    if not one.is_dir():
        return filecmp.cmp(one, other, shallow=False)
    names = sorted(os.listdir(one))
    return names == sorted(os.listdir(other)) and all(same_content(one / name, other / name) for name in names)


def move_in(paths: dict[str, Path], folder: Path) -> list[str]:
    """Replace files, and return the free names that the old ones get: the user may have edited earlier ones too."""
    kept = []
    for name, new in paths.items():
        place, old = folder / name, None
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            if os.path.lexists(place):
                numbers = itertools.chain([""], (f".{number}" for number in itertools.count(1)))
                names = (f"{name}.old{number}" for number in numbers)
                old = next(free for free in names if not os.path.lexists(folder / free))
                os.rename(place, folder / old)
            os.replace(new, place)
        except BaseException:
            if old and not os.path.lexists(place):
                os.rename(folder / old, place)
            raise
        if old:
            kept.append(old)
    return kept


def generated_files(specification: Specification, command: str) -> dict[str, str]:
    name, model_py = specification.folder.name, f"{specification.version}/model.py"
    module, overrides = BASES[specification.base]
    comment = f"# {name} on AWS Neuron. This command wrote the file and {model_py}; both are yours to edit."
    return {
        model_py: MODEL_PY.format(name=name, base=specification.base, module=module, overrides=overrides),
        "config.pbtxt": f"{comment}\n# {command}\n{config_text(specification.config)}",
    }


# --- protobuf's text format, laid out for people: plain fields first, then one block per field ------------------------


class Enum(str):
    """A name from the schema, which is written without quotes."""


class Map(dict):
    """A field of keys and values, which is written as one entry per line."""


def config_text(config: dict) -> str:
    plain = [field(name, value) for name, value in config.items() if not isinstance(value, (dict, list))]
    blocks = [block(name, value) for name, value in config.items() if isinstance(value, (dict, list))]
    return "\n\n".join(["\n".join(plain), *blocks]) + "\n"


def block(name: str, value: dict | list) -> str:
    if isinstance(value, Map):
        return "\n".join(field(name, {"key": key, "value": entry}) for key, entry in value.items())
    if isinstance(value, list) and len(value) > 1:
        entries = ",\n".join(f"  {value_text(entry)}" for entry in value)
        return f"{name} [\n{entries}\n]"
    return field(name, value)


def field(name: str, value: object) -> str:
    message = isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict))
    return f"{name}{'' if message else ':'} {value_text(value)}"


def value_text(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(["{", *(field(name, entry) for name, entry in value.items()), "}"])
    if isinstance(value, list):
        return f"[ {', '.join(map(value_text, value))} ]" if value else "[ ]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str) and not isinstance(value, Enum):
        return '"' + re.sub(r'[\\"\x00-\x1f\x7f]', lambda match: f"\\{ord(match.group()):03o}", value) + '"'
    return str(value)
