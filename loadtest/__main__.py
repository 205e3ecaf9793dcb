"""python -m loadtest: run the comparison (compare.py)."""

from scripts.common.cli import run


def main() -> int:
    # The import takes seconds. Inside run(), Ctrl-C during it ends as quietly as later.
    from loadtest.compare import main

    return main()


if __name__ == "__main__":
    run(main)
