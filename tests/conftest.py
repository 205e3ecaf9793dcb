"""Keep the developer's settings out of the tests: those of .env, of the shell, and of make's command line."""

import os
import tempfile
from pathlib import Path

from dotenv import dotenv_values

# Removed when the test run ends. Tests that generate secrets write them here.
_folder = tempfile.TemporaryDirectory(prefix="settings-")

for _name in dotenv_values(Path(__file__).parents[1] / ".env.example"):
    os.environ.pop(_name, None)
os.environ["TRITON_SETTINGS_FILE"] = f"{_folder.name}/.env"
# From here on, every setting in the environment comes from a test.
os.environ["TRITON_SETTINGS_NAMES"] = "*"
# Import Locust before any test module does, without gevent's patches: they end pytest-xdist's workers.
os.environ["LOCUST_SKIP_MONKEY_PATCH"] = "1"
import locust  # noqa: E402, F401

del os.environ["LOCUST_SKIP_MONKEY_PATCH"]
