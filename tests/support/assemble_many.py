"""Assemble many systems in one process. Importing PyTorch and the exporters takes longer than a small model.

As a program, reads a JSON list of settings from standard input, one dict for each system.
"""

from __future__ import annotations

import json
import sys

from export.assemble import assemble_all
from tests.support.store import stored
from triton_transformers.cli import run
from triton_transformers.settings import Settings


def assemble_many(chosen: list[dict[str, str]]) -> None:
    """Do as `make models` for each of these settings."""
    with stored():
        for settings in chosen:
            assemble_all(Settings.load().replace(**settings))


if __name__ == "__main__":
    run(lambda: assemble_many(json.load(sys.stdin)))
