"""Fixtures of the unit tests."""

from __future__ import annotations

import contextlib
import ctypes
import io
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from tests.support.python_backend import python_backend

if TYPE_CHECKING:
    from tests.support.gateway import RunningGateway
    from tests.support.triton_stand_in import TritonStandIn


@pytest.fixture(scope="module", autouse=True)
def signal_stack() -> Iterator[None]:
    """Restore the stack on which the kernel calls handlers of signals.

    On a CPU with AMX, OpenVINO sets a stack of its own each time it loads its CPU plugin, and restores the former one
    when it unloads the plugin. If two plugins are unloaded in the order in which they were loaded, the kernel keeps the
    first one's stack, which is freed, and the next signal with a handler crashes the process (OpenVINO 2026.4).
    Triton's Python processes handle no signals.
    """
    libc = ctypes.CDLL(None)
    before = ctypes.create_string_buffer(24)  # stack_t
    libc.sigaltstack(None, before)
    yield
    libc.sigaltstack(before, None)


@pytest.fixture(scope="module")
def pb_utils() -> Iterator[ModuleType]:
    with python_backend() as module:
        yield module


@pytest.fixture
def converts_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert pickles in the process of the test, without limits: a process of its own imports torch for 4 seconds."""
    from triton_transformers.models import pickles

    def run_here(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            pickles.main(source, target)
        return subprocess.CompletedProcess([], 0, printed.getvalue())

    monkeypatch.setattr(pickles, "run_apart", run_here)
    monkeypatch.setattr(pickles, "limit", lambda size: None)


@pytest.fixture(scope="module")
def stored() -> Iterator[None]:
    """Take equal systems from the store."""
    from tests.support import store

    with store.stored():
        yield


@pytest.fixture
def anew(stored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assemble what may lie in the store, because the test changes how that is done."""
    from tests.support import store
    from triton_transformers.models import assemble

    monkeypatch.setattr(assemble, "run_recipe", store.assemble_anew)


@pytest.fixture
def gateway(served: tuple[RunningGateway, TritonStandIn]) -> RunningGateway:
    """Return the gateway of the module's fixture `served`."""
    return served[0]


@pytest.fixture
def triton(served: tuple[RunningGateway, TritonStandIn]) -> TritonStandIn:
    """Return the stand-in behind that gateway, without the requests of other tests."""
    served[1].received.clear()
    return served[1]


@pytest.fixture
def blank_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the charts of a report blank, because drawing them takes seconds."""
    from triton_transformers import figures

    monkeypatch.setattr(figures, "render", lambda *_: b"")
    monkeypatch.setattr(figures, "svg_data_urls", lambda *_: {"light": "data:,", "dark": "data:,"})
