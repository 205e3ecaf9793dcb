"""Assemble many systems in one process. Importing PyTorch and the exporters takes longer than a small model.

Reads a JSON list of settings from standard input, one dict for each system.
"""

from __future__ import annotations

import json
import sys

from scripts.common.cli import run
from scripts.common.settings import Settings
from scripts.models.assemble import assemble_all


def main() -> None:
    for chosen in json.load(sys.stdin):
        assemble_all(Settings(Settings.load() | chosen))


if __name__ == "__main__":
    run(main)
