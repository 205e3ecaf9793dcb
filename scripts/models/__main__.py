"""python -m scripts.models: assemble what SYSTEMS names, unless it is in place."""

from __future__ import annotations

from scripts.cli import run
from scripts.models.repository import assemble_all
from scripts.settings import Settings


def main() -> None:
    assemble_all(Settings.load())


if __name__ == "__main__":
    run(main)
