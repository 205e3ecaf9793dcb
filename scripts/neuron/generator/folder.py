"""The folder, written: all of it is made beside its place first, so that what fails on the way changes nothing."""

from __future__ import annotations

import contextlib
import fcntl
import filecmp
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from generator.order import Order
from generator.pbtxt import config_text

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
    """What is there and not written stays. Returned are the names under which what is replaced is kept."""
    hidden = {"prefix": f".{order.folder.name}.", "suffix": ".unfinished"}
    with held(order.folder) as alone:
        if alone:
            for left in order.folder.glob("{prefix}*{suffix}".format(**hidden)):  # by a run that was killed
                shutil.rmtree(left, ignore_errors=True)
        work = Path(tempfile.mkdtemp(dir=order.folder, **hidden))
        try:
            return put(make(order, command, work), order.folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[bool]:
    """No other run writes it meanwhile (False: its file system has no locks). A folder that stays empty goes again."""
    while True:
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
        try:
            alone = locked(lock, folder)
            if is_still(folder, lock):
                yield alone
                return
        finally:
            for each in missing:
                with contextlib.suppress(OSError):
                    each.rmdir()
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)  # in the tests Locust is about, whose gevent closes at its leisure
            os.close(lock)


def is_still(folder: Path, lock: int) -> bool:
    """A run that failed, and was waited for, took away what it had made."""
    try:
        return os.path.samestat(os.fstat(lock), os.stat(folder))
    except FileNotFoundError:
        return False


def locked(lock: int, folder: Path) -> bool:
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another gen_triton_model.py writes {folder}: waiting for it", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def make(order: Order, command: str, work: Path) -> dict[str, Path]:
    """All that is new: where it is, by its name in the folder, in the order in which it is put there."""
    made = {}

    def new(name: str) -> Path:
        return made.setdefault(name, work / str(len(made)))

    compiled = order.compiled
    if compiled.copied and not same(compiled.path, order.folder / compiled.parameter):
        print(f"copying {compiled.path} into {order.folder}", flush=True)
        copy = shutil.copytree if compiled.path.is_dir() else shutil.copy2
        copy(compiled.path, new(compiled.parameter))
    for name, text in texts(order, command).items():
        there = order.folder / name
        if not there.is_file() or there.read_bytes() != text.encode():
            new(name).write_text(text, encoding="utf-8")
    return made


def same(one: Path, other: Path) -> bool:
    """In content: times and sizes are alike where a build makes them so."""
    if not other.exists() or one.is_dir() != other.is_dir():
        return False
    if os.path.samefile(one, other):
        return True
    if not one.is_dir():
        return filecmp.cmp(one, other, shallow=False)
    names = sorted(os.listdir(one))
    return names == sorted(os.listdir(other)) and all(same(one / name, other / name) for name in names)


def put(made: dict[str, Path], folder: Path) -> list[str]:
    kept = []
    for name, new in made.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        old = keep(place) if os.path.lexists(place) else None
        try:
            os.replace(new, place)
        except BaseException:
            if old:
                put_back(old, place)
            raise
        if old:
            kept.append(str(old.relative_to(folder)))
    return kept


def keep(place: Path) -> Path:
    """What is about to be replaced, by another name: it may have been edited. So may those kept before it."""
    names = itertools.chain([f"{place}.old"], (f"{place}.old.{number}" for number in itertools.count(1)))
    old = next(Path(name) for name in names if not os.path.lexists(name))
    try:
        os.link(place, old)  # so that there is one at any moment
    except OSError:  # a folder, or a file system without links
        os.rename(place, old)
    return old


def put_back(old: Path, place: Path) -> None:
    if not os.path.lexists(place):
        os.rename(old, place)
    elif os.path.samefile(old, place):
        os.unlink(old)


def texts(order: Order, command: str) -> dict[str, str]:
    name, (module, overrides) = order.folder.name, BASES[order.base]
    comment = f"# {name} on AWS Neuron, made by the command below. Yours to edit, as {order.version}/model.py is.\n"
    return {
        f"{order.version}/model.py": MODEL_PY.format(name=name, base=order.base, module=module, overrides=overrides),
        "config.pbtxt": f"{comment}# {command}\n{config_text(order.config)}",
    }
