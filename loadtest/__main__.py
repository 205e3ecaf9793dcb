"""python -m loadtest: the comparison. See compare.py."""

from loadtest.compare import main
from scripts.cli import run

if __name__ == "__main__":
    run(main)
