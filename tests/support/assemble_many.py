"""Assemble many systems in one process. Importing PyTorch and the exporters takes longer than a small model.

Reads a JSON list of settings from standard input, one dict for each system.
"""

from __future__ import annotations

import json
import sys

from triton_transformers.cli import run
from triton_transformers.models.assemble import assemble_all
from triton_transformers.settings import Settings


def main() -> None:
    for chosen in json.load(sys.stdin):
        assemble_all(Settings.load().replace(**chosen))


if __name__ == "__main__":
    run(main)
