"""python -m scripts.models: assemble what SYSTEMS names, unless it is in place; with LIST=1, list what there is."""

from __future__ import annotations

import os

from scripts.common.cli import run
from scripts.common.settings import Settings
from scripts.models.assemble import assemble_all


def main() -> None:
    settings = Settings.load()
    os.environ.pop("HF_TOKEN", None)  # code that comes with a model is not to find it there
    if settings.flag("LIST"):
        from scripts.models.listing import print_list

        print_list(settings)
    else:
        assemble_all(settings)


if __name__ == "__main__":
    run(main)
