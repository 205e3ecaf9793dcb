"""Assemble the systems of SYSTEMS that are not in place (python -m export)."""

from __future__ import annotations

import os

from export.assemble import assemble_all
from triton_transformers.cli import run
from triton_transformers.settings import Settings


def main() -> None:
    settings = Settings.load()
    os.environ.pop("HF_TOKEN", None)  # hide it from code that comes with a model
    assemble_all(settings)


if __name__ == "__main__":
    run(main)
