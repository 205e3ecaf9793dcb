"""python -m scripts.bench embedding | generation | gpt2 | text-formats | vision-formats"""

from __future__ import annotations

import argparse
import importlib

from scripts.common.cli import run

SUBJECTS = {
    "embedding": "embedding",
    "generation": "generation",
    "gpt2": "gpt2",
    "text-formats": "formats",
    "vision-formats": "formats",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench")
    parser.add_argument("subject", choices=SUBJECTS)
    subject = parser.parse_args().subject
    module = importlib.import_module(f"scripts.bench.{SUBJECTS[subject]}")
    module.main(*([subject] if SUBJECTS[subject] == "formats" else []))


if __name__ == "__main__":
    run(main)
