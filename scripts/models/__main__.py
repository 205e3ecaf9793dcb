"""Assemble the systems of SYSTEMS that are not in place (python -m scripts.models)."""

from __future__ import annotations

import os

from scripts.common.cli import run
from scripts.common.settings import Settings
from scripts.models.assemble import assemble_all


def main() -> None:
    settings = Settings.load()
    os.environ.pop("HF_TOKEN", None)  # hide it from code that comes with a model
    assemble_all(settings)


if __name__ == "__main__":
    run(main)
