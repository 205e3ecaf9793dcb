"""Stop an assembly that takes far more memory than its files explain.

transformers builds what a configuration asks for, however small the weights are.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from triton_transformers.settings import UserError

# An assembly has its libraries (1 GB), and the weights in some forms: as they are, in float32, in graphs, compiled.
SPARE_BYTES, TIMES = 6 << 30, 16
PERIOD_S = 0.1


class _TooMuch(BaseException):
    """Derives from BaseException, because code that falls back to another way catches Exception."""


@contextmanager
def limited_memory(name: str, weights: Path) -> Iterator[None]:
    """Raise UserError within the block once this process has more memory than its limit."""
    from serving.triton.memory import process_memory

    files = (Path(folder, name) for folder, _, names in os.walk(weights, followlinks=True) for name in names)
    limit = SPARE_BYTES + TIMES * sum(path.stat().st_size for path in files if path.is_file())
    before = process_memory()  # of the assembly of another system
    thread, ended = ctypes.c_ulong(threading.get_ident()), threading.Event()

    def watch() -> None:
        while not ended.wait(PERIOD_S):
            if process_memory() - before > limit:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_TooMuch))
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        try:
            yield
        finally:
            ended.set()
            watcher.join()
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)  # if it has not been raised yet
    except _TooMuch:
        raise UserError(
            f"{name} takes more than {limit / 1e9:.0f} GB of memory to assemble, much more than its files explain: its "
            "config.json asks for another model than the weights are of"
        ) from None
