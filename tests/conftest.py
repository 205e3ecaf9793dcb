"""Keep the developer's settings out of the tests: those of .env, of the shell, and of make's command line. Fixtures."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from dotenv import dotenv_values

if TYPE_CHECKING:
    from tests.support.gateway import RunningGateway
    from tests.support.triton_stand_in import TritonStandIn

# Removed when the test run ends. Tests that generate secrets write them here.
_folder = tempfile.TemporaryDirectory(prefix="settings-")

# The stacks of a test run share this folder, so that only the first one measures the cost of the encoder's runs, which
# takes 6 seconds of CPU time. xdist's workers inherit the name from the process that starts them.
if "MEASUREMENTS_OF_TESTS" not in os.environ:
    _measurements = tempfile.TemporaryDirectory(prefix="measurements-")
    os.environ["MEASUREMENTS_OF_TESTS"] = _measurements.name

for _name in dotenv_values(Path(__file__).parents[1] / ".env.example"):
    os.environ.pop(_name, None)
os.environ["TRITON_SETTINGS_FILE"] = f"{_folder.name}/.env"
# Tiny models gain nothing from a second thread. On a busy machine, each operation would wait for it for milliseconds.
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
# From here on, every setting in the environment comes from a test.
os.environ["TRITON_SETTINGS_NAMES"] = "*"
# Import Locust before any test module does, without gevent's patches: they end pytest-xdist's workers.
os.environ["LOCUST_SKIP_MONKEY_PATCH"] = "1"
import locust  # noqa: E402, F401

del os.environ["LOCUST_SKIP_MONKEY_PATCH"]
# Before any test imports a backend.
from tests.support.python_backend import STAND_IN  # noqa: E402


@pytest.fixture(scope="module")
def one_thread():
    """Compute with one thread: tiny models gain nothing from a second one, and a sum is always rounded alike."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
def pb_utils() -> ModuleType:
    """Return the stand-in for Triton's module, with the metrics of this module's tests alone."""
    STAND_IN.metrics = {}  # type: ignore[attr-defined]
    return STAND_IN


@pytest.fixture
def converts_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert pickles in the process of the test, without limits: a process of its own imports torch for 4 seconds."""
    from export.sources import pickles

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
    from export import assemble
    from tests.support import store

    monkeypatch.setattr(assemble, "run_recipe", store.assemble_anew)


@pytest.fixture(scope="module")
def client_packages() -> Iterator[None]:
    """Make the clients importable. Importing them takes seconds, so workers that only collect the tests do not."""
    from tests.support.openai_clients import CLIENTS

    sys.path.append(str(CLIENTS))
    yield
    sys.path.remove(str(CLIENTS))


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
    from monitoring.drawing import charts

    monkeypatch.setattr(charts, "render", lambda *_: b"")
    monkeypatch.setattr(charts, "svg_data_urls", lambda *_: {"light": "data:,", "dark": "data:,"})
