"""python -m scripts.models: assemble what SYSTEMS names, unless it is in place."""

from __future__ import annotations

import argparse

from scripts.cli import run
from scripts.models.repository import assemble_all, remove_all
from scripts.settings import Settings


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.models", description="Assemble what SYSTEMS names.")
    parser.add_argument("--clean", action="store_true", help="remove what was assembled, and nothing else")
    clean = parser.parse_args().clean
    (remove_all if clean else assemble_all)(Settings.load())


if __name__ == "__main__":
    run(main)
