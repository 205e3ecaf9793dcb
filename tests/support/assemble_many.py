"""Assemble many systems in one process. Importing PyTorch and the exporters takes longer than a small model.

As a program, reads a JSON list of settings from standard input, one dict for each system.
"""

from __future__ import annotations

import json
import sys

import pytest

from tests.support import store
from triton_transformers.cli import run
from triton_transformers.models import assemble
from triton_transformers.models.exporters import text
from triton_transformers.settings import Settings


def assemble_many(chosen: list[dict[str, str]]) -> None:
    """Do as `make models` for each of these settings, but compare few texts: the tests compare texts of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "PARITY_TEXTS", 1)
        patch.setattr(assemble, "run_recipe", store.run_recipe)
        for settings in chosen:
            assemble.assemble_all(Settings.load().replace(**settings))


if __name__ == "__main__":
    run(lambda: assemble_many(json.load(sys.stdin)))
