"""Assemble the systems of SYSTEMS that are not in place; with LIST=1, list all systems (python -m scripts.models)."""

from __future__ import annotations

import os

from scripts.common.cli import run
from scripts.common.settings import Settings
from scripts.models.assemble import assemble_all
from scripts.models.listing import print_list


def main() -> None:
    settings = Settings.load()
    os.environ.pop("HF_TOKEN", None)  # hide it from code that comes with a model
    if settings.flag("LIST"):
        print_list(settings)
    else:
        assemble_all(settings)


if __name__ == "__main__":
    run(main)
