"""Hide the output of libraries about their own internals, and a library that they import without need."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType

STREAMS = (1, 2)  # stdout and stderr


@contextlib.contextmanager
def quiet(level: int = logging.WARNING) -> Iterator[None]:
    """Hide the libraries' warnings, which users cannot act on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(level)
        try:
            yield
        finally:
            logging.disable(before)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Hide the output of exporters: graphs, tables, progress bars and advice, part of them from C++."""
    with quiet(logging.ERROR), tempfile.TemporaryFile() as hidden:
        sys.stdout.flush()
        sys.stderr.flush()
        kept = [os.dup(number) for number in STREAMS]
        try:
            for number in STREAMS:
                os.dup2(hidden.fileno(), number)
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, original in zip(STREAMS, kept, strict=True):
                os.dup2(original, number)
                os.close(original)


@contextlib.contextmanager
def without_scikit_learn() -> Iterator[None]:
    """Let sentence_transformers be imported without scikit-learn, which it needs to evaluate models.

    That takes 1 of the 10 s of CPU time in which a small model is assembled.
    """
    names = ("sklearn", "sklearn.metrics")
    if names[0] in sys.modules:
        yield
        return
    for name in names:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
        sys.modules[name].__dict__["__getattr__"] = lambda _: None  # whatever is imported from it
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
