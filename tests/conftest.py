"""Keep the developer's settings out of the tests: those of .env, of the shell, and of make's command line."""

import os
import tempfile
from pathlib import Path

import pytest
from dotenv import dotenv_values

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


@pytest.fixture(scope="module")
def one_thread():
    """Compute with one thread: tiny models gain nothing from a second one, and a sum is always rounded alike."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
